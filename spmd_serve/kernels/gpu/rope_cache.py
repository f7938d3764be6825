"""Triton twin of spmd_serve.kernels.rope_cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmd_serve.kernels.gpu.launch import launch_options, wait_for_inputs
from spmd_serve.kernels.rope_cache import Rotation


def rope_and_cache(qkv: Tensor, rotation: Rotation, locations: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """See spmd_serve.kernels.rope_cache.rope_and_cache."""
    kv_heads, head_dim = k_cache.shape[2:]
    table = rotation.rope_table
    tokens = qkv.shape[0]
    heads = qkv.shape[1] // head_dim
    q_heads = heads - 2 * kv_heads
    q = torch.empty((tokens, q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return q
    block_d = triton.next_power_of_2(head_dim)
    # With few tokens many small programs, else one program a token.
    block_h = 4 if tokens <= 64 else min(triton.next_power_of_2(heads), max(1, 4096 // block_d))
    _rope_and_cache[(tokens, triton.cdiv(heads, block_h))](
        qkv, rotation.positions, locations, k_cache, v_cache, table, rotation.q_scale, rotation.k_scale, q, rotation.eps,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, HALF=0 if table is None else table.shape[2],
        NORM=rotation.q_scale is not None, BLOCK_H=block_h, BLOCK_D=block_d,
        num_warps=max(1, min(8, block_h * block_d // 512)), **launch_options(tokens),
    )  # fmt: skip
    return q


@triton.jit(do_not_specialize_on_alignment=["positions", "locations"])
def _rope_and_cache(
    qkv, positions, locations, k_cache, v_cache, rope_table, q_scale, k_scale, q_out, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    is_q = head < Q_HEADS
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    inside = (head < Q_HEADS + 2 * KV_HEADS) & (d < HEAD_DIM)
    partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))  # the other one of a rotated pair
    if NORM:
        q_weight = tl.load(q_scale + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        k_weight = tl.load(k_scale + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        weight = tl.where(is_q, q_weight, k_weight)
        if HALF > 0:
            q_partner = tl.load(q_scale + partner, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
            k_partner = tl.load(k_scale + partner, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
            weight_partner = tl.where(is_q, q_partner, k_partner)
    wait_for_inputs(PDL)
    row = qkv + (token * (Q_HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    raw = tl.load(row + d, mask=inside, other=0.0).to(tl.float32)
    value = raw
    if NORM:
        inverse = tl.rsqrt(tl.sum(raw * raw, axis=1) / HEAD_DIM + eps)[:, None]
        value = raw * inverse * weight
    if HALF > 0:
        other = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            other = other * inverse * weight_partner
        angle = rope_table + tl.load(positions + token) * (2 * HALF) + d % HALF
        rotated = d < 2 * HALF
        cos = tl.load(angle, mask=rotated, other=1.0)
        sin = tl.load(angle + HALF, mask=rotated, other=0.0)
        value = value * cos + other * tl.where(d < HALF, -sin, sin)
    tl.store(q_out + (token * Q_HEADS + head) * HEAD_DIM + d, value.to(q_out.dtype.element_ty), mask=inside & is_q)
    location = tl.load(locations + token)
    written = inside & (location >= 0)
    key = k_cache + (location * KV_HEADS + head - Q_HEADS) * HEAD_DIM + d
    tl.store(key, value.to(k_cache.dtype.element_ty), mask=written & is_k)
    is_v = head >= Q_HEADS + KV_HEADS
    at = v_cache + (location * KV_HEADS + head - Q_HEADS - KV_HEADS) * HEAD_DIM + d
    tl.store(at, raw.to(v_cache.dtype.element_ty), mask=written & is_v)
