"""Configurations of transformers with every size made small, whatever the architecture.

    config = make_tiny_config(transformers.LlamaConfig)

A configuration says its sizes by name, and most architectures share the names. So a table of names
makes most of them small. What an architecture needs besides is given by the caller.
"""

from typing import Any

VOCABULARY = 64
"""Of tokens. A class of an image is one of it, too."""
WIDTH = 32
LAYERS = 2
HEADS = 2
LENGTH = 64
"""The most positions that a model has room for."""
IMAGE = 32
"""Pixels a side."""
DROPOUT = 0.1

_NAMES: dict[int, str] = {
    VOCABULARY: """vocab_size n_vocab decoder_vocab_size text_vocab_size vocab_size_per_layer_input
        max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx context_length
        max_source_positions max_target_positions seq_length intermediate_size n_inner ffn_dim d_ff
        encoder_ffn_dim decoder_ffn_dim ffn_hidden_size d_inner hidden_dim ffn_size
        intermediate_size_mlp max_seq_length block_sparse_size dense_intermediate_size
        shared_intermediate_size max_2d_position_embeddings""",
    WIDTH: """hidden_size d_model n_embd embed_dim dim emb_dim encoder_hidden_size projection_dim
        decoder_hidden_size word_embed_proj_dim attention_hidden_size embedding_size width
        image_size lru_width hidden_sizes_single feat_extract_dim embed_size
        true_hidden_size conv_hidden_size cross_attention_hidden_size""",
    16: """head_dim d_kv kv_channels v_head_dim qk_nope_head_dim moe_intermediate_size q_lora_rank
        kv_lora_rank shared_expert_intermediate_size expert_ffn_hidden_size attention_head_dim
        num_mel_bins mlp_hidden_size linear_key_head_dim linear_value_head_dim mamba_head_dim
        global_head_dim rotary_dim moe_shared_expert_intermediate_size local_head_dim
        moe_latent_size codebook_size proj_dim patch_dim hidden_size_per_layer_input
        swa_head_dim swa_v_head_dim index_head_dim expert_dim relation_dim""",
    8: """qk_rope_head_dim patch_size state_size mamba_d_state ssm_state_size chunk_size
        sliding_window window_size mamba_chunk_size attention_window local_attention
        attention_chunk_size lin_attn_chunk_size num_buckets position_buckets
        sliding_window_size rope_head_dim""",
    4: """num_experts num_local_experts n_routed_experts moe_num_experts time_step_rank
        mamba_num_heads mamba_n_heads num_attention_heads_mamba num_routed_experts
        linear_num_value_heads mamba_dt_rank index_topk num_memory_blocks""",
    LAYERS: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads num_experts_per_tok num_experts_per_token top_k moe_top_k
        moe_topk num_decoder_layers encoder_layerdrop_layers depth moe_k num_selected_experts
        linear_num_key_heads num_self_attends_per_block num_encoder_layers num_stages_layers
        num_attention_heads_per_layer expert_capacity_factor num_query_heads index_n_heads
        num_channels_per_head swa_num_attention_heads num_codebooks decoder_num_layers
        encoder_num_layers decoder_num_heads encoder_num_heads decoder_num_attention_heads
        num_cross_attention_layers decoder_num_hidden_layers encoder_num_hidden_layers""",
    1: """num_key_value_heads num_kv_heads n_group topk_group n_shared_experts mamba_n_groups
        n_groups first_k_dense_replace num_shared_experts num_dense_layers num_blocks
        encoder_num_key_value_heads decoder_num_key_value_heads decoder_start_token_id
        num_global_key_value_heads swa_num_key_value_heads bos_token_id""",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "dropout_rate",
    "embedding_dropout",
    "dropout_p",
    "residual_dropout",
    "emb_dropout",
    "ffn_dropout",
)
FEATURES: dict[str, Any] = {
    "use_cache": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "use_mems_train": False,
} | dict.fromkeys(_DROPOUTS, DROPOUT)


def make_tiny_config(kind: type, settings: dict[str, Any] | None = None) -> Any:
    """A configuration of this class; `settings` are its own, with those of its parts in dicts."""
    settings = dict(settings or {})
    parts = {}
    for name, part in getattr(kind, "sub_configs", {}).items():
        given = settings.pop(name, {})
        # a part of any class is made by the caller
        parts[name] = given if not _is_concrete(part) else make_tiny_config(part, given).to_dict()
    return kind(**{**_small_settings(kind), **parts, **settings})


def _is_concrete(kind: type) -> bool:
    return hasattr(kind, "model_type") and kind.__name__ not in ("AutoConfig", "PreTrainedConfig")


def _small_settings(kind: type) -> dict[str, Any]:
    known = _find_defaults(kind)
    small = {
        name: value
        for name, value in {**SIZES, **FEATURES}.items()
        # a list is one size for each stage, which another name says the number of
        if name in known and not isinstance(known[name], (list, tuple))
    }
    if "kv_lora_rank" in known:  # latent attention, whose heads are not shared
        small |= {"num_key_value_heads": HEADS, "head_dim": SIZES["qk_rope_head_dim"]}
    kinds = known.get("layer_types")
    if isinstance(kinds, (list, tuple)):
        # one of each kind
        distinct = list(dict.fromkeys(kinds))
        small["layer_types"] = (distinct * LAYERS)[: max(LAYERS, len(distinct))]
        small["num_hidden_layers"] = len(small["layer_types"])
    return small


def _find_defaults(kind: type) -> dict[str, Any]:
    """The names of a configuration's settings, with their defaults; those that it renames too."""
    made = kind()
    known = {**vars(made), **made.to_dict()}
    return known | {name: known.get(real) for name, real in kind.attribute_map.items()}
