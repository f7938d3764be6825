"""Linear layers for some tens of tokens, where a weight's bytes still cost more than its products.

A program owns some rows of the weight and all tokens, so that each weight is read once. Rows alone give too few programs
where the layer is narrow and long: there the columns are split over programs too, and a second kernel sums the parts, adds
them to the residual stream and norms it for the layer that follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_serve.kernels.gpu.activation import activate
from spmd_serve.kernels.gpu.launch import launch_options, wait_for_inputs

if TYPE_CHECKING:
    from spmd_serve.kernels.linear import Norm

TOKENS = 64  # rows of the tensor cores' tile


@dataclass(frozen=True)
class TileConfig:
    """rows: of the weight (in a gated layer, of the gate) a program; block: columns a step; splits: programs that share the columns.

    parts: the output is their float32 sums, for `add_parts_`. early: the next kernel may start when this one has its input.
    """

    rows: int
    block: int
    splits: int
    warps: int
    stages: int
    early: bool = True
    parts: bool = False


def tile_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, config: TileConfig) -> Tensor:
    """activation(x @ weight.T + bias) for up to 64 tokens. -> [tokens, features]; parts (without bias): float32 [splits, tokens, features].

    weight's columns must be a multiple of splits * block, and its rows (a gated layer's half of them) of config.rows.
    """
    tokens, in_features = x.shape
    features = weight.shape[0] // (2 if activation is not None else 1)
    if config.parts:
        assert activation is None
        bias = None
        out = torch.empty((config.splits, tokens, features), dtype=torch.float32, device=x.device)
    else:
        assert config.splits == 1
        out = torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    steps = in_features // (config.splits * config.block)
    _tile[(features // config.rows, config.splits)](
        x, weight, out, bias, tokens, features, in_features, x.stride(0),
        TOKENS=TOKENS, ROWS=config.rows, BLOCK=config.block, STEPS=steps, STAGES=config.stages, ACTIVATION=activation,
        num_warps=config.warps, **launch_options(1 if config.early else tokens),
    )  # fmt: skip
    return out


def add_parts_(parts: Tensor, bias: Tensor | None, residual: Tensor, following: Norm | None) -> Tensor:
    """residual += parts' sum + bias; returns it, or its norm. parts: float32 [splits, tokens, size]; residual: [tokens, size], contiguous."""
    splits, tokens, size = parts.shape
    scale, eps = (None, 0.0) if following is None else (following.scale, following.eps)
    normed = residual if following is None else torch.empty_like(residual)
    block = triton.next_power_of_2(size)
    _add_parts[(tokens,)](
        parts, bias, residual, scale, normed, size, tokens * size, eps,
        SPLITS=splits, BLOCK=block, num_warps=min(max(block // 256, 1), 16), **launch_options(1),
    )  # fmt: skip
    return normed


@triton.jit(do_not_specialize=["tokens"])
def _tile(
    x, w, out, bias, tokens, n, k, x_stride,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = split * STEPS * BLOCK + tl.arange(0, BLOCK)
    t = tl.arange(0, TOKENS)
    GATED: tl.constexpr = ACTIVATION is not None
    x_at = x + t[:, None] * x_stride + lanes[None, :]
    known = (t < tokens)[:, None]
    w_at = w + rows[None, :] * k + lanes[:, None]
    up_at = w_at + n.to(tl.int64) * k
    acc = tl.zeros((TOKENS, ROWS), tl.float32)
    acc_up = tl.zeros((TOKENS, ROWS), tl.float32)
    wait_for_inputs(PDL)
    for step in tl.range(STEPS, num_stages=STAGES):
        value = tl.load(x_at + step * BLOCK, mask=known, other=0.0)
        acc = tl.dot(value, tl.load(w_at + step * BLOCK), acc)
        if GATED:
            acc_up = tl.dot(value, tl.load(up_at + step * BLOCK), acc_up)
    if bias is not None:
        acc += tl.load(bias + rows).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(bias + n + rows).to(tl.float32)[None, :]
    if GATED:
        acc = activate(acc, ACTIVATION) * acc_up
    target = out + (split * tokens + t)[:, None].to(tl.int64) * n + rows[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=known)


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
