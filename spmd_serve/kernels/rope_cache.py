"""QK-norm, rotary embedding and the write into the paged KV cache, from the fused QKV projection, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_serve.kernels.fp8 import FP8, FP8_MAX
from spmd_serve.kernels.norm import rms_norm_torch


@dataclass(frozen=True)
class Rotation:
    """What turns a QKV projection into queries and keys.

    Attributes:
        positions: int64 [tokens], index into rope_table.
        rope_table: float32 [max_len, 2, d / 2], cos then sin; the first d features of a head are rotated (half-split
            pairs). None: no rotation.
        q_scale, k_scale: [head_dim], RMSNorm of each head before the rotation; None: no norm.
    """

    positions: Tensor
    rope_table: Tensor | None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    eps: float = 1e-6


def rope_and_cache(qkv: Tensor, rotation: Rotation, locations: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """Queries out, keys and values into the cache.

    Args:
        qkv: [tokens, (q_heads + 2 * kv_heads) * head_dim], contiguous; query heads, then keys, then values.
        locations: int64 [tokens], page * page_size + offset; -1 writes nowhere (a padding row).
        k_cache, v_cache: [pages, page_size, kv_heads, head_dim], contiguous; in qkv's type or FP8 (e4m3, unscaled).

    Returns:
        q: [tokens, q_heads, head_dim], contiguous.
    """
    if qkv.is_cuda:
        from spmd_serve.kernels.gpu import rope_cache as gpu

        return gpu.rope_and_cache(qkv, rotation, locations, k_cache, v_cache)
    return rope_and_cache_torch(qkv, rotation, locations, k_cache, v_cache)


def rope_and_cache_torch(
    qkv: Tensor, rotation: Rotation, locations: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """`rope_and_cache` in plain torch; float32 between the steps."""
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim).float()
    q_heads = heads.shape[1] - 2 * kv_heads
    q, k, v = heads[:, :q_heads], heads[:, q_heads:-kv_heads], heads[:, -kv_heads:]
    if rotation.q_scale is not None and rotation.k_scale is not None:
        q = rms_norm_torch(q, rotation.q_scale.float(), rotation.eps)
        k = rms_norm_torch(k, rotation.k_scale.float(), rotation.eps)
    if rotation.rope_table is not None:
        cos, sin = rotation.rope_table[rotation.positions].unbind(dim=1)
        q, k = rotate_torch(q, cos, sin), rotate_torch(k, cos, sin)
    kept = locations >= 0
    store(k_cache, locations[kept], k[kept])
    store(v_cache, locations[kept], v[kept])
    return q.to(qkv.dtype).contiguous()


def store(cache: Tensor, locations: Tensor, new: Tensor) -> None:
    """Write [tokens, kv_heads, head_dim] into a paged cache; beyond FP8's range goes the nearest value that it has."""
    flat = cache.view(-1, *cache.shape[2:])
    if cache.dtype == FP8:
        # Copied as bytes: the CPU's index_copy_ does not know the type.
        new, flat = new.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8), flat.view(torch.uint8)
    flat.index_copy_(0, locations, new.to(flat.dtype))


def rotate_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [tokens, heads, head_dim]; cos, sin: [tokens, d / 2]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
