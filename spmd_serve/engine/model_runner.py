"""Runs the scheduler's batches on this rank's shard of the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spmd_serve.attention.base import AttentionBackend
from spmd_serve.distributed.collectives import Communicator
from spmd_serve.distributed.partition import Partition
from spmd_serve.engine.forward_batch import ForwardBatch, build_forward_batch
from spmd_serve.engine.grammar import Grammars
from spmd_serve.engine.kv_cache import KVCache
from spmd_serve.engine.logprobs import token_logprobs
from spmd_serve.engine.row_extras import RowExtras
from spmd_serve.engine.row_table import RowTable
from spmd_serve.engine.sampler import Sampler
from spmd_serve.models.decoder import Decoder
from spmd_serve.models.model_config import ModelConfig
from spmd_serve.types import SamplingParams, ScheduledBatch, StepTokens, TokenLogprobs

logger = logging.getLogger(__name__)

_LOGPROB_ROWS = 128  # prompt logprobs are computed this many rows at a time: rows x vocabulary float32 is large


@dataclass(frozen=True)
class RunnerLimits:
    """Sizes that were agreed before the runner was built."""

    page_size: int
    max_num_seqs: int
    max_model_len: int
    max_batch_tokens: int


class PendingStep:
    """A launched step. `wait` returns its tokens; until then the device may still be busy with it."""

    def __init__(self, finish: Callable[[], StepTokens]) -> None:
        self._finish = finish

    def wait(self) -> StepTokens:
        return self._finish()


class ModelRunner:
    """One per rank. `allocate` must have been called before the first `launch`.

    The runner owns the row table, the KV cache and the extras of rows; the scheduler tells it through the batches
    which row is whose and which pages it has.
    """

    def __init__(
        self,
        model: ModelConfig,
        partition: Partition,
        decoder: Decoder,
        attention: AttentionBackend,
        comm: Communicator,
        limits: RunnerLimits,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._partition = partition
        self._decoder = decoder
        self._attention = attention
        self._comm = comm
        self._limits = limits
        self._dtype = dtype
        self._device = device
        max_pages = -(-limits.max_model_len // limits.page_size)
        self._rows = RowTable(limits.max_num_seqs, max_pages, device)
        self._sampler = Sampler(comm, partition.vocab, model.vocab_size)
        self._grammars = Grammars(folder, model.vocab_size, model.eos_token_ids)
        self._extras: dict[int, RowExtras] = {}  # slot -> extras, for the rows whose params are not plain
        self._kv: KVCache | None = None

    def allocate(self, num_pages: int) -> None:
        """Allocate the KV pool."""
        kv_heads = len(self._partition.kv_heads)
        self._kv = KVCache(self._model, kv_heads, num_pages, self._limits.page_size, self._dtype, self._device)

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start a step. Collective: every rank launches the same batch."""
        self._admit(batch)
        step = build_forward_batch(batch, self._rows, self._limits.page_size)
        tokens, logprobs, prompt_logprobs = self._run(batch, step)
        return PendingStep(lambda: self._finish(step, tokens, logprobs, prompt_logprobs))

    def _admit(self, batch: ScheduledBatch) -> None:
        rows = self._rows
        rows.start_rows(batch.new_rows)
        rows.write_pages(batch.page_writes)
        for row in batch.new_rows:
            self._extras.pop(row.slot, None)
            if not row.params.is_plain:
                self._extras[row.slot] = RowExtras.create(
                    row, self._partition.vocab, self._model.eos_token_ids, self._device, self._grammars
                )

    def _run(
        self, batch: ScheduledBatch, step: ForwardBatch
    ) -> tuple[Tensor, dict[int, TokenLogprobs], dict[int, list[TokenLogprobs]]]:
        assert self._kv is not None, "allocate comes before launch"
        rows = self._rows
        self._attention.plan(step.attention)
        hidden = self._decoder(step.tokens, step.positions, step.kv_locations, self._kv.layers)
        prompt_logprobs = self._prompt_logprobs(batch, step, hidden)
        if step.num_decodes:
            rows.length.index_copy_(0, step.attention.decode_slots, step.attention.decode_lengths)
        if step.chunk_ends is not None:
            rows.length.index_copy_(0, step.chunk_ends[0], step.chunk_ends[1])
        if not step.sample_slots_host:
            return step.sample_slots, {}, prompt_logprobs
        slots = step.sample_slots
        logits = self._decoder.logits(hidden if step.sample_rows is None else hidden[step.sample_rows])
        extras = self._sampled_extras(step)
        wants = [(i, e.params.logprobs) for i, e in extras if e.params.logprobs is not None]
        asked = torch.tensor([i for i, _ in wants], device=self._device)
        raw = logits[asked] if wants else None
        for i, extra in extras:
            extra.process_(logits[i])
        if extras:
            self._sampler.filter_(logits, [self._params(slot) for slot in step.sample_slots_host])
        tokens = self._sampler.sample(logits, rows.temperature[slots], rows.seed[slots], rows.length[slots])
        rows.last_token.index_copy_(0, slots, tokens)
        for i, extra in extras:
            extra.note_sampled(tokens[i])
        logprobs: dict[int, TokenLogprobs] = {}
        if raw is not None:
            found = token_logprobs(raw, tokens[asked], [n for _, n in wants], self._comm, self._partition.vocab)
            logprobs = {i: value for (i, _), value in zip(wants, found, strict=True)}
        return tokens, logprobs, prompt_logprobs

    def _finish(
        self,
        step: ForwardBatch,
        tokens: Tensor,
        logprobs: dict[int, TokenLogprobs],
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> StepTokens:
        ids = tokens.tolist() if step.sample_slots_host else []
        for i, extra in self._sampled_extras(step):
            if extra.grammar is not None:
                extra.grammar.accept(ids[i])
        return StepTokens(ids, logprobs, prompt_logprobs)

    def _sampled_extras(self, step: ForwardBatch) -> list[tuple[int, RowExtras]]:
        if not self._extras:
            return []
        found = ((i, self._extras.get(slot)) for i, slot in enumerate(step.sample_slots_host))
        return [(i, extra) for i, extra in found if extra is not None]

    def _params(self, slot: int) -> SamplingParams:
        params = self._rows.params[slot]
        assert params is not None
        return params

    def _prompt_logprobs(
        self, batch: ScheduledBatch, step: ForwardBatch, hidden: Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        """Log-probabilities of the prompt tokens that follow each chunk's positions, for the rows that asked."""
        out: dict[int, list[TokenLogprobs]] = {}
        for i, (chunk, span) in enumerate(zip(batch.chunks, step.attention.chunks, strict=True)):
            extra = self._extras.get(chunk.slot)
            if extra is None or extra.prompt is None:
                continue
            following = extra.prompt[span.start + 1 : span.start + span.length + 1]
            out[i] = []
            for first in range(0, len(following), _LOGPROB_ROWS):
                targets = torch.tensor(following[first : first + _LOGPROB_ROWS], device=self._device)
                start = span.offset + first
                logits = self._decoder.logits(hidden[start : start + len(targets)])
                top = [extra.params.prompt_logprobs or 0] * len(targets)
                out[i] += token_logprobs(logits, targets, top, self._comm, self._partition.vocab)
        return out
