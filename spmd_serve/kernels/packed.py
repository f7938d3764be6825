"""Linear layers on a CPU with the weight in oneDNN's own order.

A matrix library that is handed a plain [out, in] weight rearranges it in every call, or reads it in an order that does not
suit the caches. oneDNN's blocked order, made once after loading, is 1.5 to 3 times as fast for up to some tens of tokens
and as fast for many. torch has it for its compiler's sake (`torch.ops.mkldnn`), on x86 where the CPU computes in the type;
elsewhere weights stay plain.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import Tensor

_TOKENS_HINT = 16  # the order made for 16 tokens was best, or within 10% of it, for 1 to 512 (Zen 3, float32)


def pack(weight: Tensor) -> Tensor:
    """The weight of a linear layer in the order that suits this CPU, or `weight` itself.

    Args:
        weight: [out, in]. The caller drops it, so that it is held once.

    Returns:
        The same values and shape. A packed tensor has `is_mkldnn`, and is of use to `packed_linear` only.
    """
    if weight.device.type != "cpu" or weight.numel() == 0 or not _can_pack(weight.dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TOKENS_HINT)
    return packed


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias with a packed weight; x: [tokens, in] -> [tokens, out]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out


def _can_pack(dtype: torch.dtype) -> bool:
    ops: Any = torch.ops.mkldnn
    known = torch.backends.mkldnn.is_available() and hasattr(ops, "_linear_pointwise")  # type: ignore[no-untyped-call]
    if not known or not hasattr(ops, "_reorder_linear_weight") or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if dtype == torch.float32:
        return True
    return bool(dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported())
