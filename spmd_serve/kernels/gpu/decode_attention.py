"""Triton twin of spmd_serve.kernels.decode_attention; few rows go to few_rows.py, where that has a kernel for them.

A program takes one row, one KV head with its group of query heads, and one split of the row's tokens. Inside it, each
warp works on its own tokens (a batched dot with one batch a warp), so that no warp waits for another in the loop; their
softmax states are merged at the end, and the states of the splits by the last program of the row to arrive. (Split-KV:
Dao et al., Flash-Decoding, 2023.)
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_serve.kernels.decode_attention import DecodeWorkspace
from spmd_serve.kernels.gpu.few_rows import few_rows_attention, few_rows_config
from spmd_serve.kernels.gpu.launch import launch_options, wait_for_inputs
from spmd_serve.kernels.rope_cache import Rotation

LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class DecodeConfig:
    """slices: token ranges side by side (one a warp); block: tokens of each a step; splits: programs a row and KV head at
    most; split_steps: the fewest steps for which one of them starts. ahead: a program's first step of K and V is asked for
    before the kernel before this one has ended, where that one does not write them (with a rotation). leaves_early: the next kernel may start when all
    programs have read the cache, not when they have ended.
    """

    slices: int
    block: int
    warps: int
    stages: int
    splits: int
    split_steps: int = 1
    ahead: bool = False
    leaves_early: bool = False


def choose_config(rows: int, kv_heads: int, head_dim: int) -> DecodeConfig:
    """By shape, from measurements on an H200: programs of one warp, so that many are in flight.

    rows * kv_heads * splits stays within MAX_PROGRAMS.
    """
    heads = rows * kv_heads
    block = 32 if head_dim <= 128 else 16
    if heads <= 64:
        splits, stages = (64, 3) if heads <= 8 else (32, 3) if heads <= 16 else (8, 5) if heads <= 32 else (4, 5)
        return DecodeConfig(slices=1, block=block, warps=1, stages=stages, splits=splits, ahead=rows == 1)
    # A program reads some 20 tokens a us: rows of unequal length end late unless the long ones are shared out.
    if heads <= 400:
        splits, stages, split_steps = (4, 7, 4) if heads <= 160 else (4, 5, 8)
    elif heads <= 700:
        splits, stages, split_steps = 2, 7, 24
    else:
        splits, stages, split_steps = 1, 7 if heads <= 1100 else 5, 1
    return DecodeConfig(1, block, 1, stages, splits, split_steps, leaves_early=rows > 16)


def decode_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, slots: Tensor, lengths: Tensor, scale: float,
    window: int | None, softcap: float | None, rotation: Rotation | None, workspace: DecodeWorkspace,
    config: DecodeConfig | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See spmd_serve.kernels.decode_attention.decode_attention."""
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    rows = lengths.shape[0]
    q_heads = q.shape[1] // head_dim - 2 * kv_heads if rotation is not None else q.shape[1]
    group = q_heads // kv_heads
    if out is None:
        out = torch.empty((rows, q_heads, head_dim), dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    if config is None and rotation is not None:
        few = few_rows_config(rows, kv_heads)
        arguments = q, k_cache, v_cache, page_table, slots, lengths, scale, window, softcap, rotation, out
        if few is not None and few_rows_attention(*arguments, few):
            return out
    if config is None:
        config = choose_config(rows, kv_heads, head_dim)
    turn = rotation or Rotation(lengths, None)  # without one nothing of it is read
    table = turn.rope_table
    block_d = triton.next_power_of_2(head_dim)
    merge_group = triton.next_power_of_2(group)
    _decode[(kv_heads, rows, config.splits)](
        q, k_cache, v_cache, page_table, slots, lengths, out, workspace.sums, workspace.maxima, workspace.arrived,
        turn.positions, table, turn.q_scale, turn.k_scale, turn.eps, scale, 0.0 if softcap is None else softcap,
        page_table.stride(0), q.stride(0),
        KV_HEADS=kv_heads, GROUP=group, BLOCK_G=max(8, triton.next_power_of_2(group)), HEAD_DIM=head_dim,
        BLOCK_D=block_d, PAGE_SIZE=page_size, WINDOW=window or 0, SOFTCAP=softcap is not None,
        FUSED=rotation is not None, NORM=turn.q_scale is not None,
        HALF=0 if table is None else table.shape[2], SLICES=config.slices, BLOCK=config.block, SPLITS=config.splits,
        SPLIT_STEPS=config.split_steps, MERGE_G=merge_group, MERGE=min(config.splits, max(1, 4096 // (merge_group * block_d))),
        AHEAD=config.ahead and rotation is not None, LEAVES_EARLY=config.leaves_early,
        num_warps=config.warps, num_stages=config.stages, **launch_options(rows),
    )  # fmt: skip
    return out


@triton.jit
def _heads(
    base, scale, angle, heads, d, partner, inside, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads (column [H, 1]) of a projection, normed and rotated: float32 [H, D]."""
    value = tl.load(base + heads * HEAD_DIM + d, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(value * value, axis=1) / HEAD_DIM + eps)[:, None]
        value = value * inverse * tl.load(scale + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
    if HALF > 0:
        other = tl.load(base + heads * HEAD_DIM + partner, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            other = other * inverse * tl.load(scale + partner, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        rotated = d < 2 * HALF
        cos = tl.load(angle + d % HALF, mask=rotated, other=1.0)
        sin = tl.load(angle + HALF + d % HALF, mask=rotated, other=0.0)
        value = value * cos + other * tl.where(d < HALF, -sin, sin)
    return value


@triton.jit
def _capped(score, softcap, SOFTCAP: tl.constexpr):
    """Scores to the base-2 logarithm's scale, soft-capped."""
    if SOFTCAP:
        # tanh(y) = 1 - 2 / (1 + exp(2 y))
        score = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(score * (2.0 * LOG2E) / softcap)))
    return score * LOG2E


@triton.jit
def _cached(
    k_cache, v_cache, table, t, high, head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """K [SLICES, BLOCK, D] and V [SLICES, D, BLOCK] of the tokens t [SLICES, BLOCK] below `high`."""
    dims = tl.arange(0, BLOCK_D)
    there = t < high
    page = tl.load(table + t // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    at = ((page * PAGE_SIZE + t % PAGE_SIZE) * KV_HEADS + head) * HEAD_DIM
    k = tl.load(
        k_cache + at[:, :, None] + dims[None, None, :],
        mask=there[:, :, None] & (dims < HEAD_DIM)[None, None, :], other=0.0,
    )  # fmt: skip
    v = tl.load(
        v_cache + at[:, None, :] + dims[None, :, None],
        mask=there[:, None, :] & (dims < HEAD_DIM)[None, :, None], other=0.0,
    )  # fmt: skip
    return k, v


@triton.jit
def _attend(k, v, there, queries, top, total, acc, scale, softcap, SOFTCAP: tl.constexpr):
    """The softmax state (maxima, sums, weighted sums of V) with these tokens in it."""
    score = _capped(tl.dot(k, queries) * scale, softcap, SOFTCAP)
    score = tl.where(there[:, :, None], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(score - safe[:, None, :])
    keep = tl.exp2(top - safe)
    total = total * keep + tl.sum(p, axis=1)
    acc = tl.dot(v, p.to(v.dtype), acc * keep[:, None, :])
    return new_top, total, acc


@triton.jit
def _decode(
    q, k_cache, v_cache, page_table, slots, lengths, out, sums, maxima, arrived,
    positions, rope_table, q_scale, k_scale, eps, scale, softcap, table_stride, q_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr, NORM: tl.constexpr,
    HALF: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, SPLIT_STEPS: tl.constexpr,
    MERGE_G: tl.constexpr, MERGE: tl.constexpr, AHEAD: tl.constexpr, LEAVES_EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)  # the heads of a token lie side by side in the cache, and are read at the same time
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    slot = tl.load(slots + row)
    length = tl.load(lengths + row).to(tl.int32)
    table = page_table + slot * table_stride
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    end = length  # of the tokens to read from the cache
    if FUSED:
        end = length - 1
    step: tl.constexpr = SLICES * BLOCK
    steps = tl.cdiv(tl.maximum(end - first, 0), step)
    per_split = tl.maximum(tl.cdiv(steps, SPLITS), SPLIT_STEPS)
    splits = tl.maximum(tl.cdiv(steps, per_split), 1)  # those that have something to do
    if split >= splits:
        return  # split 0, which always has something to do, waits for the kernel before
    low = first + split * per_split * step
    high = tl.minimum(low + per_split * step, end)

    g = tl.arange(0, BLOCK_G)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (g < GROUP) & (d < HEAD_DIM)
    partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    angle = rope_table
    if HALF > 0:
        angle = rope_table + tl.load(positions + row) * (2 * HALF)
    lanes = tl.arange(0, SLICES)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if AHEAD:
        first_k, first_v = _cached(
            k_cache, v_cache, table, low + lanes, high, head, KV_HEADS, HEAD_DIM, BLOCK_D, PAGE_SIZE
        )  # fmt: skip
    wait_for_inputs(PDL)
    base = q + row * q_stride
    if FUSED:
        query = _heads(base, q_scale, angle, head * GROUP + g, d, partner, inside, eps, HEAD_DIM, HALF, NORM)
        query = query.to(q.dtype.element_ty)
    else:
        query = tl.load(base + (head * GROUP + g) * HEAD_DIM + d, mask=inside, other=0.0)

    # Each slice's softmax state over its tokens. Tokens and dimensions are the long sides of the products, the few query
    # heads the short one: 8 columns of the tensor cores' tile instead of 16 rows.
    queries = tl.broadcast_to(tl.trans(query)[None, :, :], (SLICES, BLOCK_D, BLOCK_G))
    top = tl.full((SLICES, BLOCK_G), float("-inf"), tl.float32)
    total = tl.zeros((SLICES, BLOCK_G), tl.float32)
    acc = tl.zeros((SLICES, BLOCK_D, BLOCK_G), tl.float32)
    if AHEAD:
        there = low + lanes < high
        k, v = first_k.to(query.dtype), first_v.to(query.dtype)
        top, total, acc = _attend(k, v, there, queries, top, total, acc, scale, softcap, SOFTCAP)
        low += step
    for start in tl.range(low, high, step):
        t = start + lanes
        k, v = _cached(k_cache, v_cache, table, t, high, head, KV_HEADS, HEAD_DIM, BLOCK_D, PAGE_SIZE)
        k, v = k.to(query.dtype), v.to(query.dtype)
        top, total, acc = _attend(k, v, t < high, queries, top, total, acc, scale, softcap, SOFTCAP)

    if LEAVES_EARLY and PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()

    # The slices together.
    best = tl.max(top, axis=0)
    safe = tl.where(best == float("-inf"), 0.0, best)
    part = tl.exp2(top - safe[None, :])
    sum_ = tl.sum(total * part, axis=0)
    result = tl.trans(tl.sum(acc * part[:, None, :], axis=0))

    if FUSED:
        if (split == splits - 1) & (length > 0):
            # The newest token: its key and value come from the projection, and go into the cache.
            one = tl.arange(0, 1)[:, None]
            heads: tl.constexpr = KV_HEADS * GROUP
            key = _heads(base, k_scale, angle, heads + head + one, d, partner, d < HEAD_DIM, eps, HEAD_DIM, HALF, NORM)
            key = key.to(k_cache.dtype.element_ty)
            value = tl.load(base + (heads + KV_HEADS + head) * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
            last = length - 1
            page = tl.load(table + last // PAGE_SIZE).to(tl.int64)
            at = ((page * PAGE_SIZE + last % PAGE_SIZE) * KV_HEADS + head) * HEAD_DIM
            tl.store(k_cache + at + d, key, mask=d < HEAD_DIM)
            tl.store(v_cache + at + d, value.to(v_cache.dtype.element_ty), mask=d < HEAD_DIM)
            score = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1) * scale
            score = _capped(score, softcap, SOFTCAP)
            new_best = tl.maximum(best, score)
            keep = tl.exp2(best - new_best)
            p = tl.exp2(score - new_best)
            sum_ = sum_ * keep + p
            result = result * keep[:, None] + p[:, None] * value.to(tl.float32)
            best = new_best

    target = out + (row * KV_HEADS * GROUP + head * GROUP + g) * HEAD_DIM + d
    if SPLITS == 1:
        sum_ = tl.where(sum_ == 0.0, 1.0, sum_)  # a padding row
        tl.store(target, (result / sum_[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        which = row * KV_HEADS + head
        if splits == 1:
            sum_ = tl.where(sum_ == 0.0, 1.0, sum_)
            tl.store(target, (result / sum_[:, None]).to(out.dtype.element_ty), mask=inside)
        else:
            lane = tl.arange(0, BLOCK_G)
            slot_ = (which * SPLITS + split) * GROUP + lane
            tl.store(sums + slot_[:, None] * HEAD_DIM + d, result, mask=inside)
            tl.store(maxima + 2 * slot_, best, mask=lane < GROUP)
            tl.store(maxima + 2 * slot_ + 1, sum_, mask=lane < GROUP)
            tl.debug_barrier()
            before = tl.atomic_add(arrived + which, 1, sem="acq_rel", scope="gpu")
            if before == splits - 1:
                tl.store(arrived + which, 0)
                _merge(
                    out, sums, maxima, which, splits, GROUP, HEAD_DIM, BLOCK_D, SPLITS, MERGE_G, MERGE
                )  # fmt: skip


@triton.jit
def _merge(
    out, sums, maxima, which, splits, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr, MERGE_G: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """The states of the splits (base, sum, maximum) into the output of one row and KV head."""
    g = tl.arange(0, MERGE_G)[None, :]
    d = tl.arange(0, BLOCK_D)[None, None, :]
    every = tl.arange(0, SPLITS)[:, None]
    at = maxima + 2 * ((which * SPLITS + every) * GROUP + g)
    known = (every < splits) & (g < GROUP)
    best = tl.max(tl.load(at, mask=known, other=float("-inf"), cache_modifier=".cg"), axis=0)[None, :]
    total = tl.zeros((MERGE_G,), tl.float32)
    acc = tl.zeros((MERGE_G, BLOCK_D), tl.float32)
    for start in tl.range(0, splits, MERGE):
        some = start + tl.arange(0, MERGE)[:, None]
        there = (some < splits) & (g < GROUP)
        slot = (which * SPLITS + some) * GROUP + g
        top = tl.load(maxima + 2 * slot, mask=there, other=float("-inf"), cache_modifier=".cg")
        sum_ = tl.load(maxima + 2 * slot + 1, mask=there, other=0.0, cache_modifier=".cg")
        weight = tl.where(there, tl.exp2(top - best), 0.0)
        part = tl.load(
            sums + slot[:, :, None] * HEAD_DIM + d, mask=there[:, :, None] & (d < HEAD_DIM), other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        total += tl.sum(sum_ * weight, axis=0)
        acc += tl.sum(part * weight[:, :, None], axis=0)
    heads = tl.arange(0, MERGE_G)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    target = out + (which * GROUP + heads) * HEAD_DIM + dims
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(target, result.to(out.dtype.element_ty), mask=(heads < GROUP) & (dims < HEAD_DIM))
