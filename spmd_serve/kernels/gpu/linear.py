"""Skinny matrix products: a GEMV for one token, tensor-core kernels for up to 16 and up to 64.

`_gemv`: a program owns a few rows of the weight and loads all of them (or a first part) before it waits for its input,
so that the weights of this layer stream while the kernel before still runs.

`mma`: the same idea in skinny.cu; see there. `wide_linear`: see wide.py.

No sum depends on timing, so results are the same on every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_serve.kernels.gpu.activation import ACTIVATIONS, activate
from spmd_serve.kernels.gpu.build import aligned, launch, load_library
from spmd_serve.kernels.gpu.launch import launch_options, wait_for_inputs
from spmd_serve.kernels.gpu.norm import rms_norm
from spmd_serve.kernels.gpu.wide import (
    HALF_ROOM,
    WHOLE_ROOM,
    WIDE_GATED_ROWS,
    WIDE_ROWS,
    WIDE_TOKENS,
    WideConfig,
    add_parts_,
    wide_linear,
)

if TYPE_CHECKING:
    from spmd_serve.kernels.linear import Norm


@dataclass(frozen=True)
class GemvConfig:
    """rows: weight rows a program; block: columns a step; static: all of them are loaded before the wait, no loop."""

    rows: int
    block: int
    warps: int
    static: bool


@dataclass(frozen=True)
class MmaConfig:
    """For skinny.cu. row_warps: of a block, each with 16 weight rows; column_warps share its columns; splits: blocks of a
    cluster that share the columns further. early: the next kernel may start when this one ends (0), has its input (1)
    or has its products (2).
    """

    row_warps: int
    column_warps: int
    splits: int
    early: int = 0


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, eps: float, activation: str | None,
    residual: Tensor | None, following: Norm | None = None,
) -> Tensor | None:  # fmt: skip
    """See spmd_serve.kernels.linear.linear. None where the matrix library is the better choice."""
    tokens, in_features = x.shape
    gated = activation is not None
    features = weight.shape[0] // (2 if gated else 1)
    wide = wide_config(
        tokens, weight.shape[0], in_features, gated=gated, added=residual is not None, normed=scale is not None
    )
    if wide is not None:
        normed = x if scale is None else rms_norm(x, scale, eps, pass_on=True)
        summed = wide_linear(normed, weight, bias, activation, wide)
        if summed is not None:
            return summed if residual is None else add_parts_(summed, bias, residual, following)
    config = choose_config(tokens, features, in_features, gated=gated, normed=scale is not None)
    if config is None:
        return None
    arguments = x, weight, bias, scale, eps, activation, residual
    out = gemv(*arguments, config) if isinstance(config, GemvConfig) else mma(*arguments, config)
    return out if out is None or following is None else rms_norm(out, following.scale, following.eps)


# Beyond these the matrix library is as fast: measured on an H200.
MULTIPROCESSORS = 132
MAX_TOKENS = 16
MAX_WEIGHTS = 8 << 20  # of the gate alone in a gated layer
MAX_COLUMNS = 4096
LONG_COLUMNS = 8192


def choose_config(
    tokens: int, features: int, in_features: int, *, gated: bool, normed: bool
) -> GemvConfig | MmaConfig | None:
    """Which kernel, and how. None: the matrix library."""
    if not 0 < tokens <= MAX_TOKENS or in_features % 8 or features == 0:
        return None
    if tokens == 1:
        return gemv_config(features, in_features, gated)
    if features * in_features > MAX_WEIGHTS or in_features > MAX_COLUMNS:
        return None
    return mma_config(tokens, in_features, before_attention=normed and not gated)


def wide_config(
    tokens: int, out_features: int, in_features: int, *, gated: bool, added: bool, normed: bool = False
) -> WideConfig | None:
    """For 17 to 64 tokens; None where the matrix library is as good. By measurements of whole layers on an H200.

    normed: a kernel before this one norms the input, as with several ranks. Blocks share columns where they would have too
    few rows for the tokens that each reads. A larger layer has two blocks a multiprocessor, which hide each other's gaps; with
    long rows one does, and takes all of the memory.
    """
    features = out_features // 2 if gated else out_features
    if not MAX_TOKENS < tokens <= WIDE_TOKENS or features < MULTIPROCESSORS or features % 2 or in_features % 8:
        return None
    if features * in_features <= MAX_WEIGHTS:
        if in_features > MAX_COLUMNS or normed:
            return None
        splits = max(1, min(4, MULTIPROCESSORS * 32 // features, in_features // 128)) if added else 1
        blocks, room = MULTIPROCESSORS, HALF_ROOM
    elif tokens > 32:
        splits = 1 if gated else 2
        long = in_features > LONG_COLUMNS
        blocks, room = (MULTIPROCESSORS, WHOLE_ROOM) if long else (2 * MULTIPROCESSORS, HALF_ROOM)
    else:
        return None
    rows = triton.cdiv(triton.cdiv(features * splits, blocks), 2) * 2
    if rows > (WIDE_GATED_ROWS if gated else WIDE_ROWS):  # the LM head, say, where the library is better
        return None
    return WideConfig(rows, splits, room, parts=added)


def gemv_config(features: int, in_features: int, gated: bool) -> GemvConfig:
    """By shape, from measurements on an H200: each thread holds up to 128 weights, and no loop where that is enough."""
    block, warps = (512, 2) if in_features <= 1024 else (1024, 4)
    steps = triton.cdiv(in_features, block)
    per_row = steps * (block // (32 * warps)) * (2 if gated else 1)
    if per_row > 128:
        return GemvConfig(1, 2048, 4, static=False)
    rows = 1
    while 2 * rows * per_row <= 128 and triton.cdiv(features, 2 * rows) >= 128:
        rows *= 2
    return GemvConfig(rows, block, warps, static=True)


def mma_config(tokens: int, in_features: int, *, before_attention: bool) -> MmaConfig:
    """By shape, from measurements of whole layers on an H200: a warp takes up to 256 columns.

    before_attention: the many programs of the attention kernel are in the way of this one if they start early.
    """
    slices = triton.cdiv(in_features, 256)
    column_warps = min(8, triton.next_power_of_2(slices))
    splits = triton.cdiv(slices, column_warps)
    if not before_attention:
        return MmaConfig(1, column_warps, splits, early=1)
    if tokens <= 8 and column_warps <= 4:
        return MmaConfig(2, column_warps, splits, early=2)
    return MmaConfig(1, column_warps, splits)


def mma(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, eps: float, activation: str | None,
    residual: Tensor | None, config: MmaConfig,
) -> Tensor | None:  # fmt: skip
    """`linear` for up to 16 tokens by skinny.cu. None if there is no such library, or it has no kernel for the shape."""
    library = load_library("skinny")
    if library is None:
        return None
    tokens = x.shape[0]
    out_features, in_features = weight.shape
    features = out_features // 2 if activation is not None else out_features
    out = residual if residual is not None else torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    if x.stride(0) % 8 or not aligned(x, weight, bias, scale, out):
        return None
    done = launch(
        library.skinny_linear, x.device,
        x, weight, bias, scale, out, tokens, features, in_features, x.stride(0), float(eps),
        ACTIVATIONS.index(activation), residual is not None, config.row_warps, config.column_warps, config.splits,
        1 + config.early if launch_options(tokens)["PDL"] else 0,
    )  # fmt: skip
    return out if done else None


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, eps: float, activation: str | None,
    residual: Tensor | None, config: GemvConfig, weight_scales: Tensor | None = None, scale_block: int | None = None,
) -> Tensor:  # fmt: skip
    """`linear` for one token. With weight_scales, the weight is FP8: see kernels/fp8.py."""
    out_features, in_features = weight.shape
    gated = activation is not None
    features = out_features // 2 if gated else out_features
    out = residual if residual is not None else torch.empty((1, features), dtype=x.dtype, device=x.device)
    _gemv[(triton.cdiv(features, config.rows),)](
        x, weight, out, bias, scale, weight_scales, features, in_features, eps,
        ROWS=config.rows, BLOCK=config.block, STEPS=triton.cdiv(in_features, config.block), STATIC=config.static,
        SCALE_BLOCK=scale_block or 0,
        EVEN_N=features % config.rows == 0, EVEN_K=in_features % config.block == 0,
        ACTIVATION=activation, ADD=residual is not None, num_warps=config.warps, **launch_options(1),
    )  # fmt: skip
    return out


@triton.jit
def _tile(w, rows, start, lanes, n, k, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Weight rows `rows` (int64 [R]), columns start + lanes: [R, len(lanes)]."""
    columns = start + lanes
    at = w + rows[:, None] * k + columns[None, :]
    if EVEN_N and EVEN_K:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(rows < n)[:, None] & (columns < k)[None, :], other=0.0)
    return tile


@triton.jit
def _scaled(tile, w_scales, rows, columns, n, k, SCALE_BLOCK: tl.constexpr):
    """A tile in float32, times its blocks' scales if it has such; n: all rows."""
    value = tile.to(tl.float32)
    if SCALE_BLOCK > 0:
        at = w_scales + rows[:, None] * tl.cdiv(k, SCALE_BLOCK) + (columns // SCALE_BLOCK)[None, :]
        value *= tl.load(at, mask=(rows < n)[:, None] & (columns < k)[None, :], other=0.0)
    return value


@triton.jit
def _input(x, scale, columns, k, EVEN_K: tl.constexpr):
    """x and x * scale at `columns`, float32."""
    if EVEN_K:
        value = tl.load(x + columns).to(tl.float32)
    else:
        value = tl.load(x + columns, mask=columns < k, other=0.0).to(tl.float32)
    scaled = value
    if scale is not None:
        scaled = value * tl.load(scale + columns, mask=columns < k, other=0.0).to(tl.float32)
    return value, scaled


@triton.jit
def _gemv(
    x, w, out, bias, scale, w_scales, n, k, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, STATIC: tl.constexpr, SCALE_BLOCK: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK)
    GATED: tl.constexpr = ACTIVATION is not None
    up = w + n.to(tl.int64) * k  # the second half of the rows, when gated
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    acc_up = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    inside = rows < n
    extra = tl.zeros((ROWS,), tl.float32)
    extra_up = tl.zeros((ROWS,), tl.float32)
    if bias is not None:
        extra = tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            extra_up = tl.load(bias + n + rows, mask=inside, other=0.0).to(tl.float32)
    if STATIC:
        tiles = ()
        tiles_up = ()
        for step in tl.static_range(STEPS):
            tiles = tiles + (_tile(w, rows, step * BLOCK, lanes, n, k, EVEN_N, EVEN_K),)
            if GATED:
                tiles_up = tiles_up + (_tile(up, rows, step * BLOCK, lanes, n, k, EVEN_N, EVEN_K),)
        wait_for_inputs(PDL)
        if ADD:
            extra += tl.load(out + rows, mask=inside, other=0.0).to(tl.float32)
        for step in tl.static_range(STEPS):
            value, scaled = _input(x, scale, step * BLOCK + lanes, k, EVEN_K)
            squares += value * value
            at = step * BLOCK + lanes
            acc += _scaled(tiles[step], w_scales, rows, at, n, k, SCALE_BLOCK) * scaled[None, :]
            if GATED:
                acc_up += _scaled(tiles_up[step], w_scales, n + rows, at, 2 * n, k, SCALE_BLOCK) * scaled[None, :]
    else:
        # The next step's tile is always on its way while this one is used.
        tile = _tile(w, rows, 0, lanes, n, k, EVEN_N, EVEN_K)
        tile_up = tile
        if GATED:
            tile_up = _tile(up, rows, 0, lanes, n, k, EVEN_N, EVEN_K)
        wait_for_inputs(PDL)
        if ADD:
            extra += tl.load(out + rows, mask=inside, other=0.0).to(tl.float32)
        for step in range(STEPS):
            now, now_up = tile, tile_up
            following = tl.minimum(step + 1, STEPS - 1) * BLOCK
            tile = _tile(w, rows, following, lanes, n, k, EVEN_N, EVEN_K)
            if GATED:
                tile_up = _tile(up, rows, following, lanes, n, k, EVEN_N, EVEN_K)
            value, scaled = _input(x, scale, step * BLOCK + lanes, k, EVEN_K)
            squares += value * value
            at = step * BLOCK + lanes
            acc += _scaled(now, w_scales, rows, at, n, k, SCALE_BLOCK) * scaled[None, :]
            if GATED:
                acc_up += _scaled(now_up, w_scales, n + rows, at, 2 * n, k, SCALE_BLOCK) * scaled[None, :]
    result = tl.sum(acc, axis=1)
    result_up = tl.sum(acc_up, axis=1)
    if w_scales is not None:
        if SCALE_BLOCK == 0:
            result *= tl.load(w_scales + rows, mask=inside, other=0.0)
            if GATED:
                result_up *= tl.load(w_scales + n + rows, mask=inside, other=0.0)
    if scale is not None:
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / k + eps)
        result *= inverse
        result_up *= inverse
    result += extra
    if GATED:
        result = activate(result, ACTIVATION) * (result_up + extra_up)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=inside)
