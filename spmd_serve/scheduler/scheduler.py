"""The scheduler: which sequences compute which tokens in which pages, decided alike on every rank.

A pure function of the StepInputs, the options and the committed tokens. No clock, no hash order, no memory size of this rank
has a say. See the module docstrings of page_pool.py and prefix_cache.py for the pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from operator import attrgetter
from typing import NamedTuple

from spmd_serve.config import SchedulerOptions, resolved
from spmd_serve.scheduler.broken import BROKEN, find_broken
from spmd_serve.scheduler.decoding import Decoding
from spmd_serve.scheduler.digest import RollingDigest
from spmd_serve.scheduler.intake import Intake
from spmd_serve.scheduler.outbox import Outbox
from spmd_serve.scheduler.page_tables import PageTables
from spmd_serve.scheduler.prefill import deal_prefill
from spmd_serve.scheduler.sequence import Sequence, SequenceStatus
from spmd_serve.scheduler.waiting_queue import WaitingQueue
from spmd_serve.types import (
    Finish,
    FinishReason,
    Lengths,
    NewRow,
    PrefillChunk,
    Request,
    ScheduledBatch,
    ServicePhase,
    StepDigest,
    StepInput,
    StepOutput,
    StepStats,
    StepTokens,
)

_DECODE, _FINISHED = SequenceStatus.DECODE, SequenceStatus.FINISHED


class _StepInFlight(NamedTuple):
    """A step that was planned and not committed: the sequences behind the batch's rows."""

    batch: ScheduledBatch
    decodes: list[Sequence]
    chunks: list[Sequence]


class Scheduler:
    """Continuous batching with chunked prefill, a prefix cache and preemption by recompute.

    Each step: `apply`, `schedule`, `commit` of the oldest step in flight, `take_output`. With `overlap` the next `schedule`
    may come before the `commit` of the last one (at most two steps are planned and not committed then).

    Args:
        options: limits and policy, resolved.
        page_size: tokens per page.
        num_pages: pages of the pool, the same on all ranks.
        prefix_cache: whether pages are kept and found again by their contents.
        max_model_len: context length in tokens.
        short_context: see ModelConfig.short_context.
        eos_token_ids: ids that end a sequence unless it ignores them.
        overlap: whether steps overlap as said above.
        digest: "every-step", "sampled" or "off".
    """

    def __init__(
        self,
        options: SchedulerOptions,
        *,
        page_size: int,
        num_pages: int,
        prefix_cache: bool,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        overlap: bool,
        digest: str = "every-step",
        short_context: int = 0,
    ) -> None:
        self._prefill_share = options.prefill_share
        self._max_batch_tokens = resolved(options.max_batch_tokens)
        self._overlap = overlap
        self._tables = PageTables(page_size, num_pages)
        self._intake = Intake(
            options,
            Lengths(max_model_len, self._tables.capacity),
            short_context=short_context,
            eos_token_ids=frozenset(eos_token_ids),
            prefix_cache=prefix_cache,
            overlap=overlap,
        )
        # Never more rows than tokens in a step: each decode is in every step and each prefill can go on.
        self._free_slots = list(range(min(options.max_num_seqs, self._max_batch_tokens)))  # sorted
        self._step = 0
        self._phase = ServicePhase.RUN
        self._live: dict[int, Sequence] = {}  # uid -> every sequence that has not ended, by arrival
        self._deadlines: list[tuple[float, tuple[int, int], Sequence]] = []  # sorted
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # sorted by Sequence.order
        self._prefilling: list[Sequence] = []  # those of them whose prompts are not planned to the end
        self._decoding = Decoding()
        self._in_flight: deque[_StepInFlight] = deque()
        self._digest = RollingDigest(digest)
        self._outbox = Outbox()
        self._preempted_total = 0

    # ---- what the loop asks --------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended or a step is not committed."""
        return bool(self._live or self._in_flight)

    @property
    def is_pure_decode(self) -> bool:
        """Whether the next step, as far as is known now, computes nothing but decodes."""
        return bool(self._running) and not self._prefilling and not (self._waiting and self._free_slots)

    def misfit(self, request: Request) -> str:
        """Why a request could never run; empty if it could."""
        finish = self._intake.misfit(request)
        return "" if finish is None else finish.message

    @property
    def digest(self) -> StepDigest:
        """The digest of the last committed step (that --digest folds)."""
        return self._digest.latest

    def stats(self) -> StepStats:
        """Gauges and counters as of now; the times are the loop's to fill in."""
        return StepStats(
            step=self._step,
            running=len(self._running),
            waiting=len(self._waiting),
            preempted_total=self._preempted_total,
            pages_total=self._tables.pool.num_pages,
            pages_free=self._tables.pool.num_free,
            pages_cached=self._tables.pool.num_cached,
            prompt_tokens_total=self._outbox.prompt_tokens_total,
            cached_tokens_total=self._outbox.cached_tokens_total,
            generation_tokens_total=self._outbox.generation_tokens_total,
        )

    def take_output(self) -> StepOutput:
        """Everything that was produced since the last call. Every rank calls it, or the output piles up."""
        return self._outbox.take(self._step)

    # ---- apply ---------------------------------------------------------------------------------------------------

    def apply(self, step_input: StepInput) -> None:
        """Take in arrivals, aborts, time and phase. `step_input.step` numbers the next `schedule`."""
        assert step_input.step >= self._step, f"step {step_input.step} came after step {self._step}"
        self._step = step_input.step
        self._phase = max(self._phase, step_input.phase)
        self._abort(step_input)  # first, since an arrival may have got its place in the queue from one that left
        for request in step_input.arrivals:
            self._accept(request, step_input.now)
        self._abort(step_input)  # of requests that came in the same step
        while self._deadlines and self._deadlines[0][0] <= step_input.now:
            self._finish(self._deadlines[0][2], FinishReason.ERROR, "the request's time is up", "timeout")
        if self._phase is ServicePhase.STOP:
            for sequence in list(self._live.values()):
                self._finish(sequence, FinishReason.ERROR, "the server has shut down", "shutdown")

    def _abort(self, step_input: StepInput) -> None:
        for abort in step_input.aborts:
            sequence = self._live.get(abort.uid)
            if sequence is not None:
                self._finish(sequence, abort.reason)

    def _accept(self, request: Request, now: float) -> None:
        assert request.uid not in self._live, f"request {request.uid} came twice"
        refusal = self._intake.refuse(
            request,
            draining=self._phase is not ServicePhase.RUN,
            waiting=len(self._waiting),
            free_rows=len(self._free_slots),
        )
        if refusal is not None:
            self._end(refusal)
            return
        sequence = self._intake.make_sequence(request, now)
        self._live[sequence.uid] = sequence
        self._waiting.add(sequence)
        if sequence.deadline is not None:
            insort(self._deadlines, (sequence.deadline, sequence.order, sequence))

    # ---- schedule ------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next step: all decodes, then prefill chunks with the tokens that are left.

        Returns:
            None when there is nothing to compute (all rows may be waiting for a commit).
        """
        assert len(self._in_flight) <= self._overlap, "schedule() came before the commit of an older step"
        step, self._step = self._step, self._step + 1
        preempted = self._preempted_total
        new_rows: list[NewRow] = []
        parts: list[tuple[Sequence, int]] = []
        decodes, decode_slots = self._plan_decodes()
        if self._prefilling or self._waiting:
            may_admit = self._preempted_total == preempted  # whoever gave way does not come back in the same step
            parts = deal_prefill(
                self._max_batch_tokens - len(decodes),
                self._prefill_share,
                self._prefilling,
                self._waiting,
                lambda sequence, held_up: may_admit and self._admit(sequence, held_up, new_rows),
            )
        if not decodes and not parts:
            assert not new_rows
            return None
        chunks = [self._plan_chunk(sequence, size) for sequence, size in parts]
        if parts:
            self._prefilling = [s for s in self._prefilling if s.status is SequenceStatus.PREFILL]
        batch = ScheduledBatch(step, decode_slots, chunks, new_rows, self._tables.take_writes())
        self._in_flight.append(_StepInFlight(batch, decodes, [sequence for sequence, _ in parts]))
        self._digest.fold_plan(batch)
        return batch

    def _plan_decodes(self) -> tuple[list[Sequence], list[int]]:
        """Plan one token for every decoding sequence that can go on, oldest first where pages are short."""
        decoding = self._decoding
        decoding.update()
        special: list[Sequence] = []
        for sequence in decoding.sequences:
            planned = sequence.planned
            if planned < sequence.bound:
                sequence.planned = planned + 1
            else:
                special.append(sequence)
        if not special:
            return decoding.sequences, decoding.slots
        held: set[int] = set()
        special.sort(key=attrgetter("order"))
        for sequence in special:
            if sequence.status is not _DECODE:
                continue  # an older one took its pages
            if sequence.planned >= sequence.limit - 1:
                sequence.status = SequenceStatus.LAST
                decoding.leave()
            elif sequence.synchronous and sequence.planned >= len(sequence.tokens):
                held.add(sequence.uid)
            elif sequence.planned >= sequence.switch_at:
                self._preempt(sequence)
            elif self._ensure_page(sequence):
                sequence.planned += 1
                self._set_bound(sequence)
        decoding.update()
        if not held:
            return decoding.sequences, decoding.slots
        rows = [s for s in decoding.sequences if s.uid not in held]
        return rows, [s.slot for s in rows]

    def _set_bound(self, sequence: Sequence) -> None:
        pages_end = len(sequence.pages) * self._tables.page_size
        sequence.bound = 0 if sequence.synchronous else min(pages_end, sequence.limit - 1, sequence.switch_at)

    def _ensure_page(self, sequence: Sequence) -> bool:
        """Give the sequence's next position a page if it has none. The newest sequences give way, possibly itself (False)."""
        if sequence.planned < len(sequence.pages) * self._tables.page_size:
            return True
        while not self._tables.pool.num_available:
            newest = self._running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        self._tables.grow(sequence)
        return True

    def _admit(self, sequence: Sequence, held_up: Sequence | None, new_rows: list[NewRow]) -> bool:
        """Give a waiting sequence a row and the pages of all its known tokens; False if it must go on waiting.

        held_up: the first in the queue, if it has found no room in this step: whoever passes it must not delay it.
        """
        if held_up is not None and not self._may_pass(sequence, held_up):
            return False
        if len(sequence.tokens) > sequence.switch_at:
            sequence.become_long()
        # Every running sequence may grow by a page before the newcomer has to give way again.
        if not self._free_slots or not self._tables.open(sequence, self._free_slots[0], headroom=len(self._running)):
            return False
        self._waiting.remove(sequence)
        insort(self._running, sequence)
        insort(self._prefilling, sequence)
        sequence.status = SequenceStatus.PREFILL
        sequence.slot = self._free_slots.pop(0)
        sequence.prefill_end = len(sequence.tokens)
        sequence.planned = sequence.committed_chunk = sequence.num_shared * self._tables.page_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.planned
        new_rows.append(sequence.new_row())
        return True

    def _may_pass(self, sequence: Sequence, held_up: Sequence) -> bool:
        """Whether `held_up` fits beside `sequence` and all that run behind it, once those before it have ended."""
        behind = self._running[bisect_left(self._running, held_up) :]
        pages = sum(len(other.pages) for other in behind)
        pages += self._tables.pages_of(sequence) + self._tables.pages_of(held_up)
        return pages + len(behind) + 1 <= self._tables.pool.num_pages  # each may grow by one meanwhile

    def _plan_chunk(self, sequence: Sequence, size: int) -> PrefillChunk:
        start, end = sequence.planned, sequence.planned + size
        sequence.planned = end
        samples = False
        if end == sequence.prefill_end:
            samples = end < sequence.limit  # it is not with max_tokens 0
            sequence.status = _DECODE if samples else SequenceStatus.LAST
            if samples:
                self._decoding.join(sequence)
                self._set_bound(sequence)
        return PrefillChunk(sequence.slot, start, sequence.tokens[start:end], samples)

    # ---- commit --------------------------------------------------------------------------------------------------

    def commit(self, batch: ScheduledBatch, result: StepTokens) -> None:
        """Take in what the oldest step in flight sampled. Tokens of sequences that have ended are dropped."""
        oldest = self._in_flight.popleft()
        assert oldest.batch is batch, (
            f"step {batch.step} committed, but step {oldest.batch.step} is the oldest in flight"
        )
        assert len(result.tokens) == batch.num_sampled, f"{len(result.tokens)} tokens for {batch.num_sampled} rows"
        self._digest.fold_tokens(batch.step, result.tokens)
        sampled = oldest.decodes
        if oldest.chunks:
            sampled = sampled + [s for s, chunk in zip(oldest.chunks, batch.chunks, strict=True) if chunk.samples]
        for sequence in find_broken(result, sampled, oldest.chunks):  # before anything of them is put out
            if sequence.status is not _FINISHED:
                self._tables.distrust(sequence)
                self._finish(sequence, FinishReason.ERROR, BROKEN, "model_error")
        for i, prompt_logprobs in result.prompt_logprobs.items():
            self._outbox.add_prompt_logprobs(oldest.chunks[i], batch.chunks[i], prompt_logprobs)
        for sequence, chunk in zip(oldest.chunks, batch.chunks, strict=True):
            self._commit_chunk(sequence, chunk)
        if result.logprobs:
            self._outbox.add_logprobs(sampled, result.logprobs)
        uids, tokens = self._outbox.output.uids, self._outbox.output.tokens
        grammar_ends = {sampled[i].uid: problem for i, problem in result.grammar_ends.items()}
        for sequence, token in zip(sampled, result.tokens, strict=True):
            if sequence.status is _FINISHED:
                continue
            known = sequence.tokens
            known.append(token)
            uids.append(sequence.uid)
            tokens.append(token)
            if grammar_ends and sequence.uid in grammar_ends:  # whatever min_tokens and ignore_eos say
                problem = grammar_ends[sequence.uid]
                reason = FinishReason.ERROR if problem else FinishReason.STOP
                self._finish(sequence, reason, problem, "grammar" if problem else "")
            elif token in sequence.stop_ids and len(known) > sequence.min_length:
                self._finish(sequence, FinishReason.STOP)
            elif len(known) >= sequence.limit:
                self._finish(sequence, FinishReason.LENGTH)

    def _commit_chunk(self, sequence: Sequence, chunk: PrefillChunk) -> None:
        if sequence.status is _FINISHED:
            return
        end = chunk.start + len(chunk.tokens)
        if sequence.status is not SequenceStatus.WAITING:  # else it was preempted since, and its pages are not its own
            sequence.committed_chunk = end
            self._tables.share(sequence, end)
        if not chunk.samples and end < sequence.limit:
            return
        self._outbox.start(sequence)
        if not chunk.samples:
            self._finish(sequence, FinishReason.LENGTH)

    # ---- ends ----------------------------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, reason: FinishReason, message: str = "", code: str = "") -> None:
        """The one terminal output of a sequence."""
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence)
        sequence.status = _FINISHED
        del self._live[sequence.uid]
        if sequence.deadline is not None:
            entry = (sequence.deadline, sequence.order, sequence)
            del self._deadlines[bisect_left(self._deadlines, entry)]
        self._end(Finish(sequence.uid, reason, message, code))
        if not self._live:
            pool = self._tables.pool
            assert pool.num_used == 0, f"idle, but {pool.num_used} of {pool.num_pages} pages are in use"
            assert not self._running and not self._waiting

    def _end(self, finish: Finish) -> None:
        self._outbox.output.finished.append(finish)
        self._digest.fold_end(finish.uid, finish.reason)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue. A token in flight still counts; the KV is computed again, as far as it is not cached."""
        self._leave(sequence)
        sequence.requeue()
        self._waiting.add(sequence)
        self._preempted_total += 1

    def _leave(self, sequence: Sequence) -> None:
        """Give row and pages back."""
        del self._running[bisect_left(self._running, sequence)]
        if sequence.status is SequenceStatus.PREFILL:
            del self._prefilling[bisect_left(self._prefilling, sequence)]
        elif sequence.status is _DECODE:
            self._decoding.leave()
        self._tables.close(sequence)
        insort(self._free_slots, sequence.slot)
        sequence.slot = -1

    # ---- proof ---------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Recount everything from scratch (O(pages + sequences)): for tests and for when the server is idle.

        Raises:
            AssertionError: a page, row or sequence is lost or counted twice.
        """
        running, waiting = self._running, self._waiting
        self._tables.check(running)
        waiting.check()
        assert running == sorted(running), "the running sequences are out of order"
        assert sorted(s.order for s in self._live.values()) == sorted(s.order for s in (*running, *waiting))
        assert all(s.status is SequenceStatus.WAITING and s.slot < 0 and not s.pages for s in waiting)
        assert self._prefilling == [s for s in running if s.status is SequenceStatus.PREFILL]
        assert sorted(self._decoding.members()) == [s for s in running if s.status is _DECODE]
        slots = sorted([s.slot for s in running] + self._free_slots)
        assert slots == list(range(len(slots))), "a row is lost or owned twice"
        for s in running:
            assert s.planned <= len(s.tokens) + len(self._in_flight) and len(s.tokens) <= s.limit
        assert sum(s.deadline is not None for s in self._live.values()) == len(self._deadlines)
