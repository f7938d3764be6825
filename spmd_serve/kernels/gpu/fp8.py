"""Linear layers over FP8 weights: the weights' bytes are read as they are, and become the compute type in registers.

One token goes through the GEMV of linear.py. For more, `_matmul` multiplies tiles on the tensor cores in the compute type,
so that activations are not rounded to FP8; with scales of whole rows and many tokens, torch._scaled_mm multiplies in FP8
with one scale a token, at twice the rate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_serve.kernels.fp8 import FP8, FP8_MAX, Fp8Weight
from spmd_serve.kernels.gpu.activation import gated_activation
from spmd_serve.kernels.gpu.launch import launch_options, wait_for_inputs
from spmd_serve.kernels.gpu.linear import GemvConfig, gemv
from spmd_serve.kernels.gpu.norm import rms_norm

SCALED_MM_TOKENS = 64  # from here on the arithmetic counts, not the weights' bytes


def fp8_linear(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None, scale: Tensor | None, eps: float, activation: str | None,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """See spmd_serve.kernels.fp8.fp8_linear. scale and eps are the norm's."""
    tokens = x.shape[0]
    if tokens == 1 and weight.values.numel():
        config = gemv_config(weight.values.shape[1], gated=activation is not None)
        scales, block = weight.scales, weight.block
        return gemv(x, weight.values, bias, scale, eps, activation, residual, config, scales, block)
    if scale is not None:
        x = rms_norm(x, scale, eps)
    out = scaled_mm(x, weight) if _suits_scaled_mm(x, weight) else matmul(x, weight)
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


def _suits_scaled_mm(x: Tensor, weight: Fp8Weight) -> bool:
    out_features, in_features = weight.values.shape
    aligned = in_features % 16 == 0 and out_features % 16 == 0
    return weight.block is None and aligned and x.dtype == torch.bfloat16 and x.shape[0] >= SCALED_MM_TOKENS


def scaled_mm(x: Tensor, weight: Fp8Weight) -> Tensor:
    """x @ weight.T with x rounded to FP8, one scale a token. x: [tokens, in] -> [tokens, out]."""
    x_scales = x.abs().amax(dim=1, keepdim=True).float().clamp_(min=1e-12) / FP8_MAX
    x_values = (x.float() / x_scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return torch._scaled_mm(x_values, weight.values.t(), scale_a=x_scales, scale_b=weight.scales.t(), out_dtype=x.dtype)


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
