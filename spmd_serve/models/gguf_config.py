"""config.json and generation_config.json from a GGUF file's metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf import TokenType

from spmd_serve.errors import UnsupportedModelError, WeightsError
from spmd_serve.models.families import FAMILIES
from spmd_serve.models.gguf_file import GgufFile

# Tokens that end a turn, by which chat models are stopped although the file names only one EOS.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
# Control tokens that end a text in every model that has them. A chat model's file names its end of turn as the EOS instead.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")


def write_configs(file: GgufFile, folder: Path) -> None:
    """Write config.json and generation_config.json.

    Raises:
        WeightsError, UnsupportedModelError: metadata that is missing or describes something unknown.
    """
    eos = _eos_token_ids(file)
    special = {"eos_token_id": list(eos), "bos_token_id": file.meta.get("tokenizer.ggml.bos_token_id")}
    (folder / "config.json").write_text(json.dumps(_config(file) | special, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(special, indent=2))


def _config(file: GgufFile) -> dict[str, Any]:
    heads = file.require("attention.head_count")
    kv_heads = file.get("attention.head_count_kv", heads)
    ffn = file.require("feed_forward_length")
    if any(isinstance(size, list) for size in (heads, kv_heads, ffn)):
        raise UnsupportedModelError("the GGUF file has layers of different sizes, which is not supported")
    hidden, blocks = file.require("embedding_length"), file.require("block_count")
    counts = {"head_count": heads, "head_count_kv": kv_heads, "block_count": blocks}
    for name, count in counts.items():
        if not 1 <= count <= max(hidden, len(file.tensors)):
            raise WeightsError(f"the GGUF file is damaged ({name} is {count}); fetch it again")
    if "token_embd.weight" not in file.tensors:
        raise UnsupportedModelError("the GGUF file has no token embeddings (a vocabulary or adapter alone?)")
    if not file.get("attention.causal", True):
        raise UnsupportedModelError("attention in both directions (an embedding model) is not supported")
    head_dim = file.get("attention.key_length", hidden // heads)
    rotary = file.get("rope.dimension_count", head_dim)
    if rotary != head_dim and not FAMILIES[file.architecture.hf_class].get("partial_rotary"):
        raise UnsupportedModelError(
            f"the GGUF file rotates {rotary} of a head's {head_dim} dimensions, which is not supported for {file.name}"
        )
    config: dict[str, Any] = {
        "architectures": [file.architecture.hf_class],
        "model_type": file.architecture.model_type,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": file.require("context_length"),
        "rms_norm_eps": file.require("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "dtype": "bfloat16",
    }
    scaling = _rope_scaling(file, config)
    if scaling:
        config["rope_scaling"] = scaling
    specific = _SPECIFIC.get(file.name)
    return config | specific(file, config) if specific else config


def _rope_scaling(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    context = config["max_position_embeddings"]
    original = file.get("rope.scaling.original_context_length", context)
    if "rope_freqs.weight" in file.tensors:
        # Llama 3.1: the divisors of the frequencies, already worked out. longrope takes such a list as it is.
        factors = file.values("rope_freqs.weight").tolist()
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    if "rope_factors_long.weight" in file.tensors:
        return {
            "rope_type": "longrope",
            "long_factor": file.values("rope_factors_long.weight").tolist(),
            "short_factor": file.values("rope_factors_short.weight").tolist(),
            "attention_factor": file.get("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original,
        }
    # The first files call it scale_linear; 0 is none too.
    factor = file.get("rope.scaling.factor", file.get("rope.scale_linear")) or 1.0
    kind = file.get("rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"the GGUF file scales its rotary embedding by '{kind}', which is not supported")
    # GGUF states the context after scaling, config.json the one before it.
    config["max_position_embeddings"] = original
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        scaling |= {f"beta_{end}": file.get(f"rope.scaling.yarn_beta_{end}") for end in ("fast", "slow")}
        if (copied := file.get("rope.scaling.yarn_attn_factor")) is not None:
            # Which of config.json's fields converters copied there is not said: the one is 1 or more, the other takes back.
            scaling["attention_factor" if copied >= 1 else "attn_factor"] = copied
    return scaling


def _mixtral(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    if not file.get("expert_count"):
        return {}
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
    }


def _qwen3moe(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": file.require("expert_count"),
        "num_experts_per_tok": file.require("expert_used_count"),
        "moe_intermediate_size": file.require("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    # The 27B models scale queries by hidden / heads, the others by the head's size (llama.cpp tells them by depth).
    largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[file.name]
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    common = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": file.require("attention.sliding_window"),
        "attn_logit_softcapping": file.get("attn_logit_softcapping"),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
    }
    if file.name == "gemma3":
        pattern = file.get("attention.sliding_window_pattern", 6)
        if isinstance(pattern, list):
            common["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
        else:
            common["sliding_window_pattern"] = pattern
        common["rope_local_base_freq"] = file.get("rope.freq_base_swa", 10000.0)
    return common


def _olmo2(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    if file.get("attention.sliding_window"):
        raise UnsupportedModelError("the GGUF file is an OLMo 3 (OLMo 2 with sliding windows), which is not supported")
    return {}


def _phi3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    rotary = file.get("rope.dimension_count", config["head_dim"])
    return {
        "sliding_window": file.get("attention.sliding_window"),
        "partial_rotary_factor": rotary / config["head_dim"],
        "original_max_position_embeddings": file.get("rope.scaling.original_context_length"),
    }


def _smollm3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    # Every fourth layer is without positions (fixed in llama.cpp as well).
    return {"no_rope_layers": [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]}


_SPECIFIC: dict[str, Callable[[GgufFile, dict[str, Any]], dict[str, Any]]] = {
    "llama": _mixtral,
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
}


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """EOS, end of turn, end of message and end of text, in that order, without repetition."""
    named = [file.meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    template = file.meta.get("tokenizer.chat_template", "")
    written = [t for t in _END_OF_TURN if t in template]
    tokens, kinds = (file.meta.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type"))
    by_text = [tokens.index(text) for text in written if text in tokens]
    control = {text: i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == TokenType.CONTROL}
    by_text += [control[text] for text in _END_OF_TEXT if text in control]
    return tuple(dict.fromkeys(int(i) for i in [*named, *by_text] if i is not None))
