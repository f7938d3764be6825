"""From the scheduler's decision to the tensors of one step. A ForwardBatch is complete and frozen when built."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spmd_serve.attention.base import AttentionBatch, ChunkSpan
from spmd_serve.engine.row_table import RowTable, upload
from spmd_serve.types import ScheduledBatch


@dataclass(frozen=True)
class ForwardBatch:
    """One step. Rows are packed: the decodes first, then the chunks in order.

    Attributes:
        tokens, positions, kv_locations: int64 [tokens]; positions as rows of the rotary tables.
        kept: int64 [sampled], the packed rows from whose hidden state a token is drawn; None means all, in order. If no
            token is drawn, one row nevertheless, so that no kernel meets an empty tensor.
        sample_slots: int64 [sampled].
        sample_slots_host: the same on the host.
        chunk_ends: int64 [2, chunks]: slots of the chunks and the rows' lengths after this step.
    """

    tokens: Tensor
    positions: Tensor
    kv_locations: Tensor
    attention: AttentionBatch
    kept: Tensor | None
    sample_slots: Tensor
    sample_slots_host: list[int]
    chunk_ends: Tensor | None

    @property
    def num_decodes(self) -> int:
        return self.attention.num_decodes


def build_forward_batch(batch: ScheduledBatch, rows: RowTable, page_size: int) -> ForwardBatch:
    """Build the step's tensors and advance the host's view of the rows (the device's is advanced by the step)."""
    device = rows.device
    decodes = len(batch.decode_slots)
    spans: list[ChunkSpan] = []
    token_slots: list[np.ndarray] = [np.array(batch.decode_slots, dtype=np.int64)]
    positions: list[np.ndarray] = []
    tokens: list[np.ndarray] = []
    sampled = list(range(decodes))  # packed rows
    sample_slots = list(batch.decode_slots)
    offset = decodes
    for slot in batch.decode_slots:
        rows.lengths[slot] += 1
    for chunk in batch.chunks:
        length = len(chunk.tokens)
        assert rows.lengths[chunk.slot] == chunk.start, "a chunk continues where its row ends"
        end = rows.lengths[chunk.slot] = chunk.start + length
        pages = rows.pages[chunk.slot][: -(-end // page_size)]
        spans.append(ChunkSpan(chunk.slot, chunk.start, length, offset, pages))
        token_slots.append(np.full(length, chunk.slot, dtype=np.int64))
        positions.append(np.arange(chunk.start, end, dtype=np.int64))
        tokens.append(np.array(chunk.tokens, dtype=np.int64))
        offset += length
        if chunk.samples:
            sampled.append(offset - 1)
            sample_slots.append(chunk.slot)
    slots = upload(np.concatenate(token_slots), device)
    decode_slots = slots[:decodes]
    all_tokens = rows.last_token[decode_slots]
    all_positions = rows.length[decode_slots]
    decode_lengths = all_positions + 1
    kept, chunk_ends, slots_of_samples = None, None, decode_slots
    if spans:
        host = upload(np.stack((np.concatenate(tokens), np.concatenate(positions))), device)
        all_tokens = torch.cat((all_tokens, host[0]))
        all_positions = torch.cat((all_positions, host[1]))
        ends = [[s.slot for s in spans], [s.start + s.length for s in spans]]
        chunk_ends = upload(np.array(ends, dtype=np.int64), device)
        places = np.array([sampled or [0], sample_slots or [rows.padding_slot]], dtype=np.int64)
        kept, slots_of_samples = upload(places, device).unbind()
    pages_of_tokens = rows.page_table[slots, all_positions // page_size].long()
    return ForwardBatch(
        tokens=all_tokens,
        positions=all_positions + rows.rope_offset[slots],
        kv_locations=pages_of_tokens * page_size + all_positions % page_size,
        attention=AttentionBatch(
            page_table=rows.page_table,
            page_size=page_size,
            decode_slots=decode_slots,
            decode_lengths=decode_lengths,
            decode_lengths_host=[rows.lengths[slot] for slot in batch.decode_slots],
            chunks=tuple(spans),
        ),
        kept=kept,
        sample_slots=slots_of_samples,
        sample_slots_host=sample_slots,
        chunk_ends=chunk_ends,
    )
