"""Models of `transformers` of every kind, tiny, from random weights, in train mode with dropout.

Each says how it is wrapped per layer, and what is in the way of wrapping it whole, if anything is:
the line on which Python asks for the value of a tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

P = 0.2
"""Of each dropout."""
VOCABULARY = 64

Batch = dict[str, Tensor]


def _find_release() -> int:
    try:
        return int(version("transformers").partition(".")[0])
    except PackageNotFoundError:
        return 0


IS_5 = _find_release() >= 5
"""Whether the names of modules are those of transformers 5, whose experts are one module."""


@dataclass(frozen=True)
class Architecture:
    model: str
    """Its class in `transformers`."""
    config: str
    settings: dict[str, Any]
    batch: Callable[[], Batch]
    layers: str
    """What selects its layers."""
    layers_refused: str | None = None
    """Why no layer can be traced: the error's line, and the operator that asks."""
    whole_refused: str | None = None
    """The same of the model as a whole."""
    parts: str | None = None
    """What can be wrapped where a layer cannot."""
    draws: bool = True
    """Whether it has dropout."""
    num_wrapped: int = 2
    slow: tuple[str, ...] = ()
    """Which of its tests take long: `layers`, `whole`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the library wants to be told besides."""

    def build(self, **settings: Any) -> nn.Module:
        import transformers

        config = getattr(transformers, self.config)(**{**self.settings, **settings})
        return getattr(transformers, self.model)(config).train()


# --- batches -------------------------------------------------------------------------------------


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 8))


def text() -> Batch:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


def padded_text() -> Batch:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    return text() | {"attention_mask": mask}


def text_to_classify() -> Batch:
    return padded_text() | {"labels": torch.tensor([0, 1])}


def latent_text() -> Batch:
    tokens = _tokens()
    return {"inputs": tokens, "labels": tokens}


def text_and_images() -> Batch:
    return {"input_ids": _tokens(), "pixel_values": torch.randn(2, 3, 16, 16)}


def images(size: int) -> Callable[[], Batch]:
    return lambda: {
        "pixel_values": torch.randn(2, 3, size, size),
        "labels": torch.tensor([0, 1]),
    }


def sound_to_transcribe() -> Batch:
    return {
        "input_values": torch.randn(2, 400),
        "labels": torch.tensor([[3, 4, 5], [6, 7, -100]]),
    }


def sound_to_classify() -> Batch:
    return {"input_values": torch.randn(2, 400), "labels": torch.tensor([0, 1])}


def spectrograms() -> Batch:
    return {"input_values": torch.randn(2, 32, 16), "labels": torch.tensor([0, 1])}


def spectrograms_to_transcribe() -> Batch:
    return {"input_features": torch.randn(2, 8, 32), "labels": _tokens()}


# --- settings ------------------------------------------------------------------------------------

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_TEXT = {**_SIZE, **_TOKENS, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
_DECODER = {**_TEXT, "use_cache": False, "attention_dropout": P}
_GROUPED = {**_DECODER, "num_key_value_heads": 1}
_ENCODER = {**_TEXT, "hidden_dropout_prob": P, "attention_probs_dropout_prob": P}
_VISION = {**_SIZE, "hidden_dropout_prob": P, "attention_probs_dropout_prob": P}
_EXPERTS = {
    **_GROUPED,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    # they loop over the experts hit; it is all that transformers 4 has
    "experts_implementation": "eager",
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": P,
    "use_cache": False,
    "decoder_start_token_id": 0,
}
_BART = {
    **_TOKENS,
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": P,
    "attention_dropout": P,
    "activation_dropout": P,
    "use_cache": False,
    "decoder_start_token_id": 0,
}
_WAVES = {
    **_SIZE,
    "vocab_size": 32,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": P,
    "attention_dropout": P,
    "activation_dropout": P,
    "feat_proj_dropout": P,
    "final_dropout": P,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}
_MAMBA = {
    **_TOKENS,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "state_size": 4,
    "num_hidden_layers": 2,
    "use_cache": False,
}
_EAGER = {"attn_implementation": "eager"}
# without padding, and no token that could be it, nothing looks at the tokens
_UNPADDED = {"pad_token_id": None}


# In train mode many models ask `if torch.rand([]) < self.layerdrop` of each layer, even if it is 0.
def _asks(file: str, function: str = "forward", op: str = "_local_scalar_dense") -> str:
    return rf"needed at {file}\.py:\d+ \({function}\), through aten\.{op}\.default"


_ASKS_FOR_LABELS = _asks("(modeling_wav2vec2|loss_ctc)", "(forward|ForCTCLoss)", op="masked_select")


# --- the table -----------------------------------------------------------------------------------

ARCHITECTURES = {
    # decoders
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **_TOKENS,
            **_UNPADDED,
            "vocab_size": VOCABULARY,
            "n_positions": 32,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "resid_pdrop": P,
            "embd_pdrop": P,
            "attn_pdrop": P,
            "use_cache": False,
            "loss_type": "ForCausalLM",
        },
        text,
        "transformer.h.*",
    ),
    "llama": Architecture(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_GROUPED, **_EAGER},
        padded_text,
        "model.layers.*",
        slow=("whole",),
    ),
    "gpt_neox": Architecture(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**_DECODER, **_UNPADDED, "hidden_dropout": P},
        text,
        "gpt_neox.layers.*",
        slow=("layers", "whole"),
    ),
    "opt, layers dropped": Architecture(
        "OPTForCausalLM",
        "OPTConfig",
        {
            **_TOKENS,
            **_EAGER,
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 64,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 32,
            "dropout": P,
            "attention_dropout": P,
            "layerdrop": 0.5,
            "use_cache": False,
        },
        padded_text,
        "model.decoder.layers.*",
        whole_refused=_asks("modeling_opt"),
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        "BloomConfig",
        {
            **_TOKENS,
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 2,
            "hidden_dropout": P,
            "attention_dropout": P,
            "use_cache": False,
        },
        padded_text,
        "transformer.h.*",
        slow=("layers", "whole"),
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_GROUPED, **_EAGER, "head_dim": 16, "sliding_window": 4},
        padded_text,
        "model.layers.*",
        slow=("layers", "whole"),
    ),
    "xlnet": Architecture(
        "XLNetLMHeadModel",
        "XLNetConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "n_layer": 2,
            "n_head": 2,
            "d_inner": 64,
            "dropout": P,
            "use_mems_train": False,
        },
        padded_text,
        "transformer.layer.*",
        slow=("layers", "whole"),
    ),
    # encoders
    "bert": Architecture(
        "BertForMaskedLM",
        "BertConfig",
        {**_ENCODER, **_EAGER},
        padded_text,
        "bert.encoder.layer.*",
    ),
    "bert, fused attention": Architecture(
        "BertForMaskedLM",
        "BertConfig",
        _ENCODER,
        padded_text,
        "bert.encoder.layer.*",
    ),
    "albert, one layer applied twice": Architecture(
        "AlbertForMaskedLM",
        "AlbertConfig",
        {**_ENCODER, **_EAGER, "embedding_size": 16},
        padded_text,
        "**.albert_layers.*",
        num_wrapped=1,
        slow=("whole",),
    ),
    "distilbert": Architecture(
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        {
            **_EAGER,
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 64,
            "max_position_embeddings": 32,
            "dropout": P,
            "attention_dropout": P,
        },
        text_to_classify,
        "**.layer.*",
        slow=("layers", "whole"),
    ),
    "deberta": Architecture(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {
            **_ENCODER,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
        padded_text,
        "deberta.encoder.layer.*",
        slow=("layers", "whole"),
    ),
    # encoders with decoders
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        _T5,
        padded_text,
        "**.block.*",
        num_wrapped=4,
        slow=("whole",),
    ),
    "bart": Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        {**_BART, **_EAGER},
        padded_text,
        "model.*coder.layers.*",
        num_wrapped=4,
    ),
    "bart, one layer reads the encoder": Architecture(
        "BartForConditionalGeneration",
        "BartConfig",
        {**_BART, "decoder_layers": 1},
        padded_text,
        "model.*coder.layers.*",
        num_wrapped=3,
    ),
    # vision
    "vit": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        {**_VISION, "image_size": 16, "patch_size": 8},
        images(16),
        "vit.layers.*" if IS_5 else "vit.encoder.layer.*",
    ),
    "swin, paths dropped": Architecture(
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 2,
            "hidden_dropout_prob": P,
            "attention_probs_dropout_prob": P,
            "drop_path_rate": 0.5,
        },
        images(16),
        "swin.encoder.layers.*",
        slow=("layers", "whole"),
    ),
    "convnext, paths dropped": Architecture(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_stages": 2,
            "patch_size": 2,
            "drop_path_rate": 0.5,
        },
        images(16),
        "**.stages.*",
    ),
    "resnet, batch norm": Architecture(
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1], "layer_type": "basic"},
        images(32),
        "**.stages.*",
        draws=False,
    ),
    "mobilenet, batch norm": Architecture(
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        {"image_size": 32, "depth_multiplier": 0.25, "classifier_dropout_prob": P},
        images(32),
        "mobilenet_v2.layer.*",
        num_wrapped=16,
        slow=("layers", "whole"),
    ),
    "clip, two towers": Architecture(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**_TEXT, "attention_dropout": P, "projection_dim": 16},
            "vision_config": {
                **_SIZE,
                "attention_dropout": P,
                "image_size": 16,
                "patch_size": 8,
                "projection_dim": 16,
            },
            "projection_dim": 16,
        },
        text_and_images,
        "**.encoder.layers.*",
        num_wrapped=4,
        slow=("layers", "whole"),
        extra={"return_loss": True},
    ),
    # audio
    "wav2vec2": Architecture(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        _WAVES,
        sound_to_transcribe,
        "wav2vec2.encoder.layers.*",
        whole_refused=_ASKS_FOR_LABELS,
    ),
    "wav2vec2, masked with numpy": Architecture(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {**_WAVES, "apply_spec_augment": True, "mask_time_prob": 0.5, "mask_time_length": 2},
        sound_to_transcribe,
        "wav2vec2.feature_extractor, wav2vec2.encoder.layers.*",
        whole_refused=_ASKS_FOR_LABELS,
        num_wrapped=3,
        slow=("layers", "whole"),
    ),
    "hubert": Architecture(
        "HubertForSequenceClassification",
        "HubertConfig",
        _WAVES,
        sound_to_classify,
        "hubert.encoder.layers.*",
        slow=("layers", "whole"),
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_BART,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "apply_spec_augment": False,
        },
        spectrograms_to_transcribe,
        "model.*coder.layers.*",
        num_wrapped=4,
    ),
    "audio spectrogram transformer": Architecture(
        "ASTForAudioClassification",
        "ASTConfig",
        {
            **_VISION,
            "num_mel_bins": 16,
            "max_length": 32,
            "patch_size": 8,
            "time_stride": 8,
            "frequency_stride": 8,
        },
        spectrograms,
        "**.layers.*" if IS_5 else "**.layer.*",
        slow=("whole",),
    ),
    # mixtures of experts
    "llama4, every expert for every token": Architecture(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_GROUPED,
            **_EAGER,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 32,
            "attention_chunk_size": 4,
        },
        padded_text,
        "model.layers.*",
        slow=("whole",),
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_EXPERTS, "num_local_experts": 4, "router_jitter_noise": 0.1},
        padded_text,
        "model.layers.*",
        layers_refused=_asks("modeling_mixtral", op="nonzero"),
        whole_refused=_asks("modeling_mixtral", op="nonzero"),
        parts="model.layers.*.self_attn" + ("" if IS_5 else ", **.experts.*"),
        num_wrapped=2 if IS_5 else 10,
    ),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **_EXPERTS,
            **_EAGER,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        padded_text,
        "model.layers.*",
        layers_refused=_asks("modeling_qwen2_moe", op="nonzero"),
        whole_refused=_asks("modeling_qwen2_moe", op="nonzero"),
        parts="model.layers.*.self_attn, **.mlp.gate",
        num_wrapped=4,
    ),
    "granite_moe": Architecture(
        "GraniteMoeForCausalLM",
        "GraniteMoeConfig",
        {**_EXPERTS, **_EAGER, "num_local_experts": 4},
        padded_text,
        "model.layers.*",
        layers_refused=_asks("modeling_granitemoe", op="(_local_scalar_dense|nonzero)"),
        whole_refused=_asks("modeling_granitemoe", op="(_local_scalar_dense|nonzero)"),
        parts="model.layers.*.self_attn",
        slow=("layers", "whole"),
    ),
    "switch": Architecture(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {
            **_T5,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_experts": 4,
            "expert_capacity": 8,
            # it is written in place, to the tensor that the residual connection reads
            "router_jitter_noise": 0.0,
        },
        padded_text,
        "**.block.*",
        layers_refused=_asks("modeling_switch_transformers", op="nonzero"),
        whole_refused=_asks("modeling_switch_transformers", op="nonzero"),
        parts="**.router",
    ),
    # state spaces and recurrences
    "mamba": Architecture(
        "MambaForCausalLM", "MambaConfig", _MAMBA, text, "backbone.layers.*", draws=False
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {**_MAMBA, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4},
        text,
        "backbone.layers.*",
        draws=False,
        slow=("whole",),
    ),
    "rwkv": Architecture(
        "RwkvForCausalLM",
        "RwkvConfig",
        {
            **_TOKENS,
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "attention_hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "context_length": 16,
            "use_cache": False,
        },
        text,
        "rwkv.blocks.*",
        draws=False,
        slow=("layers", "whole"),
    ),
    # many inputs to few latents
    "perceiver": Architecture(
        "PerceiverForMaskedLM",
        "PerceiverConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_latents": 32,
            "num_latents": 4,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "max_position_embeddings": 8,
            "qk_channels": 16,
            "v_channels": 32,
            "attention_probs_dropout_prob": P,
        },
        latent_text,
        "**.self_attends.*",
        slow=("layers", "whole"),
    ),
}

# --- what transformers 5 has besides -------------------------------------------------------------

_WITH_HEADS = {**_GROUPED, **_EAGER, "head_dim": 16}
_ROUTED = {
    **_WITH_HEADS,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def _decoder(name: str, settings: dict[str, Any], config: str = "", **more: Any) -> Architecture:
    """A decoder whose tests take long: its class and its config's begin with `name`."""
    return Architecture(
        f"{name}ForCausalLM",
        config or f"{name}Config",
        settings,
        padded_text,
        "model.layers.*",
        **{"slow": ("layers", "whole"), **more},
    )


_NEW = {
    "mixtral, experts in one product": _decoder(
        "Mixtral",
        {**_ROUTED, "experts_implementation": "grouped_mm", "router_jitter_noise": 0.1},
        slow=(),
    ),
    "mixtral, experts in a batch": _decoder(
        "Mixtral", {**_ROUTED, "experts_implementation": "batched_mm"}
    ),
    "olmo_hybrid, linear attention": _decoder("OlmoHybrid", {**_WITH_HEADS, **_LINEAR}),
    "qwen3_5_moe, linear attention": _decoder(
        "Qwen3_5Moe",
        {**_ROUTED, **_LINEAR, "shared_expert_intermediate_size": 16},
        "Qwen3_5MoeTextConfig",
    ),
    "lfm2_moe, convolutions": _decoder(
        "Lfm2Moe",
        {**_ROUTED, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
        draws=False,
    ),
    "minimax_m2": _decoder("MiniMaxM2", _ROUTED),
    "gemma4, embeddings for each layer": _decoder(
        "Gemma4",
        {
            **_WITH_HEADS,
            "global_head_dim": 16,
            "sliding_window": 4,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
        "Gemma4TextConfig",
    ),
    "nemotron_h, state spaces and attention": _decoder(
        "NemotronH",
        {
            **_ROUTED,
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 4,
        },
    ),
}

if IS_5:
    import transformers

    known = dir(transformers)  # as hasattr would import each
    ARCHITECTURES |= {name: a for name, a in _NEW.items() if a.model in known}
