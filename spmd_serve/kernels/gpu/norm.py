"""Triton twins of spmd_serve.kernels.norm."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_serve.kernels.gpu.launch import launch_options, wait_for_inputs


def rms_norm(x: Tensor, scale: Tensor, eps: float, *, pass_on: bool = False) -> Tensor:
    """See spmd_serve.kernels.norm.rms_norm. pass_on: see launch_options."""
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(flat)
    _launch(flat, None, scale, out, eps, pass_on=pass_on)
    return out.view(x.shape)


def add_rms_norm_(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See spmd_serve.kernels.norm.add_rms_norm_."""
    out = torch.empty_like(residual)
    _launch(x, residual, scale, out, eps)
    return out, residual


def _launch(
    x: Tensor, residual: Tensor | None, scale: Tensor, out: Tensor, eps: float, *, pass_on: bool = False
) -> None:
    rows, size = out.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(size)
    _rms_norm[(rows,)](
        x, residual, scale, out, size, x.stride(0), 0 if residual is None else residual.stride(0), eps,
        ADD=residual is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16), **launch_options(rows, pass_on=pass_on),
    )  # fmt: skip


@triton.jit
def _rms_norm(
    x,
    residual,
    scale,
    out,
    size,
    x_stride,
    residual_stride,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    inside = offs < size
    weight = tl.load(scale + offs, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    value = tl.load(x + row * x_stride + offs, mask=inside, other=0.0)
    if ADD:
        at = residual + row * residual_stride + offs
        total = value.to(tl.float32) + tl.load(at, mask=inside, other=0.0).to(tl.float32)
        value = total.to(residual.dtype.element_ty)
        tl.store(at, value, mask=inside)
    number = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(number * number, axis=0) / size + eps)
    tl.store(out + row * size + offs, (number * inverse * weight).to(out.dtype.element_ty), mask=inside)
