"""Triton twin of spmd_serve.kernels.activation."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_serve.kernels.gpu.launch import launch_options, wait_for_inputs

BLOCK = 1024
ACTIVATIONS = (None, "silu", "gelu_tanh")  # the .cu files' numbers of them


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """See spmd_serve.kernels.activation.gated_activation."""
    rows, both = gate_up.shape
    size = both // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (rows, triton.cdiv(size, BLOCK))
        _gated[grid](gate_up, out, size, KIND=kind, BLOCK=BLOCK, num_warps=4, **launch_options(rows))
    return out


@triton.jit
def activate(gate, KIND: tl.constexpr):
    """act(gate), float32."""
    if KIND == "silu":
        exponent = -gate
    else:
        tl.static_assert(KIND == "gelu_tanh")
        # (1 + tanh(y)) / 2 is the logistic function of 2 y
        exponent = -2.0 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(exponent))


@triton.jit
def _gated(gate_up, out, size, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < size
    wait_for_inputs(PDL)
    gate = tl.load(gate_up + row * 2 * size + offs, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + offs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + offs, (activate(gate, KIND) * up).to(out.dtype.element_ty), mask=inside)
