"""Triton twin of spmd_serve.kernels.gumbel: the same integers, the same result up to rounding of the logarithms."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from spmd_serve.kernels import gumbel
from spmd_serve.kernels.gpu.launch import INTERPRETED, launch_options, wait_for_inputs
from spmd_serve.types import NOT_A_TOKEN

GOLDEN64 = tl.constexpr(gumbel.GOLDEN64)
MIX64_A = tl.constexpr(gumbel.MIX64_A)
MIX64_B = tl.constexpr(gumbel.MIX64_B)
GOLDEN32 = tl.constexpr(gumbel.GOLDEN32)
MIX32_A = tl.constexpr(gumbel.MIX32_A)
MIX32_B = tl.constexpr(gumbel.MIX32_B)
LARGEST_BELOW_ONE = tl.constexpr(gumbel.LARGEST_BELOW_ONE)
NO_LIBDEVICE = tl.constexpr(INTERPRETED)
BROKEN = tl.constexpr(NOT_A_TOKEN)  # the largest int32: any index is below it

BLOCK = 1024
PROGRAMS = 132 * 8  # about how many programs to cut the batch into: a few for each multiprocessor


def gumbel_argmax(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, vocab_offset: int = 0,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See spmd_serve.kernels.gumbel.gumbel_argmax. Two launches, no synchronisation."""
    rows, vocab = logits.shape
    device = logits.device
    if vocab == 0:
        values = torch.full((rows,), -torch.inf, dtype=torch.float32, device=device)
        return values, torch.full((rows,), vocab_offset, dtype=torch.int64, device=device)
    blocks = triton.cdiv(vocab, BLOCK)
    per_program = triton.cdiv(blocks, max(1, min(blocks, PROGRAMS // rows)))
    splits = triton.cdiv(blocks, per_program)
    part_values = torch.empty((rows, splits), dtype=torch.float32, device=device)
    part_indices = torch.empty((rows, splits), dtype=torch.int32, device=device)
    values = torch.empty(rows, dtype=torch.float32, device=device)
    indices = torch.empty(rows, dtype=torch.int64, device=device)
    options = launch_options(rows)
    _best_of_slice[(rows, splits)](
        logits, temperature, seeds, positions, slots, part_values, part_indices,
        vocab, logits.stride(0), vocab_offset, per_program, BLOCK=BLOCK, num_warps=8, **options,
    )  # fmt: skip
    _best_of_slices[(rows,)](
        part_values, part_indices, values, indices, splits, vocab_offset,
        BLOCK=triton.next_power_of_2(splits), num_warps=1 if splits <= 256 else 4, **options,
    )  # fmt: skip
    return values, indices


@triton.jit
def _splitmix64(x):
    x = x + tl.full((), GOLDEN64, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full((), MIX64_A, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), MIX64_B, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _log(x):
    """The special function unit's logarithm: off by 2e-7, for a third of the instructions of tl.log."""
    if NO_LIBDEVICE:
        result = tl.log(x)
    else:
        result = libdevice.fast_logf(x)
    return result


@triton.jit
def _gumbel(v, low, high):
    """Noise of vocabulary indices v (uint32) under the key (low, high)."""
    x = v * tl.full((), GOLDEN32, tl.uint32) + low
    x = (x ^ (x >> 16)) * tl.full((), MIX32_A, tl.uint32)
    x = (x ^ (x >> 15) ^ high) * tl.full((), MIX32_B, tl.uint32)
    x = (x ^ (x >> 15)) >> 1
    u = tl.minimum((x.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * (1.0 / 2147483648.0), LARGEST_BELOW_ONE)
    # log1p: near 0 by its series, whose next term is below half an ulp; elsewhere 1 - u loses nothing that counts
    small = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    exponential = tl.where(u < 0.015625, small, -_log(1.0 - u))
    return -_log(exponential)


@triton.jit(
    do_not_specialize=["vocab_offset", "blocks_per_program"], do_not_specialize_on_alignment=["positions", "slots"]
)
def _best_of_slice(
    logits, temperature, seeds, positions, slots, part_values, part_indices,
    vocab, row_stride, vocab_offset, blocks_per_program, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    split = tl.program_id(1)
    wait_for_inputs(PDL)
    slot = row
    if slots is not None:
        slot = tl.load(slots + row)
    t = tl.load(temperature + slot)
    noisy = t > 0
    inverse = tl.where(noisy, 1.0 / tl.where(noisy, t, 1.0), 1.0)
    seed = tl.load(seeds + slot).to(tl.uint64)
    position = tl.load(positions + row).to(tl.uint64)
    key = _splitmix64(_splitmix64(seed) ^ position)
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    base = logits + row.to(tl.int64) * row_stride
    first = split * blocks_per_program * BLOCK
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = first + lanes
    for start in range(first, min(first + blocks_per_program * BLOCK, vocab), BLOCK):
        offs = start + lanes
        score = tl.load(base + offs, mask=offs < vocab, other=float("-inf")).to(tl.float32) * inverse
        if noisy:
            score += _gumbel((offs + vocab_offset).to(tl.uint32), low, high)
        where = tl.where(score > best, offs, where)
        best = tl.maximum(best, score, propagate_nan=tl.PropagateNan.ALL)
    best = tl.where(best < float("inf"), best, float("inf"))  # NaN becomes infinite too
    top = tl.max(best, axis=0)
    index = tl.min(tl.where((best == top) & (best < float("inf")), where, BROKEN), axis=0)
    out = row * tl.num_programs(1) + split
    tl.store(part_values + out, top)
    tl.store(part_indices + out, index)


@triton.jit(do_not_specialize=["splits", "vocab_offset"])
def _best_of_slices(
    part_values, part_indices, values, indices, splits, vocab_offset, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    lanes = tl.arange(0, BLOCK)
    best = tl.load(part_values + row * splits + lanes, mask=lanes < splits, other=float("-inf"))
    where = tl.load(part_indices + row * splits + lanes, mask=lanes < splits, other=BROKEN)
    top = tl.max(best, axis=0)
    index = tl.min(tl.where(best == top, where, BROKEN), axis=0)
    tl.store(values + row, top)
    tl.store(indices + row, tl.where(index < BROKEN, index.to(tl.int64) + vocab_offset, BROKEN))
