"""The architectures that are served, as a table: what each does otherwise than Llama.

To add one, put a line into FAMILIES: each entry is a field of ModelConfig with a value, or a function of the parsed
config.json. What config.json may leave out is in defaults.py, and registry.py reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from spmd_serve.models.model_config import MoEConfig

Raw = Mapping[str, Any]  # a parsed config.json (its text_config, if it has one)


# ---- what families need beyond constants --------------------------------------------------------------------------


def _all_slide(raw: Raw, layer: int) -> bool:
    return True


def _slide_if_used(raw: Raw, layer: int) -> bool:
    return bool(raw["use_sliding_window"])


def _slide_from_max_window_layers(raw: Raw, layer: int) -> bool:
    return bool(raw["use_sliding_window"] and layer >= raw["max_window_layers"])


def _slide_by_pattern(default: int) -> Callable[[Raw, int], bool]:
    """Every `pattern`-th layer is global, the others have a window."""

    def slides(raw: Raw, layer: int) -> bool:
        pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or default
        return bool((layer + 1) % pattern)

    return slides


def _sqrt_hidden(raw: Raw) -> float:
    return math.sqrt(raw["hidden_size"])


def _gemma_attn_scale(raw: Raw) -> float:
    return float(raw["query_pre_attn_scalar"] ** -0.5)


def _moe_mixtral(raw: Raw) -> MoEConfig:
    return MoEConfig(raw["num_local_experts"], raw["num_experts_per_tok"], raw["intermediate_size"])


def _moe_qwen3(raw: Raw) -> MoEConfig:
    experts = raw.get("num_local_experts") or raw["num_experts"]
    normalize = raw.get("norm_topk_prob", False)
    return MoEConfig(experts, raw["num_experts_per_tok"], raw["moe_intermediate_size"], normalize)


def _qwen3_moe_layer(raw: Raw, layer: int) -> bool:
    return layer not in (raw.get("mlp_only_layers") or ()) and (layer + 1) % raw.get("decoder_sparse_step", 1) == 0


def _smollm3_rope_layer(raw: Raw, layer: int) -> bool:
    listed = raw.get("no_rope_layers")  # despite its name, 1 is a layer that has positions
    return bool(listed[layer]) if listed else (layer + 1) % raw.get("no_rope_layer_interval", 4) != 0


def _slide_without_rope(raw: Raw, layer: int) -> bool:
    return bool(raw["use_sliding_window"]) and not _smollm3_rope_layer(raw, layer)


def _attention_bias(raw: Raw) -> bool:
    return bool(raw.get("attention_bias", False))


def _mlp_bias(raw: Raw) -> bool:
    return bool(raw.get("mlp_bias", False))


_GEMMA = {
    "norm_offset": 1.0,
    "embed_scale": _sqrt_hidden,
    "activation": "gelu_tanh",
    "qkv_bias": _attention_bias,
    "o_bias": _attention_bias,
}
_GEMMA_2 = _GEMMA | {
    "post_norms": True,
    "attn_scale": _gemma_attn_scale,
    "final_softcap": lambda raw: raw.get("final_logit_softcapping"),
}

# ---- the table ----------------------------------------------------------------------------------------------------
# "slides" (whether a layer has the sliding window), "moe_layer" and "rope_layer" are functions of (config.json, layer);
# "partial_rotary" says that the family knows heads that are rotated in part; everything else is a field of ModelConfig. A
# list of layer_types in config.json is followed for every family. What config.json leaves out: defaults.py.

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"qkv_bias": _attention_bias, "o_bias": _attention_bias, "mlp_bias": _mlp_bias},
    "MistralForCausalLM": {"slides": _all_slide},
    "Qwen2ForCausalLM": {"qkv_bias": True, "slides": _slide_from_max_window_layers},
    "Qwen3ForCausalLM": {
        "qk_norm": "head",
        "qkv_bias": _attention_bias,
        "o_bias": _attention_bias,
        "slides": _slide_from_max_window_layers,
    },
    "Qwen3MoeForCausalLM": {
        "qk_norm": "head",
        "qkv_bias": _attention_bias,
        "o_bias": _attention_bias,
        "slides": _slide_if_used,
        "moe": _moe_qwen3,
        "moe_layer": _qwen3_moe_layer,
    },
    "MixtralForCausalLM": {"moe": _moe_mixtral, "moe_layer": lambda raw, layer: True, "slides": _all_slide},
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA_2
    | {"slides": _slide_by_pattern(2), "attn_softcap": lambda raw: raw.get("attn_logit_softcapping")},
    "Gemma3ForCausalLM": _GEMMA_2 | {"slides": _slide_by_pattern(6), "qk_norm": "head"},
    "Phi3ForCausalLM": {"fused_weights": True, "slides": _all_slide, "partial_rotary": True},
    "SmolLM3ForCausalLM": {
        "qkv_bias": _attention_bias,
        "o_bias": _attention_bias,
        "mlp_bias": _mlp_bias,
        "slides": _slide_without_rope,
        "rope_layer": _smollm3_rope_layer,
    },
    "Olmo2ForCausalLM": {
        "qk_norm": "full",
        "qkv_bias": _attention_bias,
        "o_bias": _attention_bias,
        "pre_norms": False,
        "post_norms": True,
    },
}
# Multimodal files: the text model inside, and the model_type of its part of config.json.
ALIASES = {
    "Gemma3ForConditionalGeneration": ("Gemma3ForCausalLM", "gemma3_text"),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", "mistral"),
}
