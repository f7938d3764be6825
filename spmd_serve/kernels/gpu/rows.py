"""Triton twin of spmd_serve.kernels.rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_serve.kernels.gpu.launch import launch_options, wait_for_inputs

BLOCK = 256


def decode_inputs(
    slots: Tensor, last_token: Tensor, length: Tensor, rope_offset: Tensor, padding_slot: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See spmd_serve.kernels.rows.decode_inputs."""
    n = slots.shape[0]
    tokens, positions, lengths = (torch.empty(n, dtype=torch.int64, device=slots.device) for _ in range(3))
    _decode_inputs[(triton.cdiv(n, BLOCK),)](
        slots,
        last_token,
        length,
        rope_offset,
        tokens,
        positions,
        lengths,
        n,
        padding_slot,
        BLOCK=BLOCK,
        **launch_options(n),
    )
    return tokens, positions, lengths


def lookup(table: Tensor, index: Tensor, first: int) -> Tensor:
    """See spmd_serve.kernels.rows.lookup."""
    n, (rows, width) = index.shape[0], table.shape
    out = torch.empty((n, width), dtype=table.dtype, device=table.device)
    block = min(1024, triton.next_power_of_2(width))
    if n:
        _lookup[(n, triton.cdiv(width, block))](
            table, index, out, first, rows, width, BLOCK=block, num_warps=4, **launch_options(n)
        )
    return out


def advance_rows_(
    slots: Tensor, tokens: Tensor, lengths: Tensor, last_token: Tensor, length: Tensor, drawn: Tensor
) -> None:
    """See spmd_serve.kernels.rows.advance_rows_."""
    n, (depth, rows) = slots.shape[0], drawn.shape
    _advance_rows[(triton.cdiv(n, BLOCK),)](
        slots, tokens, lengths, last_token, length, drawn, n, rows, DEPTH=depth, BLOCK=BLOCK, **launch_options(n)
    )


@triton.jit(do_not_specialize=["n", "padding_slot"])
def _decode_inputs(
    slots, last_token, length, rope_offset, tokens, positions, lengths, n, padding_slot,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    wait_for_inputs(PDL)
    slot = tl.load(slots + row, mask=inside, other=0)
    before = tl.load(length + slot, mask=inside, other=0)
    offset = tl.load(rope_offset + slot, mask=inside, other=0)
    tl.store(tokens + row, tl.load(last_token + slot, mask=inside, other=0), mask=inside)
    tl.store(positions + row, before + offset, mask=inside)
    tl.store(lengths + row, tl.where(slot == padding_slot, 0, before + 1), mask=inside)


@triton.jit(do_not_specialize=["first", "rows"], do_not_specialize_on_alignment=["index"])
def _lookup(table, index, out, first, rows, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    row = tl.load(index + n) - first
    inside = at < width
    there = inside & (row >= 0) & (row < rows)
    tl.store(out + n * width + at, tl.load(table + row * width + at, mask=there, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["n", "rows"])
def _advance_rows(
    slots, tokens, lengths, last_token, length, drawn, n, rows,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    wait_for_inputs(PDL)
    slot = tl.load(slots + row, mask=inside, other=0)
    token = tl.load(tokens + row, mask=inside, other=0)
    reached = tl.load(lengths + row, mask=inside, other=0)
    tl.store(last_token + slot, token, mask=inside)
    tl.store(length + slot, reached, mask=inside)
    tl.store(drawn + reached % DEPTH * rows + slot, token, mask=inside)
