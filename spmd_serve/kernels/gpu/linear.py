"""Skinny matrix products: a GEMV for one token, tensor-core kernels for up to some tens of tokens.

`_gemv`: a program owns a few rows of the weight and loads all of them (or a first part) before it waits for its input,
so that the weights of this layer stream while the kernel before still runs.

`_skinny`: a program owns ROWS rows of the weight; its warps split the columns (a batched dot with one batch a warp), and
their sums meet in shared memory. No sum depends on timing, so results are the same on every run.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_serve.kernels.gpu.activation import activate
from spmd_serve.kernels.gpu.launch import launch_options, wait_for_inputs


@dataclass(frozen=True)
class GemvConfig:
    """rows: weight rows a program; block: columns a step; static: all of them are loaded before the wait, no loop."""

    rows: int
    block: int
    warps: int
    static: bool


@dataclass(frozen=True)
class SkinnyConfig:
    """rows: weight rows a program; slices: column slices side by side (warps share them); block: columns of a slice;
    splits: programs for different columns; prefetch: steps of weights brought into L2 before the wait.
    """

    rows: int
    slices: int
    block: int
    warps: int
    stages: int
    splits: int = 1
    prefetch: int = 1


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, eps: float, activation: str | None,
    residual: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """See spmd_serve.kernels.linear.linear. None where the matrix library is the better choice."""
    tokens, in_features = x.shape
    gated = activation is not None
    features = weight.shape[0] // (2 if gated else 1)
    if tokens == 0 or in_features % 8 or features == 0:
        return None
    if tokens == 1:
        config = gemv_config(features, in_features, gated)
        return gemv(x, weight, bias, scale, eps, activation, residual, config)
    skinny_ = skinny_config(tokens, in_features, scale is not None or gated)
    return None if skinny_ is None else skinny(x, weight, bias, scale, eps, activation, residual, skinny_)


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


def skinny_config(tokens: int, in_features: int, fused: bool) -> SkinnyConfig | None:
    """By shape, from measurements on an H200; None: the matrix library, also where a fused norm costs the gain."""
    if tokens <= 16 and not fused and in_features <= 4096:
        return SkinnyConfig(8, 4, 64, 4, 5)
    return None


def gemv(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, eps: float, activation: str | None,
    residual: Tensor | None, config: GemvConfig,
) -> Tensor:  # fmt: skip
    """`linear` for one token."""
    out_features, in_features = weight.shape
    gated = activation is not None
    features = out_features // 2 if gated else out_features
    out = residual if residual is not None else torch.empty((1, features), dtype=x.dtype, device=x.device)
    _gemv[(triton.cdiv(features, config.rows),)](
        x, weight, out, bias, scale, features, in_features, eps,
        ROWS=config.rows, BLOCK=config.block, STEPS=triton.cdiv(in_features, config.block), STATIC=config.static,
        EVEN_N=features % config.rows == 0, EVEN_K=in_features % config.block == 0,
        ACTIVATION=activation, ADD=residual is not None, num_warps=config.warps, **launch_options(),
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
    x, w, out, bias, scale, n, k, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, STATIC: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
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
            acc += tiles[step].to(tl.float32) * scaled[None, :]
            if GATED:
                acc_up += tiles_up[step].to(tl.float32) * scaled[None, :]
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
            acc += now.to(tl.float32) * scaled[None, :]
            if GATED:
                acc_up += now_up.to(tl.float32) * scaled[None, :]
    result = tl.sum(acc, axis=1)
    result_up = tl.sum(acc_up, axis=1)
    if scale is not None:
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / k + eps)
        result *= inverse
        result_up *= inverse
    result += extra
    if GATED:
        result = activate(result, ACTIVATION) * (result_up + extra_up)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=inside)


def skinny(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, eps: float, activation: str | None,
    residual: Tensor | None, config: SkinnyConfig,
) -> Tensor:  # fmt: skip
    """`linear` for up to 128 tokens. With config.splits > 1: the sums of column ranges, float32 [splits, tokens, out]."""
    tokens = x.shape[0]
    out_features, in_features = weight.shape
    features = out_features // 2 if activation is not None else out_features
    step = config.slices * config.block
    steps = triton.cdiv(in_features, step * config.splits)
    if config.splits > 1:
        assert scale is None and activation is None and bias is None and residual is None
        out = torch.empty((config.splits, tokens, features), dtype=torch.float32, device=x.device)
    elif residual is not None:
        out = residual
    else:
        out = torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    _skinny[(triton.cdiv(features, config.rows), config.splits)](
        x, weight, out, bias, scale, tokens, features, in_features, x.stride(0), eps,
        M=max(16, triton.next_power_of_2(tokens)), ROWS=config.rows, SLICES=config.slices, BLOCK=config.block, STEPS=steps,
        EVEN_N=features % config.rows == 0, EVEN_K=in_features % (step * config.splits) == 0,
        ACTIVATION=activation, ADD=residual is not None, PREFETCH=config.prefetch,
        num_warps=config.warps, num_stages=config.stages, **launch_options(),
    )  # fmt: skip
    return out


@triton.jit
def _prefetch(w, rows, first, columns: tl.constexpr, n, k, ROWS: tl.constexpr):
    """Bring weight rows `rows`, columns first .. first + columns - 1, into L2: one touch for each 128 bytes (64 values)."""
    at = first + tl.arange(0, columns // 64) * 64
    line = w + rows[:, None] * k + at[None, :]
    line = tl.where((rows < n)[:, None] & (at < k)[None, :], line, w)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _slices(w, rows, columns, n, k, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Weight rows `rows` (int64 [R]) at `columns` [S, B]: [S, B, R]."""
    at = w + rows[None, None, :] * k + columns[:, :, None]
    if EVEN_N and EVEN_K:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(rows < n)[None, None, :] & (columns < k)[:, :, None], other=0.0)
    return tile


@triton.jit(do_not_specialize=["m"])
def _skinny(
    x, w, out, bias, scale, m, n, k, x_stride, eps,
    M: tl.constexpr, ROWS: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, ACTIVATION: tl.constexpr, ADD: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = ACTIVATION is not None
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    first = split * STEPS * SLICES * BLOCK
    up = w + n.to(tl.int64) * k
    tokens = tl.arange(0, M)
    inside = (tokens < m)[:, None] & (rows < n)[None, :]
    columns = first + (tl.arange(0, SLICES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])
    if PDL and PREFETCH > 0:
        for part in tl.static_range(PREFETCH):
            _prefetch(w, rows, first + part * SLICES * BLOCK, SLICES * BLOCK, n, k, ROWS)
            if GATED:
                _prefetch(up, rows, first + part * SLICES * BLOCK, SLICES * BLOCK, n, k, ROWS)
    wait_for_inputs(PDL)
    target = out + split * m * n + tokens.to(tl.int64)[:, None] * n + rows[None, :]
    if ADD:
        added = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    acc = tl.zeros((SLICES, M, ROWS), tl.float32)
    acc_up = tl.zeros((SLICES, M, ROWS), tl.float32)
    squares = tl.zeros((SLICES, M), tl.float32)
    for step in tl.range(STEPS):
        at = columns + step * (SLICES * BLOCK)
        tile = _slices(w, rows, at, n, k, EVEN_N, EVEN_K)
        value = tl.load(
            x + tokens.to(tl.int64)[None, :, None] * x_stride + at[:, None, :],
            mask=(tokens < m)[None, :, None] & (at < k)[:, None, :], other=0.0,
        )  # fmt: skip
        if scale is not None:
            wide = value.to(tl.float32)
            squares += tl.sum(wide * wide, axis=2)
            weight = tl.load(scale + at, mask=at < k, other=0.0).to(tl.float32)
            value = (wide * weight[:, None, :]).to(x.dtype.element_ty)
        if SLICES == 1:
            flat = tl.reshape(value, (M, BLOCK))
            acc += tl.dot(flat, tl.reshape(tile, (BLOCK, ROWS)))[None, :, :]
            if GATED:
                tile_up = _slices(up, rows, at, n, k, EVEN_N, EVEN_K)
                acc_up += tl.dot(flat, tl.reshape(tile_up, (BLOCK, ROWS)))[None, :, :]
        else:
            acc = tl.dot(value, tile, acc)
            if GATED:
                acc_up = tl.dot(value, _slices(up, rows, at, n, k, EVEN_N, EVEN_K), acc_up)
    result = tl.sum(acc, axis=0)
    result_up = tl.sum(acc_up, axis=0)
    if scale is not None:
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / k + eps)[:, None]
        result *= inverse
        result_up *= inverse
    if bias is not None:
        result += tl.load(bias + rows, mask=rows < n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            result_up += tl.load(bias + n + rows, mask=rows < n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        result = activate(result, ACTIVATION) * result_up
    if ADD:
        result += added
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)
