"""What an architecture of transformers needs besides small sizes, by the names of its config."""

from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "diffllama": {"attention_dropout": 0.0},
    "dory": {"num_hidden_layers": 2},
    "dots3_note_text": {"shared_experts_intermediate_size": 16},
    "esmc": {"num_key_value_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "mobilebert": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "mpt": {"attn_pdrop": 0},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [2, 4],
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
        "num_buckets": 2,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": 64,
        "shape_embed_dim": 16,
        "shape_vocab_size": 64,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
