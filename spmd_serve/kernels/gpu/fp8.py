"""Linear layers over FP8 weights: the weights' bytes are read as they are.

Up to 16 tokens go through fp8_stream.cu, where the weights become float16 in registers. For more, and scales of whole
rows, torch._scaled_mm multiplies in FP8, with one scale a token that `quantize_rows` finds (after the norm or the gated
activation before the layer, in the same kernel); with scales of blocks `_matmul` multiplies in the compute type. Where
fp8_stream.cu has no kernel, one token goes through the GEMV of linear.py.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_serve.kernels.fp8 import FP8, FP8_MAX, Fp8Weight
from spmd_serve.kernels.gpu.activation import ACTIVATIONS, activate, gated_activation
from spmd_serve.kernels.gpu.build import aligned, launch, load_library
from spmd_serve.kernels.gpu.launch import launch_options, wait_for_inputs
from spmd_serve.kernels.gpu.linear import GemvConfig, gemv
from spmd_serve.kernels.gpu.norm import rms_norm

STREAM_TOKENS = 16
NAN = tl.constexpr(tl.PropagateNan.ALL)


@dataclass(frozen=True)
class StreamConfig:
    """For fp8_stream.cu. warps: of a block; depth: pairs of loads a thread has in flight; blocks: a multiprocessor; early: the
    next kernel may start at the end (0), when this one has its input (1) or has asked for all weights (2).
    """

    warps: int
    depth: int
    blocks: int
    early: int


def fp8_linear(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None, scale: Tensor | None, eps: float, activation: str | None,
    residual: Tensor | None, gate: str | None,
) -> Tensor:  # fmt: skip
    """See spmd_serve.kernels.fp8.fp8_linear. scale and eps are the norm's."""
    tokens = x.shape[0]
    if takes_gate(x, weight):
        return _by_parts(scaled_mm(x, weight, scale, eps, gate, bias), None, activation, residual)
    if gate is not None:
        x = gated_activation(x, gate)
    if weight.values.numel() == 0 or tokens == 0:
        return _by_parts(matmul(x, weight), bias, activation, residual)
    streamed = stream(x, weight, bias, scale, eps, activation, residual)
    if streamed is not None:
        return streamed
    if tokens == 1:
        config = gemv_config(weight.values.shape[1], gated=activation is not None)
        scales, block = weight.scales, weight.block
        return gemv(x, weight.values, bias, scale, eps, activation, residual, config, scales, block)
    if scale is not None:
        x = rms_norm(x, scale, eps)
    return _by_parts(matmul(x, weight), bias, activation, residual)


def _by_parts(out: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None) -> Tensor:
    """What comes after the product."""
    if bias is not None:
        out += bias
    if activation is not None:
        return gated_activation(out, activation)
    return out if residual is None else residual.add_(out)


def gemv_config(in_features: int, *, gated: bool) -> GemvConfig:
    """Each thread reads 16 bytes at once, and holds all of its up to 128 weights where that is enough."""
    block, warps = (1024, 2) if in_features <= 1024 else (2048, 4)
    per_row = triton.cdiv(in_features, block) * (block // (32 * warps)) * (2 if gated else 1)
    return GemvConfig(2 if 2 * per_row <= 128 else 1, block, warps, static=per_row <= 128)


def takes_gate(x: Tensor, weight: Fp8Weight) -> bool:
    """Whether the product is torch._scaled_mm's, so that x is quantised by a kernel that can take in what comes before."""
    out_features, in_features = weight.values.shape
    fits = out_features > 0 and out_features % 16 == 0 and in_features > 0 and in_features % 16 == 0
    return weight.block is None and fits and x.dtype == torch.bfloat16 and x.shape[0] > STREAM_TOKENS


def stream_config(tokens: int, in_features: int) -> StreamConfig:
    """By shape; all of a multiprocessor's registers are used: 16 warps of 128 registers a thread.

    Measured on an H200 with the four layers of Qwen3-14B: 16 warps, 5 deep, are the best at 8 tokens and within 2% of it (in
    sum) at one token. Few columns are not measured.
    """
    if in_features <= 1024 and tokens <= 8:
        return StreamConfig(4, 4, blocks=4, early=1)
    # The tokens of a round, the warps' sums and a norm's scale must fit into shared memory.
    depth = 5 if 2 * in_features + tokens * 12_800 <= 216_000 else 4
    return StreamConfig(16, depth, blocks=1, early=1)


def stream(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None, scale: Tensor | None, eps: float, activation: str | None,
    residual: Tensor | None, config: StreamConfig | None = None,
) -> Tensor | None:  # fmt: skip
    """`fp8_linear` by fp8_stream.cu. None if there is no such library, or it has no kernel for the shape."""
    tokens = x.shape[0]
    if weight.block not in (None, 128) or tokens > STREAM_TOKENS or x.dtype != torch.bfloat16 or not x.is_cuda:
        return None
    library = load_library("fp8_stream")
    if library is None:
        return None
    out_features, in_features = weight.values.shape
    config = config or stream_config(tokens, in_features)
    features = out_features // 2 if activation is not None else out_features
    out = residual if residual is not None else torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    if x.stride(0) % 8 or not aligned(x, weight.values, weight.scales, bias, scale, out):
        return None
    done = launch(
        library.fp8_stream, x.device,
        x, weight.values, weight.scales, bias, scale, out, tokens, features, in_features, x.stride(0), float(eps),
        ACTIVATIONS.index(activation), residual is not None, weight.block or 0, config.warps, config.depth, config.blocks,
        1 + config.early if launch_options(tokens)["PDL"] else 0,
    )  # fmt: skip
    return out if done else None


def quantize_rows(
    x: Tensor, scale: Tensor | None = None, eps: float = 0.0, gate: str | None = None
) -> tuple[Tensor, Tensor]:
    """A row's largest value becomes FP8's largest. Before that, RMSNorm (scale: [in]) or the gated activation `gate`.

    x: bfloat16 [tokens, in], or [tokens, 2 * in] with a gate; rows may be strided.
    Returns values float8_e4m3fn [tokens, in] and scales float32 [tokens, 1].
    """
    tokens, size = x.shape
    if gate is not None:
        size //= 2
    values = torch.empty((tokens, size), dtype=FP8, device=x.device)
    scales = torch.empty((tokens, 1), dtype=torch.float32, device=x.device)
    warps = min(max(triton.next_power_of_2(triton.cdiv(size, 1024)), 4), 16)
    block = 256 * warps  # 16 bytes a thread
    _quantize_rows[(tokens,)](
        x, scale, values, scales, size, x.stride(0), eps,
        LARGEST=FP8_MAX, GATE=gate, BLOCK=block, STEPS=triton.cdiv(size, block), num_warps=warps, **launch_options(tokens),
    )  # fmt: skip
    return values, scales


@triton.jit
def _quantize_rows(
    x, scale, values, scales, size, x_stride, eps,
    LARGEST: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    raw = ()
    raw_up = ()
    for step in tl.static_range(STEPS):  # all of the row is on its way before any of it is used
        at = step * BLOCK + lanes
        raw = raw + (tl.load(x + row * x_stride + at, mask=at < size, other=0.0),)
        if GATE is not None:
            raw_up = raw_up + (tl.load(x + row * x_stride + size + at, mask=at < size, other=0.0),)
    squares = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    kept = ()
    for step in tl.static_range(STEPS):
        at = step * BLOCK + lanes
        value = tl.cast(raw[step], tl.float32)
        squares += value * value
        if scale is not None:
            value *= tl.load(scale + at, mask=at < size, other=0.0).to(tl.float32)
        if GATE is not None:
            value = activate(value, GATE) * raw_up[step].to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value), propagate_nan=NAN)
        kept = kept + (value,)
    inverse = 1.0
    if scale is not None:
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / size + eps)
    # FP8 has no infinity, and the cut below would make -LARGEST of NaN: the scale tells of both.
    nothing = tl.sum(largest * 0.0, axis=0)
    unit = tl.maximum((tl.max(largest, axis=0) + nothing) * inverse, 1e-12, propagate_nan=NAN) / LARGEST
    tl.store(scales + row, unit)
    factor = inverse / unit
    for step in tl.static_range(STEPS):
        at = step * BLOCK + lanes
        value = tl.minimum(tl.maximum(kept[step] * factor, -LARGEST), LARGEST)
        tl.store(values + row * size + at, value.to(values.dtype.element_ty), mask=at < size)


def scaled_mm(
    x: Tensor, weight: Fp8Weight, scale: Tensor | None = None, eps: float = 0.0, gate: str | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """a @ weight.T + bias, a being x after its norm or gate, rounded to FP8 with one scale a token. -> [tokens, out]."""
    values, scales = quantize_rows(x, scale, eps, gate)
    return torch._scaled_mm(
        values, weight.values.t(), scale_a=scales, scale_b=weight.scales.t(), bias=bias, out_dtype=x.dtype
    )


def matmul(x: Tensor, weight: Fp8Weight) -> Tensor:
    """x @ weight.T, the weight's values in x's type. x: [tokens, in] -> [tokens, out]."""
    tokens = x.shape[0]
    out_features, in_features = weight.values.shape
    out = torch.empty((tokens, out_features), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block_m = min(128, max(16, triton.next_power_of_2(tokens)))
    block_n = 128 if tokens > 64 else 32
    block_k = min(128, weight.block or 128)
    grid = (triton.cdiv(out_features, block_n), triton.cdiv(tokens, block_m))
    _matmul[grid](
        x, weight.values, weight.scales, out, tokens, out_features, in_features, x.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, SCALE_BLOCK=weight.block or 0,
        num_warps=4 if block_n * block_m <= 4096 else 8, num_stages=4, **launch_options(tokens),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["m"])
def _matmul(
    x, w, scales, out, m, n, k, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The weights are the first operand of the product: converted, they can stay in registers.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    known_rows, known_tokens = rows < n, tokens < m
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    wait_for_inputs(PDL)
    for start in tl.range(0, k, BLOCK_K):
        at = start + columns
        tile = tl.load(w + rows[:, None] * k + at[None, :], mask=known_rows[:, None] & (at < k)[None, :], other=0.0)
        value = tl.load(
            x + tokens[None, :] * x_stride + at[:, None], mask=known_tokens[None, :] & (at < k)[:, None], other=0.0
        )
        if SCALE_BLOCK > 0:
            # BLOCK_K divides SCALE_BLOCK or is it.
            scale = tl.load(scales + rows * tl.cdiv(k, SCALE_BLOCK) + start // SCALE_BLOCK, mask=known_rows, other=0.0)
            acc += tl.dot(tile.to(value.dtype), value) * scale[:, None]
        else:
            acc = tl.dot(tile.to(value.dtype), value, acc)
    if SCALE_BLOCK == 0:
        acc *= tl.load(scales + rows, mask=known_rows, other=0.0)[:, None]
    target = out + tokens[None, :] * n + rows[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=known_rows[:, None] & known_tokens[None, :])
