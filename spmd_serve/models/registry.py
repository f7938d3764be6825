"""config.json -> ModelConfig, by the table of families.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spmd_serve.errors import ModelError, UnsupportedModelError
from spmd_serve.layers.rotary import ROPE_KINDS, RopeConfig, check_rope
from spmd_serve.models.defaults import DEFAULTS
from spmd_serve.models.families import ALIASES, FAMILIES, Raw
from spmd_serve.models.fp8 import fp8_checkpoint
from spmd_serve.models.model_config import LayerSpec, ModelConfig
from spmd_serve.tokenizer_files import eos_of_tokenizer
from spmd_serve.types import SamplingParams

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_MAX_LAYERS = 10_000
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position",
)
_OF_LAYERS = ("slides", "moe_layer", "rope_layer")
_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def load_model_config(folder: Path, tokenizer_folder: Path | None = None) -> ModelConfig:
    """Read config.json (and generation_config.json and the tokenizer's files, if there are any) of the model in `folder`.

    Args:
        tokenizer_folder: where the tokenizer is, if not there.

    Raises:
        UnsupportedModelError: an architecture or feature that is not known; the message lists those that are.
        ModelError: config.json is missing, damaged or incomplete.
    """
    whole = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json", optional=True)
    modelopt = _read_json(folder / "hf_quant_config.json", optional=True).get("quantization")
    if isinstance(modelopt, dict) and modelopt.get("quant_algo"):  # its earlier versions wrote nothing into config.json
        whole = {"quantization_config": {"quant_method": "modelopt"} | modelopt} | whole
    # Chat models tuned from base models may have their end of turn nowhere else.
    of_tokenizer = eos_of_tokenizer(tokenizer_folder or folder)
    try:
        architecture = _architecture(whole, folder)
        raw = DEFAULTS.get(architecture, {}) | _text_config(whole)
        return _model_config(architecture, raw, generation, of_tokenizer)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"{folder / 'config.json'} is incomplete or damaged ({type(error).__name__}: {error})"
        ) from error


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelError(f"{path} is missing; --model needs a folder with config.json and *.safetensors") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON ({error})".replace("\n", " ")) from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} is no JSON object")
    return parsed


def _architecture(whole: Raw, folder: Path) -> str:
    given = whole.get("architectures") or "(none)"
    named = given if isinstance(given, str) else given[0]
    architecture, text_type = ALIASES.get(named, (named, None))
    text = (whole.get("text_config") or {}).get("model_type", text_type)
    if text_type and text != text_type:
        raise UnsupportedModelError(f"{folder} is a {named} with a text model of type {text}; supported is {text_type}")
    if architecture not in FAMILIES:
        known = ", ".join(sorted([*FAMILIES, *ALIASES]))
        raise UnsupportedModelError(f"{folder} has the architecture {named}; supported are {known}")
    return architecture


def _text_config(whole: dict[str, Any]) -> dict[str, Any]:
    """The text model's values; what the multimodal model says of its head and of special tokens comes first."""
    outer = {key: whole[key] for key in ("tie_word_embeddings", "eos_token_id") if key in whole}
    return whole | (whole.get("text_config") or {}) | outer


def _model_config(architecture: str, raw: Raw, generation: Raw, of_tokenizer: int | None) -> ModelConfig:
    family = {
        key: value(raw) if callable(value) and key not in _OF_LAYERS else value
        for key, value in FAMILIES[architecture].items()
    }
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    if raw.get("use_bidirectional_attention") or not raw.get("is_causal", True):  # the latter in files of any family
        raise UnsupportedModelError("attention in both directions (an embedding model) is not supported")
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    fp8_checkpoint(quantization)  # refuses what is not known
    ropes = _ropes(raw, head_dim, partial=bool(family.pop("partial_rotary", False)))
    for rope in ropes.values():
        check_rope(rope, head_dim)
    layers = _layers(raw, ropes, *(family.pop(key, None) for key in _OF_LAYERS))
    eos = _token_ids(generation.get("eos_token_id"), raw.get("eos_token_id")) + _token_ids(of_tokenizer)
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "num_layers": raw["num_hidden_layers"],
        "num_q_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "intermediate_size": raw["intermediate_size"],
        "max_position": _context_length(raw, ropes),
        "layers": layers,
        "ropes": tuple(ropes.values()),
        "norm_eps": raw.get("rms_norm_eps", 1e-6),
        "tie_embeddings": raw.get("tie_word_embeddings", False),
        # -1 is some files' way to say none.
        "eos_token_ids": tuple(i for i in dict.fromkeys(eos) if 0 <= i < raw["vocab_size"]),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        "quantization": quantization,
        "generation_defaults": _generation_defaults(generation, raw["vocab_size"]),
    }
    model = ModelConfig(**(fields | family | _activation(raw, family)))
    _check_numbers(fields, model)
    return model


def _check_numbers(fields: Mapping[str, Any], model: ModelConfig) -> None:
    """Here, where the file at fault is known: a size of 0, None or a list would fail wherever it is used first."""
    for name in _SIZES:
        if type(fields[name]) is not int or fields[name] < 1:
            raise ValueError(f"{name} is {fields[name]!r}; it must be an integer, 1 or more")
    if type(fields["norm_eps"]) not in (int, float) or not fields["norm_eps"] >= 0:
        raise ValueError(f"norm_eps is {fields['norm_eps']!r}; it must be a number, 0 or more")
    for window in {layer.window for layer in model.layers} - {None}:
        if type(window) is not int or window < 1:
            raise ValueError(f"sliding_window is {window!r}; it must be an integer, 1 or more, or null")
    if model.moe is not None and not 1 <= model.moe.experts_per_token <= model.moe.num_experts:
        raise ValueError(f"{model.moe.experts_per_token} experts a token cannot be chosen of {model.moe.num_experts}")


def _generation_defaults(generation: Raw, vocab_size: int) -> dict[str, float]:
    """How the model is sampled where a request does not say."""
    try:
        given = {key: float(generation[key]) for key in _SAMPLING_DEFAULTS if generation.get(key) is not None}
    except (TypeError, ValueError) as error:
        given, problem = {}, str(error)
    else:
        if generation.get("do_sample") is False:
            given["temperature"] = 0.0
        if "top_k" in given:
            given["top_k"] = max(0, int(given["top_k"]))  # -1 is off too
        params: dict[str, Any] = {"max_tokens": 1, **given}
        problem = SamplingParams(**params).problem(vocab_size)
    if problem:
        raise ModelError(f"the model's generation_config.json cannot be followed: {problem}; correct or delete it")
    return given


def _activation(raw: Raw, family: Raw) -> dict[str, str]:
    name = raw.get("hidden_act")
    if "activation" in family:  # Gemma's files have another field for it; the first ones' "gelu" was not what it says
        name = raw.get("hidden_activation") or (name if name != "gelu" else None)
    if name is None:
        return {}
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"activation {name}; supported are {', '.join(_ACTIVATIONS)}")
    return {"activation": _ACTIVATIONS[name]}


def _token_ids(*candidates: Any) -> tuple[int, ...]:
    """The first that is given, as a tuple; config files hold None, one id or a list."""
    for given in candidates:
        if given is not None:
            return tuple(int(i) for i in (given if isinstance(given, list) else [given]))
    return ()


# ---- layers and rotary embeddings ---------------------------------------------------------------------------------


def _layers(
    raw: Raw,
    ropes: Mapping[str, RopeConfig],
    slides: Callable[[Raw, int], bool] | None,
    moe_layer: Callable[[Raw, int], bool] | None,
    rope_layer: Callable[[Raw, int], bool] | None,
) -> tuple[LayerSpec, ...]:
    count = raw["num_hidden_layers"]
    if count > _MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {count}")
    types = raw.get("layer_types")
    layers = []
    for i in range(count):
        if types is not None:
            if types[i] not in ("full_attention", "sliding_attention"):
                raise UnsupportedModelError(f"layer {i} is of type {types[i]}, which is not supported")
            sliding = types[i] == "sliding_attention"
        else:
            sliding = slides is not None and slides(raw, i)
        rope = list(ropes).index("sliding_attention") if sliding and "sliding_attention" in ropes else 0
        layers.append(
            LayerSpec(
                window=(raw.get("sliding_window") or None) if sliding else None,
                rope=rope if rope_layer is None or rope_layer(raw, i) else None,
                moe=moe_layer is not None and moe_layer(raw, i),
            )
        )
    return tuple(layers)


def _ropes(raw: Raw, head_dim: int, partial: bool) -> dict[str, RopeConfig]:
    """Kind of layer -> its rotary embedding. Kinds without an entry of their own use the first one.

    partial: whether the family knows of heads that are rotated in part; others do not read that field.
    """
    given = raw.get("rope_parameters") or {}
    if "full_attention" not in given and "sliding_attention" not in given:  # else transformers 5's: one for each kind
        given = {"full_attention": (raw.get("rope_scaling") or {}) | given}
    theta, local = raw.get("rope_theta", 10000.0), raw.get("rope_local_base_freq")
    ropes = {
        "full_attention": _rope({"rope_theta": theta} | (given.get("full_attention") or {}), raw, head_dim, partial)
    }
    if local or given.get("sliding_attention"):
        sliding = {"rope_theta": local or theta} | (given.get("sliding_attention") or {})
        ropes["sliding_attention"] = _rope(sliding, raw, head_dim, partial)
    return ropes


def _rope(params: dict[str, Any], raw: Raw, head_dim: int, partial: bool) -> RopeConfig:
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind in ("su", "yarn") and "long_factor" in params:  # earlier names in Phi-3's files
        kind = "longrope"
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"rotary embedding of type {kind}; supported are {', '.join(ROPE_KINDS)}")
    original = raw.get("original_max_position_embeddings") or params.get("original_max_position_embeddings")
    if kind in ("yarn", "dynamic", "longrope", "llama3"):
        original = original or raw["max_position_embeddings"]
    if kind == "longrope":
        params = {"factor": raw["max_position_embeddings"] / original} | params
    factor = (params.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) if partial else 1.0
    return RopeConfig(
        theta=float(params["rope_theta"]),
        kind=kind,
        rotary_dim=None if factor == 1.0 else int(head_dim * factor),
        params=params,
        original_max_position=original,
    )


def _context_length(raw: Raw, ropes: Mapping[str, RopeConfig]) -> int:
    """Positions that the model is made for; for these kinds max_position_embeddings is the length before scaling."""
    length: int = raw["max_position_embeddings"]
    rope = ropes["full_attention"]
    if rope.kind in ("yarn", "dynamic"):
        return int((rope.original_max_position or length) * rope.params.get("factor", 1.0))
    if rope.kind == "linear" and "sliding_attention" not in ropes:  # Gemma 3 states the length after it
        return int(length * rope.params.get("factor", 1.0))
    return length
