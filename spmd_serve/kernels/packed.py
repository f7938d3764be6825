"""Linear layers on an x86 CPU with the weight in the order that its matrix libraries read fastest.

A matrix library that is handed a plain [out, in] weight rearranges it in every call, or reads it in an order that does not
suit the caches. Two libraries inside torch have an order of their own, made once after loading:

- oneDNN's, for float32, and for bfloat16 where the CPU computes in it: 1.5 to 3 times as fast for up to some tens of
  tokens and as fast for many. torch has it for its compiler's sake (`torch.ops.mkldnn`).
- FBGEMM's (`torch.ops.quantized`), float16 weights in a float32 product, for 16-bit weights where the CPU computes in
  float32 only: half the bytes of float32, thus 1.5 to 2 times as fast for up to some tens of tokens and as fast for many.
  Other libraries imitate 16-bit arithmetic there, at an order of magnitude more time. All else that the layers do is
  then done in float32 (`activation_dtype`).

A bfloat16 weight is exact in float16, but for magnitudes below 6e-5, which are rounded to multiples of 6e-8.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

# FBGEMM's weight `w` in TorchScript: its type, and x @ w.T.
HALF_SCRIPT = (
    "__torch__.torch.classes.quantized.LinearPackedParamsBase",
    "torch.ops.quantized.linear_dynamic_fp16(x, w)",
)

_TOKENS_HINT = 16  # oneDNN's order for 16 tokens was best, or within 10% of it, for 1 to 512 (Zen 3, float32)
_FLOAT16_MAX = 65504.0


@dataclass(frozen=True)
class HalfWeight:
    """A 16-bit weight [out, in] in FBGEMM's order."""

    packed: Any  # the library's object


CpuWeight = Tensor | HalfWeight


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What the layers compute in, and the type of what they hand on, when weights are of `dtype`."""
    widens = device.type == "cpu" and not _is_native(dtype) and _has_fbgemm()
    return torch.float32 if widens else dtype


def is_fast(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies weights of this type at the speed of their bytes."""
    return _is_native(dtype) or _has_fbgemm()


def pack(weight: Tensor) -> CpuWeight:
    """The weight of a linear layer in the order that suits this CPU, or `weight` itself.

    Args:
        weight: [out, in]. The caller drops it, so that it is held once.

    Returns:
        The same values, for inputs of `activation_dtype`. A packed tensor has `is_mkldnn`, and is of use to `packed_linear` only.
    """
    if weight.device.type != "cpu":
        return weight
    wide = activation_dtype(weight.dtype, weight.device) != weight.dtype
    if wide and weight.numel() and weight.abs().max() <= _FLOAT16_MAX:
        return HalfWeight(torch.ops.quantized.linear_prepack_fp16(weight.float(), None))
    weight = weight.float() if wide else weight
    return _pack_onednn(weight) if weight.numel() and _is_native(weight.dtype) and _has_onednn() else weight


def packed_linear(x: Tensor, weight: CpuWeight, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias with a weight that `pack` packed; x: [tokens, in] -> [tokens, out], of x's type."""
    out: Tensor
    if isinstance(weight, HalfWeight):
        out = _fbgemm_linear()(x, weight.packed)
        return out if bias is None else out.add_(bias)
    out = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out


@cache
def _fbgemm_linear() -> Callable[[Tensor, Any], Tensor]:
    """(x, packed weight) -> x @ weight.T.

    Handing a packed weight from Python to the operator takes 15 us, to a TorchScript function that calls it 1 us: 2 ms of
    a step of 30 layers. Should TorchScript go, the operator itself does.
    """
    operator: Callable[[Tensor, Any], Tensor] = torch.ops.quantized.linear_dynamic_fp16.default
    if not hasattr(torch.jit, "CompilationUnit"):
        return operator
    unit: Any = torch.jit.CompilationUnit()  # type: ignore[no-untyped-call]
    kind, product = HALF_SCRIPT
    unit.define(f"def linear(x: Tensor, w: {kind}):\n    return {product}\n")
    function: Callable[[Tensor, Any], Tensor] = unit.linear
    return function


def _pack_onednn(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TOKENS_HINT)
    return packed


def _is_native(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.cpu._is_avx512_bf16_supported()))


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _has_onednn() -> bool:
    ops: Any = torch.ops.mkldnn
    known = torch.backends.mkldnn.is_available() and hasattr(ops, "_linear_pointwise")  # type: ignore[no-untyped-call]
    return bool(known and hasattr(ops, "_reorder_linear_weight") and _is_x86())


def _has_fbgemm() -> bool:
    ops: Any = torch.ops.quantized
    return torch.backends.quantized.engine in ("x86", "fbgemm") and hasattr(ops, "linear_prepack_fp16") and _is_x86()
