"""Paged attention of decoding rows (one query each), planned entirely on the device.

Which tokens a row has is read from the page table and the lengths by the kernel itself: nothing is prepared on the host,
and a captured CUDA graph stays right while rows grow, come and go.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_serve.kernels.rope_cache import Rotation, rope_and_cache_torch

# A row's tokens are cut into splits for different programs where that does not make more programs than this.
MAX_PROGRAMS = 2208


class DecodeWorkspace:
    """Scratch of `decode_attention` on a GPU, for up to `max_rows` rows. One launch at a time may use it.

    The programs of a row's splits leave their sums in it; the last one to finish puts them together.
    """

    def __init__(self, max_rows: int, q_heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
        parts = MAX_PROGRAMS * (q_heads // max(kv_heads, 1))
        self.sums = torch.empty(parts * head_dim, dtype=torch.float32, device=device)
        self.maxima = torch.empty(parts * 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_rows * kv_heads, dtype=torch.int32, device=device)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    rotation: Rotation | None = None,
    workspace: DecodeWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each row's newest token to itself and the tokens before it.

    Args:
        q: [rows, q_heads, head_dim]; K and V of the newest tokens are in the cache. With `rotation`: the raw
            projection [rows, (q_heads + 2 * kv_heads) * head_dim], contiguous; norms, rotation and the write into the
            cache (position length - 1) are done here.
        k_cache, v_cache: [pages, page_size, kv_heads, head_dim], contiguous.
        page_table: int32 [slots, max_pages].
        slots: int64 [rows], the page table's row of each row.
        lengths: int64 [rows], tokens including the newest one; 0 is a padding row: it gives zeros and writes nothing.
        window: the newest token sees itself and window - 1 tokens before it; None is all.
        softcap: scores become cap * tanh(score / cap).
        workspace: needed on a GPU.
        out: [rows, q_heads, head_dim], contiguous: where the result goes; made if there is none.

    On a GPU, page_table, slots, lengths and the rotation's positions must not be written by the kernel launched just before.

    Returns:
        [rows, q_heads, head_dim].
    """
    if q.is_cuda:
        from spmd_serve.kernels.gpu import decode_attention as gpu

        assert workspace is not None
        return gpu.decode_attention(
            q, k_cache, v_cache, page_table, slots, lengths, scale, window, softcap, rotation, workspace, out=out
        )
    result = decode_attention_torch(q, k_cache, v_cache, page_table, slots, lengths, scale, window, softcap, rotation)
    return result if out is None else out.copy_(result)


def decode_attention_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    rotation: Rotation | None,
) -> Tensor:
    """`decode_attention` in plain torch, row by row, in float32: the reference of the kernel's tests."""
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    if rotation is not None:
        position = lengths - 1
        page = page_table[slots, position.clamp(min=0) // page_size].long()
        location = torch.where(lengths > 0, page * page_size + position % page_size, -1)
        q = rope_and_cache_torch(q, rotation, location, k_cache, v_cache)
    out = torch.zeros_like(q)
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if length == 0:
            continue
        first = 0 if window is None else max(0, length - window)
        pages = page_table[slot, : -(-length // page_size)].long()
        k = k_cache[pages].view(-1, kv_heads, head_dim)[first:length].float()
        v = v_cache[pages].view(-1, kv_heads, head_dim)[first:length].float()
        group = q.shape[1] // kv_heads
        queries = q[row].float().view(kv_heads, group, head_dim)
        scores = torch.einsum("hgd,thd->hgt", queries, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out[row] = torch.einsum("hgt,thd->hgd", scores.softmax(-1), v).reshape(-1, head_dim).to(q.dtype)
    return out
