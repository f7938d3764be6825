"""Attention in plain torch: the CPU backend and the reference for the others.

Decoding rows are gathered from their pages and attended together; rows of very different lengths are cut into groups so
that the padding stays below the work. A prefill chunk is one call each. Pages that lie side by side are read in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from spmd_serve.attention.base import AttentionBackend, AttentionBatch, AttentionSpec, ChunkSpan

Pages = slice | Tensor  # a row's pages if they lie side by side, else int64 indices


@dataclass
class _DecodeGroup:
    """Decoding rows `rows` (None: all of them) padded to the same number of pages."""

    rows: Tensor | None
    pages: Pages  # of [rows, pages]
    lengths: Tensor  # int64 [rows]
    masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)


@dataclass
class _Chunk:
    span: ChunkSpan
    pages: Pages
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)


class ScriptedDecode(NamedTuple):
    """What kernels/scripted.py takes of a step of decoding rows.

    pages: of all rows; None: `length` pages from `first` on.
    mask: float32 [rows, 1, 1, keys], for one kind of layer.
    """

    pages: Tensor | None
    first: int
    length: int
    mask: Tensor


class TorchAttention(AttentionBackend):
    """See AttentionBackend."""

    weighs_the_rest = True

    def __init__(self) -> None:
        self._groups: list[_DecodeGroup] = []
        self._chunks: list[_Chunk] = []
        self._num_decodes = 0

    def plan(self, batch: AttentionBatch) -> None:
        self._num_decodes = batch.num_decodes
        self._groups = _group_decodes(batch)
        device = batch.page_table.device
        self._chunks = [_Chunk(span, _side_by_side(torch.tensor(span.pages, device=device))) for span in batch.chunks]

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, spec: AttentionSpec, out: Tensor | None = None
    ) -> Tensor:
        if len(self._groups) == 1 and not self._chunks and out is None:
            return _decode(q, k_cache, v_cache, self._groups[0], spec)
        out = torch.empty_like(q) if out is None else out
        for group in self._groups:
            queries = q[: self._num_decodes] if group.rows is None else q[group.rows]
            result = _decode(queries, k_cache, v_cache, group, spec)
            if group.rows is None:
                out[: self._num_decodes] = result
            else:
                out[group.rows] = result
        for chunk in self._chunks:
            rows = slice(chunk.span.offset, chunk.span.offset + chunk.span.length)
            out[rows] = _prefill(q[rows], k_cache, v_cache, chunk, spec)
        return out

    def scripted_decode(self, spec: AttentionSpec, page_size: int) -> ScriptedDecode | None:
        """The planned step for kernels/scripted.py; None with chunks, rows of very different lengths or a soft cap."""
        if len(self._groups) != 1 or self._chunks or spec.softcap is not None:
            return None
        (group,) = self._groups
        if isinstance(group.pages, slice):
            pages, first, length = None, group.pages.start, group.pages.stop - group.pages.start
        else:
            pages, first, length = group.pages, 0, group.pages.shape[1]
        return ScriptedDecode(pages, first, length, _decode_mask(group, length * page_size, spec.window, torch.float32))


def _group_decodes(batch: AttentionBatch) -> list[_DecodeGroup]:
    lengths = batch.decode_lengths_host
    if not lengths:
        return []
    needed = [-(-n // batch.page_size) for n in lengths]
    slots = batch.decode_slots
    if max(needed) <= 2 * max(min(needed), 16):
        return [_DecodeGroup(None, _side_by_side(_pages_of(batch, slots, needed)), batch.decode_lengths)]
    order = sorted(range(len(lengths)), key=needed.__getitem__)
    groups: list[list[int]] = []
    for row in order:
        if not groups or needed[row] > 2 * max(needed[groups[-1][0]], 16):
            groups.append([])
        groups[-1].append(row)
    out = []
    for members in groups:
        rows = torch.tensor(members, device=slots.device)
        table = _pages_of(batch, slots[rows], [needed[row] for row in members])
        out.append(_DecodeGroup(rows, _side_by_side(table), batch.decode_lengths[rows]))
    return out


def _pages_of(batch: AttentionBatch, slots: Tensor, needed: list[int]) -> Tensor:
    """int64 [rows, most pages of a row]. Shorter rows are padded with their own first page.

    What is read there is weighed with 0, but NaN times 0 is NaN: no row may read what another one has computed.
    """
    table = batch.page_table[slots, : max(needed)].long()
    if min(needed) < max(needed):
        own = torch.arange(table.shape[1]) < torch.tensor(needed)[:, None]
        table = torch.where(own.to(table.device), table, table[:, :1])
    return table


def _side_by_side(pages: Tensor) -> Pages:
    """pages: int64, [pages] of one row or [rows, pages]."""
    several_rows = pages.dim() == 2 and pages.shape[0] > 1
    if several_rows or pages.device.type != "cpu":  # looking would wait for another device
        return pages
    indices = pages.view(-1)
    first = int(indices[0])
    whole = slice(first, first + len(indices))
    return whole if torch.equal(indices, torch.arange(whole.start, whole.stop)) else pages


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, group: _DecodeGroup, spec: AttentionSpec) -> Tensor:
    """q: [rows, q_heads, head_dim]. The query heads of a KV head are treated as its query positions."""
    rows, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    k = _gather(k_cache, group.pages, q.dtype, rows)
    v = _gather(v_cache, group.pages, q.dtype, rows)
    mask = _decode_mask(group, k.shape[2], spec.window, q.dtype)
    grouped = q.view(rows, kv_heads, q_heads // kv_heads, head_dim)
    return _sdpa(grouped, k, v, mask, spec).reshape(rows, q_heads, head_dim)


def _decode_mask(group: _DecodeGroup, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """-inf where a row does not look, else 0: [rows, 1, 1, keys]."""
    mask = group.masks.get((window, dtype))
    if mask is None:
        positions = torch.arange(keys, device=group.lengths.device)
        hidden = positions[None, :] >= group.lengths[:, None]
        if window is not None:
            hidden |= positions[None, :] < group.lengths[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
        mask = group.masks[window, dtype] = mask[:, None, None, :]
    return mask


def _prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, chunk: _Chunk, spec: AttentionSpec) -> Tensor:
    """q: [length, q_heads, head_dim] of one chunk."""
    length, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    end = chunk.span.start + length
    if spec.window not in chunk.masks:
        chunk.masks[spec.window] = _causal_mask(chunk.span.start, length, spec.window, q.device)
    mask = chunk.masks[spec.window]
    grouped = q.view(length, kv_heads, q_heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    k = _gather(k_cache, chunk.pages, q.dtype, 1)[0, :, None, :end].expand(*grouped.shape[:2], end, head_dim)
    v = _gather(v_cache, chunk.pages, q.dtype, 1)[0, :, None, :end].expand(*grouped.shape[:2], end, head_dim)
    out = _sdpa(grouped, k, v, mask, spec)
    return out.permute(2, 0, 1, 3).reshape(length, q_heads, head_dim)


def _gather(cache: Tensor, pages: Pages, dtype: torch.dtype, rows: int) -> Tensor:
    """The pages' entries, [rows, kv_heads, entries of a row, head_dim] in `dtype`.

    index_select copies a page at a time; indexing goes entry by entry, which takes the CPU three times as long.
    """
    _, page_size, kv_heads, head_dim = cache.shape
    if isinstance(pages, slice):  # of one row; one view instead of three, since their time is felt
        entry, first = kv_heads * head_dim, cache.storage_offset() + pages.start * cache.stride(0)
        shape = (1, kv_heads, (pages.stop - pages.start) * page_size, head_dim)
        found = cache.as_strided(shape, (shape[2] * entry, head_dim, entry, 1), first)
    else:
        flat = cache.view(cache.shape[0], -1).index_select(0, pages.view(-1))
        found = flat.view(rows, -1, kv_heads, head_dim).transpose(1, 2)
    return found if found.dtype == dtype else found.to(dtype)


def _causal_mask(start: int, length: int, window: int | None, device: torch.device) -> Tensor | None:
    """True where a query may look: bool [length, start + length]. None stands for plain causal (start 0)."""
    if start == 0 and (window is None or length <= window):
        return None
    distance = torch.arange(start, start + length, device=device)[:, None] - torch.arange(start + length, device=device)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """q: [batch, heads, queries, head_dim]; k, v: [batch, heads, keys, head_dim]. Without a mask plain causal."""
    if spec.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.scale)
    scores = (q.float() @ k.float().transpose(-1, -2)) * spec.scale
    scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(dim=-1) @ v.float()).to(q.dtype)
