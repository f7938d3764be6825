"""Triton twin of spmd_serve.kernels.filters: a search over the logits' bits instead of a sort.

A float's bits, with those below the sign flipped in a negative number, are an integer of the same order, the `key`. A program
has a row, and looks for the key of the threshold in an interval that it cuts into four at each pass over the row: what
lies above the three cuts is counted, or weighed. bfloat16's keys have 16 bits, so 8 passes find one, whatever the logits are.
Sums are made in the same order every time: all ranks find the same threshold.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_serve.kernels.filters import Filters
from spmd_serve.kernels.gpu.launch import launch_options, wait_for_inputs

BLOCK_BYTES = 16384
WARPS = 32
STAGES = tl.constexpr(6)  # blocks on their way


def lowest_kept(parts: Tensor, filters: Filters, slots: Tensor) -> Tensor:
    """See spmd_serve.kernels.filters.lowest_kept. One launch, no synchronisation."""
    n, rows, width = parts.shape
    assert parts.stride(2) == 1
    out = torch.empty(rows, dtype=torch.float32, device=parts.device)
    _lowest_kept[(rows,)](
        parts, filters.temperature, filters.top_k, filters.top_p, filters.min_p, slots, out,
        n, width, parts.stride(0), parts.stride(1),
        SHIFT=16 if parts.dtype == torch.bfloat16 else 0, BLOCK=min(BLOCK_BYTES // parts.itemsize, triton.next_power_of_2(width)), num_warps=WARPS,
        **launch_options(2),  # an early start is not worth a second compilation
    )  # fmt: skip
    return out


@triton.jit
def _keys(logits, SHIFT: tl.constexpr):
    """int32, in the order of the logits. SHIFT: of its bits, how many say nothing."""
    bits = logits.to(tl.float32).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _lowest_of(key, SHIFT: tl.constexpr):
    """The lowest float32 with this key."""
    bits = key << SHIFT
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _logit_of(key, SHIFT: tl.constexpr):
    """The one logit with this key."""
    bits = key << SHIFT
    bits = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT) << SHIFT
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _largest(row, parts, width, part_stride, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for part in range(parts):
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            at = start + lanes
            logits = tl.load(row + part * part_stride.to(tl.int64) + at, mask=at < width, other=float("-inf"))
            best = tl.maximum(best, logits.to(tl.float32))
    return tl.max(best, axis=0)


@triton.jit
def _above(
    row,
    parts,
    width,
    part_stride,
    largest,
    inverse,
    a,
    b,
    c,
    WEIGH: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Over the keys above a, b and c, of which a is the lowest: the sums of exp((logit - largest) * inverse), or how many."""
    lanes = tl.arange(0, BLOCK)
    above_a = tl.zeros((BLOCK,), tl.float32)
    above_b = tl.zeros((BLOCK,), tl.float32)
    above_c = tl.zeros((BLOCK,), tl.float32)
    for part in range(parts):
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            at = start + lanes
            logits = tl.load(row + part * part_stride.to(tl.int64) + at, mask=at < width, other=float("-inf")).to(
                tl.float32
            )
            keys = _keys(logits, SHIFT)
            if tl.max(keys, axis=0) > a:  # most blocks have nothing there
                if WEIGH:
                    weights = tl.exp((logits - largest) * inverse)
                else:
                    weights = tl.full((BLOCK,), 1.0, tl.float32)
                above_a += tl.where(keys > a, weights, 0.0)
                above_b += tl.where(keys > b, weights, 0.0)
                above_c += tl.where(keys > c, weights, 0.0)
    return tl.sum(above_a, axis=0), tl.sum(above_b, axis=0), tl.sum(above_c, axis=0)


@triton.jit
def _lowest_kept(
    logits, temperature, top_k, top_p, min_p, slots, out, parts, width, part_stride, row_stride,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    wait_for_inputs(PDL)
    slot = tl.load(slots + index)
    t = tl.load(temperature + slot)
    k = tl.load(top_k + slot)
    p = tl.load(top_p + slot)
    floor_p = tl.load(min_p + slot)
    lowest = tl.full((), float("-inf"), tl.float32)
    if (t > 0) & ((k > 0) | (p < 1) | (floor_p > 0)):
        row = logits + index.to(tl.int64) * row_stride
        inverse = 1.0 / t
        largest = _largest(row, parts, width, part_stride, BLOCK)
        bottom = _keys(lowest, SHIFT).to(tl.int64)
        top = _keys(largest, SHIFT).to(tl.int64)
        kept = bottom  # the lowest key that is kept
        if k > 0:
            # The largest key that k or more are not below. Above `high` there are fewer.
            high = top
            while kept < high:
                step = (high - kept) // 4 + 1
                a = kept + step
                b = tl.minimum(a + step, high + 1)
                c = tl.minimum(b + step, high + 1)
                count_a, count_b, count_c = _above(
                    row, parts, width, part_stride, largest, inverse,
                    (a - 1).to(tl.int32), (b - 1).to(tl.int32), (c - 1).to(tl.int32), False, SHIFT, BLOCK,
                )  # fmt: skip
                if count_c >= k:
                    kept = c
                elif count_b >= k:
                    kept = b
                    high = c - 1
                elif count_a >= k:
                    kept = a
                    high = b - 1
                else:
                    high = a - 1
        if p < 1:
            # What the k best weigh: of those that share the last place, as many as there is room for.
            last = kept.to(tl.int32)
            weight, _b, _c = _above(
                row, parts, width, part_stride, largest, inverse, last - 1, last, last, True, SHIFT, BLOCK
            )
            if kept > bottom:
                count, _b, _c = _above(
                    row, parts, width, part_stride, largest, inverse, last - 1, last, last, False, SHIFT, BLOCK
                )
                weight -= (count - k) * tl.exp((_logit_of(last, SHIFT) - largest) * inverse)
            share = p * weight
            # The lowest key that has less than the share above it. `high` has.
            high = top
            while kept < high:
                step = (high - kept + 3) // 4
                a = kept + step - 1
                b = tl.minimum(a + step, high)
                c = tl.minimum(b + step, high)
                weight_a, weight_b, weight_c = _above(
                    row, parts, width, part_stride, largest, inverse, a.to(tl.int32), b.to(tl.int32), c.to(tl.int32),
                    True, SHIFT, BLOCK,
                )  # fmt: skip
                if weight_a < share:
                    high = a
                elif weight_b < share:
                    kept = a + 1
                    high = b
                elif weight_c < share:
                    kept = b + 1
                    high = c
                else:
                    kept = c + 1
        if kept > bottom:
            lowest = _lowest_of(kept.to(tl.int32), SHIFT)
        if floor_p > 0:
            lowest = tl.maximum(lowest, largest + t * tl.log(floor_p))
    tl.store(out + index, lowest)
