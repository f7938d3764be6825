"""Triton twin of spmd_serve.kernels.filters: a search over the logits' bits instead of a sort.

A float's bits, with those below the sign flipped in a negative number, are an integer of the same order, the `key`. A program
has a row, and looks for the key of the threshold in an interval that it cuts into four at each pass: what lies above the
three cuts is counted, or weighed. bfloat16's keys have 16 bits, so 8 passes find one, whatever the logits are.

Passes over the whole row are rare. The first one keeps the four best of each lane (of BLOCK, a lane has every BLOCK-th
logit), in registers: what is above the `horizon`, the best of the lanes' fourths, is among them, and that is mostly more
than the filters keep. Sums are made in the same order every time: all ranks find the same threshold.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_serve.kernels.filters import Filters
from spmd_serve.kernels.gpu.launch import launch_options, wait_for_inputs

BLOCK = 4096
WARPS = 32
STAGES = tl.constexpr(6)  # blocks on their way


def lowest_kept(parts: Tensor, filters: Filters, slots: Tensor) -> Tensor:
    """See spmd_serve.kernels.filters.lowest_kept. One launch, no synchronisation."""
    n, rows, width = parts.shape
    assert parts.stride(2) == 1
    out = torch.empty(rows, dtype=torch.float32, device=parts.device)
    _lowest_kept[(rows,)](
        parts, filters.temperature, filters.top_k, filters.top_p, filters.min_p, slots, out,
        n, width, parts.stride(0) if n > 1 else 0, parts.stride(1),
        SHIFT=16 if parts.dtype == torch.bfloat16 else 0, BLOCK=min(BLOCK, triton.next_power_of_2(width)),
        num_warps=WARPS, **launch_options(2),  # an early start is not worth a second compilation
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
def _best_of_lanes(row, parts, width, part_stride, BLOCK: tl.constexpr):
    """The four largest logits of each lane, float32 [BLOCK], the largest first."""
    lanes = tl.arange(0, BLOCK)
    first = tl.full((BLOCK,), float("-inf"), tl.float32)
    second, third, fourth = first, first, first
    for part in range(parts):
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            at = start + lanes
            logits = tl.load(row + part * part_stride.to(tl.int64) + at, mask=at < width, other=float("-inf"))
            value = logits.to(tl.float32)
            lower = tl.minimum(first, value)
            first = tl.maximum(first, value)
            value = tl.minimum(second, lower)
            second = tl.maximum(second, lower)
            lower = tl.minimum(third, value)
            third = tl.maximum(third, value)
            fourth = tl.maximum(fourth, lower)
    return first, second, third, fourth


@triton.jit
def _add_above(sums, logits, largest, inverse, cuts, WEIGH: tl.constexpr, SHIFT: tl.constexpr):
    """To each sum, the weights of the logits whose keys are above its cut, or their number."""
    keys = _keys(logits, SHIFT)
    weights = tl.full(keys.shape, 1.0, tl.float32)
    if WEIGH:
        weights = tl.exp((logits - largest) * inverse)
    return (
        sums[0] + tl.where(keys > cuts[0], weights, 0.0),
        sums[1] + tl.where(keys > cuts[1], weights, 0.0),
        sums[2] + tl.where(keys > cuts[2], weights, 0.0),
    )


@triton.jit
def _above(
    row, parts, width, part_stride, known, horizon, inverse, a, b, c,
    WEIGH: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Over the keys above a, b and c, of which a is the lowest: the sums of exp((logit - largest) * inverse), or how many."""
    lanes = tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), tl.float32)
    sums = (zeros, zeros, zeros)
    cuts = (a.to(tl.int32), b.to(tl.int32), c.to(tl.int32))
    largest = tl.max(known[0], axis=0)
    if a >= horizon:
        for i in tl.static_range(4):
            sums = _add_above(sums, known[i], largest, inverse, cuts, WEIGH, SHIFT)
    else:
        for part in range(parts):
            for start in tl.range(0, width, BLOCK, num_stages=STAGES):
                at = start + lanes
                logits = tl.load(row + part * part_stride.to(tl.int64) + at, mask=at < width, other=float("-inf"))
                sums = _add_above(sums, logits.to(tl.float32), largest, inverse, cuts, WEIGH, SHIFT)
    return tl.sum(sums[0], axis=0), tl.sum(sums[1], axis=0), tl.sum(sums[2], axis=0)


@triton.jit(do_not_specialize_on_alignment=["slots"])
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
        known = _best_of_lanes(row, parts, width, part_stride, BLOCK)
        largest = tl.max(known[0], axis=0)
        horizon = _keys(tl.max(known[3], axis=0), SHIFT).to(tl.int64)
        bottom = _keys(lowest, SHIFT).to(tl.int64)
        top = _keys(largest, SHIFT).to(tl.int64)
        kept = bottom  # the lowest key that is kept
        count = tl.full((), 0.0, tl.float32)  # of the keys from there on, if `kept` is not the lowest of all
        if k > 0:
            # The largest key that k or more are not below. Above `high` there are fewer.
            high = top
            known_count, _b, _c = _above(
                row, parts, width, part_stride, known, horizon, inverse, horizon, horizon, horizon, False, SHIFT, BLOCK
            )
            if known_count >= k:
                kept = horizon + 1
                count = known_count
            else:
                high = horizon
            while kept < high:
                step = (high - kept) // 4 + 1
                a = kept + step
                b = tl.minimum(a + step, high + 1)
                c = tl.minimum(b + step, high + 1)
                count_a, count_b, count_c = _above(
                    row, parts, width, part_stride, known, horizon, inverse, a - 1, b - 1, c - 1, False, SHIFT, BLOCK
                )
                if count_c >= k:
                    kept = c
                    count = count_c
                elif count_b >= k:
                    kept = b
                    count = count_b
                    high = c - 1
                elif count_a >= k:
                    kept = a
                    count = count_a
                    high = b - 1
                else:
                    high = a - 1
        if p < 1:
            # What the k best weigh: of those that share the last place, as many as there is room for.
            weight, known_weight, _c = _above(
                row, parts, width, part_stride, known, horizon, inverse,
                kept - 1, tl.maximum(kept - 1, horizon), tl.maximum(kept - 1, horizon), True, SHIFT, BLOCK,
            )  # fmt: skip
            if kept > bottom:
                weight -= (count - k) * tl.exp((_logit_of(kept.to(tl.int32), SHIFT) - largest) * inverse)
            share = p * weight
            # The lowest key that has less than the share above it. `high` has.
            high = top
            if kept <= horizon:
                if known_weight < share:
                    high = horizon
                else:
                    kept = horizon + 1
            while kept < high:
                step = (high - kept + 3) // 4
                a = kept + step - 1
                b = tl.minimum(a + step, high)
                c = tl.minimum(b + step, high)
                weight_a, weight_b, weight_c = _above(
                    row, parts, width, part_stride, known, horizon, inverse, a, b, c, True, SHIFT, BLOCK
                )
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
