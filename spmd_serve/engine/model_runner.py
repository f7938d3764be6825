"""Runs the scheduler's batches on this rank's shard of the model."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spmd_serve.attention.base import AttentionBackend, AttentionBatch
from spmd_serve.distributed.collectives import Communicator
from spmd_serve.distributed.partition import Partition
from spmd_serve.engine.cuda_graphs import DecodeGraphs, graph_sizes
from spmd_serve.engine.forward_batch import ForwardBatch, build_forward_batch
from spmd_serve.engine.grammar import Grammars
from spmd_serve.engine.kv_cache import KVCache
from spmd_serve.engine.logprobs import LogprobTensors, token_logprobs
from spmd_serve.engine.row_extras import RowExtras
from spmd_serve.engine.row_table import RowTable
from spmd_serve.engine.sampler import Sampler
from spmd_serve.errors import DeviceMemoryError
from spmd_serve.kernels.rows import advance_rows_, decode_inputs
from spmd_serve.models.decoder import Decoder
from spmd_serve.models.model_config import ModelConfig
from spmd_serve.types import (
    NOT_A_TOKEN,
    NewRow,
    PrefillChunk,
    SamplingParams,
    ScheduledBatch,
    StepTokens,
    TokenLogprobs,
)

logger = logging.getLogger(__name__)

_PLAIN = SamplingParams(max_tokens=1, temperature=1.0)
_FILTERED = SamplingParams(max_tokens=1, temperature=1.0, top_k=20, top_p=0.9)
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
        grammars: Grammars,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._partition = partition
        self._decoder = decoder
        self._attention = attention
        self._comm = comm
        self._limits = limits
        self._kv_dtype = kv_dtype
        self._device = device
        max_pages = -(-limits.max_model_len // limits.page_size)
        self._rows = RowTable(limits.max_num_seqs, max_pages, device)
        self._sampler = Sampler(comm, partition.vocab, model.vocab_size)
        self._grammars = grammars
        self._extras: dict[int, RowExtras] = {}  # slot -> extras, for the rows that need them
        self._filtered: set[int] = set()  # slots of rows with top-k, top-p or min-p
        self._kv: KVCache | None = None
        self._graphs: DecodeGraphs | None = None

    def allocate(self, num_pages: int, *, cuda_graphs: bool = False) -> None:
        """Allocate the KV pool and capture the decode steps. Collective."""
        self._kv = self._make_kv(num_pages)
        if cuda_graphs:
            padding = self._rows.padding_slot
            with torch.inference_mode():
                graphs = DecodeGraphs(
                    self._decode_forward, self._decode_sample, self._graph_sizes(), padding, self._device
                )
                graphs.capture(progress=self._comm.rank == 0)
            self._graphs = graphs
        if self._device.type == "cuda":
            self._warm_up(num_pages)

    def _warm_up(self, num_pages: int) -> None:
        """Run steps with chunks of all kinds: kernels compile and libraries load now and not under the first requests.

        Small chunks, filters over both types of logits, of one row and of several, and a chunk beside a decoding row.
        Collective.
        """
        limits = self._limits
        most = min(limits.max_batch_tokens - 1, limits.max_model_len - 1, (num_pages - 2) * limits.page_size)
        penalised = replace(_FILTERED, presence_penalty=1.0)
        for counts, params in (
            ([1], _PLAIN),
            ([8], _FILTERED),
            ([40], penalised),
            ([20, 20], penalised),
            ([100], _PLAIN),
        ):
            if sum(counts) <= most and len(counts) <= limits.max_num_seqs:
                self._run_dummy(counts, params)
        if most >= 1 and limits.max_num_seqs >= 2:
            self._run_dummy([1, min(most, 300)], decodes=1)

    def close(self) -> None:
        """Let go of what would keep the ranks' process group from closing. No step may follow."""
        if self._graphs is not None:
            self._graphs.release()
            self._graphs = None

    @torch.inference_mode()
    def measure_activations(self, *, cuda_graphs: bool) -> int:
        """Bytes that the largest step and the graphs need beside weights and KV pool, on a GPU.

        Runs such a step on a pool of its own; call it before `allocate`. Collective.
        """
        limits, device = self._limits, self._device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        per_row = min(limits.max_model_len, limits.max_batch_tokens)
        counts = [per_row] * min(limits.max_batch_tokens // per_row, limits.max_num_seqs)
        self._kv = self._make_kv(len(counts) * -(-per_row // limits.page_size))
        self._run_dummy(counts)
        pool = self._kv.nbytes
        self._kv = None
        # Logits in float32, as they were, and which are filtered.
        logits = (4 + 4 + 1) * limits.max_num_seqs * len(self._partition.vocab)
        if cuda_graphs:  # the logits of each size stay
            itemsize = 4 if self._model.final_softcap else self._decoder.dtype.itemsize
            logits += itemsize * sum(self._graph_sizes()) * len(self._partition.vocab)
        return torch.cuda.max_memory_allocated(device) - before - pool + logits

    def _graph_sizes(self) -> list[int]:
        return graph_sizes(min(self._limits.max_num_seqs, self._limits.max_batch_tokens))

    def _run_dummy(self, counts: list[int], params: SamplingParams = _PLAIN, *, decodes: int = 0) -> None:
        """Prefill rows of `counts` tokens in pages from 0 on; the first `decodes` a step earlier, and they decode beside the others.

        What it leaves behind is overwritten by admissions.
        """
        earlier, batch = ScheduledBatch(0, []), ScheduledBatch(0, list(range(decodes)))
        first = 0
        for slot, count in enumerate(counts):
            decodes_then = slot < decodes
            pages = -(-(count + decodes_then) // self._limits.page_size)
            tokens = array("i", [0]) * count
            into = earlier if decodes_then else batch
            into.new_rows.append(NewRow(slot, slot, params, tokens, count, count, 0))
            into.page_writes.append((slot, 0, list(range(first, first + pages))))
            into.chunks.append(PrefillChunk(slot, 0, tokens, True))
            first += pages
        for step in (earlier, batch):
            if step.num_tokens:
                self.launch(step).wait()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start a step. Collective: every rank launches the same batch.

        Raises:
            DeviceMemoryError: the step does not fit beside the weights and the pool.
        """
        self._admit(batch)
        try:
            if self._graphs is not None and not batch.chunks and self._graphs.fits(len(batch.decode_slots)):
                return self._launch_graph(self._graphs, batch.decode_slots)
            return self._launch_eager(batch)
        except torch.OutOfMemoryError as exc:
            raise DeviceMemoryError(
                f"out of device memory in a step of {batch.num_tokens} tokens ({str(exc).splitlines()[0]}): give a smaller "
                "--gpu-memory-utilization, or smaller steps by --max-batch-tokens"
            ) from exc

    def _make_kv(self, num_pages: int) -> KVCache:
        kv_heads = len(self._partition.kv_heads)
        try:
            return KVCache(self._model, kv_heads, num_pages, self._limits.page_size, self._kv_dtype, self._device)
        except (OSError, OverflowError, torch.OutOfMemoryError) as exc:  # mmap's, where the device is the CPU
            raise DeviceMemoryError(
                f"there is no memory for a KV pool of {num_pages} pages: give fewer --num-pages, or less --kv-memory or "
                "--gpu-memory-utilization"
            ) from exc

    def _admit(self, batch: ScheduledBatch) -> None:
        assert self._kv is not None, "allocate comes before launch"
        rows = self._rows
        rows.start_rows(batch.new_rows)
        last_pages = rows.write_pages(batch.page_writes)
        if self._attention.weighs_the_rest:
            self._kv.blank(last_pages)
        for row in batch.new_rows:
            self._extras.pop(row.slot, None)
            self._filtered.discard(row.slot)
            if row.params.is_filtered:
                self._filtered.add(row.slot)
            if row.params.needs_extras:
                self._extras[row.slot] = RowExtras.create(
                    row, self._partition.vocab, self._model.eos_token_ids, self._device, self._grammars
                )

    # ---- any step, launched op by op -----------------------------------------------------------------------------

    def _launch_eager(self, batch: ScheduledBatch) -> PendingStep:
        assert self._kv is not None
        step = build_forward_batch(batch, self._rows, self._limits.page_size)
        self._attention.plan(step.attention)
        asking = self._prompts_to_score(batch)
        kept = None if asking else step.kept
        hidden = self._decoder(step.tokens, step.positions, step.kv_locations, step.num_decodes, self._kv.layers, kept)
        prompt_logprobs = self._prompt_logprobs(asking, step, hidden)
        self._rows.advance(step.attention.decode_slots, step.attention.decode_lengths, step.chunk_ends)
        if not step.sample_slots_host:
            return PendingStep(lambda: StepTokens([], {}, _read(prompt_logprobs)))
        if kept is not step.kept:
            hidden = hidden[step.kept]
        logits = self._decoder.logits(hidden)
        extras, slots = self._sampled_extras(step.sample_slots_host), step.sample_slots
        logits, raw = self._process(logits, step.sample_slots_host, slots, extras)
        tokens = self._draw(logits, slots, self._rows.length[slots])
        self._rows.last_token.index_copy_(0, slots, tokens)
        return self._pending(tokens, self._start_copy(tokens), extras, raw, prompt_logprobs)

    # ---- pure decode, captured -----------------------------------------------------------------------------------

    def _launch_graph(self, graphs: DecodeGraphs, slots: list[int]) -> PendingStep:
        for slot in slots:
            self._rows.lengths[slot] += 1
        extras = self._sampled_extras(slots)
        if not extras and not self._any_filtered(slots):
            graphs.run(slots)
            read = self._rows.drawn_tokens(slots)
            return PendingStep(lambda: StepTokens(read(), {}, {}))
        logits, lengths, device_slots = graphs.run_forward(slots)
        logits, raw = self._process(logits, slots, device_slots, extras)
        tokens = self._decode_sample(logits, lengths, device_slots)
        return self._pending(tokens, self._rows.drawn_tokens(slots), extras, raw, {})

    def _decode_forward(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of one token per row, from the rows' state alone, and the rows' lengths with it. slots: int64 [n]."""
        assert self._kv is not None
        rows = self._rows
        tokens, positions, lengths = decode_inputs(
            slots, rows.last_token, rows.length, rows.rope_offset, rows.padding_slot
        )
        self._attention.plan(AttentionBatch(rows.page_table, self._limits.page_size, slots, lengths, []))
        assert self._attention.fuses_decode, "the attention kernel finds the cache locations itself"
        hidden = self._decoder(tokens, positions, positions, len(slots), self._kv.layers)
        return self._decoder.logits(hidden), lengths

    def _decode_sample(self, logits: Tensor, lengths: Tensor, slots: Tensor) -> Tensor:
        """Draw and advance the rows. -> tokens int64 [n], for the device alone: `drawn_tokens` gives them to the host."""
        rows = self._rows
        tokens = self._draw(logits, slots, lengths)
        advance_rows_(slots, tokens, lengths, rows.last_token, rows.length, rows.drawn)
        return tokens

    # ---- from logits to tokens -----------------------------------------------------------------------------------

    def _process(
        self, logits: Tensor, slots: list[int], device_slots: Tensor, extras: list[tuple[int, RowExtras]]
    ) -> tuple[Tensor, Tensor | None]:
        """Apply what some rows ask for. Returns the logits, changed in place or new, and the raw ones of rows that want logprobs."""
        raw = None
        if extras:
            logits = logits.float()
            wants = [i for i, extra in extras if extra.params.logprobs is not None]
            raw = logits[torch.tensor(wants, device=self._device)] if wants else None
            for i, extra in extras:
                extra.process_(logits[i])
        if self._any_filtered(slots):
            self._sampler.filter_(logits, self._rows.filters, device_slots)  # collective
        return logits, raw

    def _draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """A token per row; `positions` are those of the new tokens. Collective."""
        rows = self._rows
        return self._sampler.sample(logits, rows.filters.temperature, rows.seed, positions, slots)

    def _pending(
        self,
        tokens: Tensor,
        read: Callable[[], list[int]],
        extras: list[tuple[int, RowExtras]],
        raw: Tensor | None,
        prompt_logprobs: dict[int, list[LogprobTensors]],
    ) -> PendingStep:
        """Account for the drawn tokens, and say how to finish; `read` waits for the tokens on the host."""
        for i, extra in extras:
            extra.note_sampled(tokens[i])
        logprobs, wants = None, []
        if raw is not None:
            asked = [(i, e.params.logprobs) for i, e in extras if e.params.logprobs is not None]
            wants = [i for i, _ in asked]
            chosen = tokens[torch.tensor(wants, device=self._device)]
            logprobs = token_logprobs(raw, chosen, [n for _, n in asked], self._comm, self._partition.vocab)

        def finish() -> StepTokens:
            ids = read()
            ends = {
                i: extra.grammar.accept(ids[i])
                for i, extra in extras
                if extra.grammar is not None and ids[i] != NOT_A_TOKEN
            }
            found = dict(zip(wants, logprobs.read(), strict=True)) if logprobs is not None else {}
            grammar_ends = {i: end for i, end in ends.items() if end is not None}
            return StepTokens(ids, found, _read(prompt_logprobs), grammar_ends)

        return PendingStep(finish)

    def _start_copy(self, tokens: Tensor) -> Callable[[], list[int]]:
        """Copy int64 tokens to the host in the background; the result waits for the copy and returns them."""
        if self._device.type == "cpu":
            return tokens.tolist
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def read() -> list[int]:
            copied.synchronize()
            return host.tolist()

        return read

    def _sampled_extras(self, slots: list[int]) -> list[tuple[int, RowExtras]]:
        """(sampled-row index, extras) of the rows that have any."""
        if not self._extras:
            return []
        found = ((i, self._extras.get(slot)) for i, slot in enumerate(slots))
        return [(i, extra) for i, extra in found if extra is not None]

    def _any_filtered(self, slots: list[int]) -> bool:
        return bool(self._filtered) and not self._filtered.isdisjoint(slots)

    def _prompts_to_score(self, batch: ScheduledBatch) -> dict[int, RowExtras]:
        """Index of a chunk -> its row's extras, for the rows that asked for their prompt's log-probabilities."""
        found = ((i, self._extras.get(chunk.slot)) for i, chunk in enumerate(batch.chunks))
        return {i: extra for i, extra in found if extra is not None and extra.prompt is not None}

    def _prompt_logprobs(
        self, asking: dict[int, RowExtras], step: ForwardBatch, hidden: Tensor
    ) -> dict[int, list[LogprobTensors]]:
        """Log-probabilities of the prompt tokens that follow the positions of chunks. hidden: of all rows, if any is asked for."""
        out: dict[int, list[LogprobTensors]] = {}
        for i, extra in asking.items():
            span = step.attention.chunks[i]
            assert extra.prompt is not None
            following = extra.prompt[span.start + 1 : span.start + span.length + 1]
            out[i] = []
            for first in range(0, len(following), _LOGPROB_ROWS):
                targets = torch.tensor(following[first : first + _LOGPROB_ROWS], device=self._device)
                start = span.offset + first
                logits = self._decoder.logits(hidden[start : start + len(targets)]).float()
                top = [extra.params.prompt_logprobs or 0] * len(targets)
                out[i].append(token_logprobs(logits, targets, top, self._comm, self._partition.vocab))
        return out


def _read(prompt_logprobs: dict[int, list[LogprobTensors]]) -> dict[int, list[TokenLogprobs]]:
    return {i: [entry for block in blocks for entry in block.read()] for i, blocks in prompt_logprobs.items()}
