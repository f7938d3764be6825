"""Linear layers for up to 64 tokens on Hopper, where a weight's bytes still cost more than its products.

`wide_linear` is wide.cu. A narrow and long layer's columns are split over blocks there: `add_parts_` sums the parts, adds
them to the residual stream and norms it for the layer that follows.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_serve.kernels.gpu.activation import ACTIVATIONS
from spmd_serve.kernels.gpu.build import aligned, launch, load_library
from spmd_serve.kernels.gpu.launch import launch_options, wait_for_inputs

if TYPE_CHECKING:
    from spmd_serve.kernels.linear import Norm

WIDE_TOKENS = 64
WIDE_ROWS, WIDE_GATED_ROWS = 256, 136  # of the weight a block; of the gate in a gated layer
WHOLE_ROOM, HALF_ROOM = 227 * 1024, 112 * 1024  # bytes of a multiprocessor's shared memory


@dataclass(frozen=True)
class WideConfig:
    """rows: of the weight (in a gated layer, of the gate) a block, even; splits: blocks that share the columns, a cluster.

    room: bytes of shared memory a block may take. With HALF_ROOM the next kernel's blocks can move in before this one's
    have left. parts: the splits are no cluster; the output is their float32 sums, for `add_parts_`.
    """

    rows: int
    splits: int = 1
    room: int = HALF_ROOM
    parts: bool = False


def wide_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, config: WideConfig
) -> Tensor | None:
    """activation(x @ weight.T + bias) for up to 64 tokens. -> [tokens, features]; parts (without bias): float32 [splits, tokens, features].

    None if there is no such library, or it has no kernel for the shape.
    """
    library = _library()
    if library is None:
        return None
    tokens, in_features = x.shape
    features = weight.shape[0] // (2 if activation is not None else 1)
    if config.parts:
        out = torch.empty((config.splits, tokens, features), dtype=torch.float32, device=x.device)
    else:
        out = torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    bias = None if config.parts else bias
    if not aligned(x, weight, bias, out):
        return None
    done = launch(
        library.wide_linear, x.device,
        x, weight, bias, out, tokens, features, in_features, x.stride(0), ACTIVATIONS.index(activation),
        config.parts, config.rows, config.splits, config.room, launch_options(tokens)["PDL"] > 0,
    )  # fmt: skip
    return out if done else None


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_library("wide") if torch.cuda.get_device_capability()[0] == 9 else None  # others have no wgmma


def add_parts_(parts: Tensor, bias: Tensor | None, residual: Tensor, following: Norm | None) -> Tensor:
    """residual += parts' sum + bias; returns it, or its norm. parts: float32 [splits, tokens, size]; residual: [tokens, size], contiguous."""
    splits, tokens, size = parts.shape
    scale, eps = (None, 0.0) if following is None else (following.scale, following.eps)
    normed = residual if following is None else torch.empty_like(residual)
    block = triton.next_power_of_2(size)
    _add_parts[(tokens,)](
        parts, bias, residual, scale, normed, size, tokens * size, eps,
        SPLITS=splits, BLOCK=block, num_warps=min(max(block // 256, 1), 16),
        **launch_options(1, pass_on=following is not None),
    )  # fmt: skip
    return normed


@triton.jit
def _add_parts(
    parts, bias, residual, scale, normed, size, part_stride, eps,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < size
    weight = 0.0
    if scale is not None:
        weight = tl.load(scale + lanes, mask=inside, other=0.0).to(tl.float32)
    extra = 0.0
    if bias is not None:
        extra = tl.load(bias + lanes, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    at = row * size + lanes
    total = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + extra
    for split in tl.static_range(SPLITS):  # in order: the same bits every time
        total += tl.load(parts + split * part_stride + at, mask=inside, other=0.0)
    value = total.to(residual.dtype.element_ty)
    tl.store(residual + at, value, mask=inside)
    if scale is not None:
        number = value.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(number * number, axis=0) / size + eps)
        tl.store(normed + at, (number * inverse * weight).to(normed.dtype.element_ty), mask=inside)
