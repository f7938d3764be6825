"""What config.json means where it is silent: the defaults of transformers' config classes, where registry.py has no other.

Files leave out what equals them: tools that save only differences, and the text model inside a multimodal file, whose
sizes are therefore here as well.
"""

from __future__ import annotations

from typing import Any

_QWEN: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA_2: dict[str, Any] = _GEMMA | {"query_pre_attn_scalar": 256, "sliding_window": 4096}

# Architecture -> fields of config.json.
DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": _QWEN | {"head_dim": 128},
    "Qwen3MoeForCausalLM": _QWEN
    | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "MixtralForCausalLM": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "GemmaForCausalLM": _GEMMA | {"num_key_value_heads": 16},
    "Gemma2ForCausalLM": _GEMMA_2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": _GEMMA_2
    | {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "Phi3ForCausalLM": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "SmolLM3ForCausalLM": {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
    "Olmo2ForCausalLM": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
}
