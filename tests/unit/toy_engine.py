"""A toy model over paged memory, for scheduler tests: what it says depends on every token that it reads through the page table.

It does as the real engine does: rows, page tables, one memory slot per position. It reads and writes in launch order, as a device
does, so a page that is given away too early, shared wrongly or left unwritten changes the text.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import fields
from zlib import crc32

from spmd_serve.config import SchedulerOptions
from spmd_serve.scheduler.scheduler import Scheduler
from spmd_serve.types import (
    NOT_A_TOKEN,
    Abort,
    Finish,
    NewRow,
    Request,
    SamplingParams,
    ScheduledBatch,
    ServicePhase,
    StepInput,
    StepOutput,
    StepTokens,
    TokenLogprobs,
)

SCHEDULES = next(field for field in fields(SchedulerOptions) if field.name == "schedule").metadata["choices"]
VOCAB = 23
EOS = 0
POISON = 90  # a prompt's token 90 + n makes the toy model's numbers overflow once n more tokens are there


def next_token(tokens: array[int], salt: str = "") -> int:
    """The toy model: a function of all tokens so far."""
    if any(len(tokens) > place + token - POISON for place, token in enumerate(tokens) if token >= POISON):
        return NOT_A_TOKEN
    return crc32(tokens, crc32(salt.encode())) % VOCAB


def oracle(request: Request, max_length: int) -> tuple[list[int], str]:
    """What a request generates alone, with unlimited memory: (tokens, finish reason)."""
    tokens = request.prompt_ids()
    params = request.params
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    limit = min(len(tokens) + params.max_tokens, max_length)
    output: list[int] = []
    while len(tokens) < limit:
        token = next_token(tokens, request.cache_salt)
        if token == NOT_A_TOKEN:
            return output, "error"
        tokens.append(token)
        output.append(token)
        if token in stops and len(output) > params.min_tokens:
            return output, "stop"
    return output, "length"


class ToyEngine:
    """Executes batches at once, in launch order; hands out the tokens later."""

    def __init__(
        self, page_size: int, num_pages: int, max_num_seqs: int, short_context: int, salt_of: dict[int, str]
    ) -> None:
        self.page_size = page_size
        self.short_context = short_context
        self.memory: list[tuple[int, int] | None] = [None] * (
            page_size * num_pages
        )  # (token, position in rotary tables)
        self.rows: list[NewRow | None] = [None] * max_num_seqs
        self.tables: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.length = [0] * max_num_seqs  # positions computed
        self.last = [-1] * max_num_seqs  # last token sampled
        self.salt_of = salt_of
        self.computed_tokens = 0

    def launch(self, batch: ScheduledBatch) -> StepTokens:
        for new in batch.new_rows:
            self.rows[new.slot] = new
            self.length[new.slot] = new.num_cached
            self.tables[new.slot] = []
            self.last[new.slot] = -1
            assert len(new.tokens) == new.num_tokens > new.num_cached
        for slot, first, pages in batch.page_writes:
            table = self.tables[slot]
            assert first <= len(table), "a hole in a page table"
            table[first : first + len(pages)] = pages
        # All positions of a step are written before any is read, by any row.
        sampling: list[int] = []
        assert len(set(batch.decode_slots)) == len(batch.decode_slots)
        for slot in batch.decode_slots:
            assert self.last[slot] >= 0
            self._write(slot, self.length[slot], [self.last[slot]])
            sampling.append(slot)
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for i, chunk in enumerate(batch.chunks):
            row = self.rows[chunk.slot]
            assert row is not None
            assert chunk.start == self.length[chunk.slot] and len(chunk.tokens) > 0
            assert chunk.slot not in batch.decode_slots
            self._write(chunk.slot, chunk.start, chunk.tokens)
            if chunk.samples:
                sampling.append(chunk.slot)
            if row.params.prompt_logprobs is not None:
                end = min(chunk.start + len(chunk.tokens) + 1, row.num_prompt)
                prompt_logprobs[i] = [TokenLogprobs(-float(p), row.tokens[p]) for p in range(chunk.start + 1, end)]
        self.computed_tokens += batch.num_tokens
        tokens = [self._sample(slot) for slot in sampling]
        logprobs = {}
        for i, slot in enumerate(sampling):
            row = self.rows[slot]
            assert row is not None
            if row.params.logprobs is not None:
                logprobs[i] = TokenLogprobs(-1.0, tokens[i])
        return StepTokens(tokens, logprobs, prompt_logprobs)

    def _write(self, slot: int, start: int, tokens: list[int] | array[int]) -> None:
        row = self.rows[slot]
        assert row is not None
        for position, token in enumerate(tokens, start):
            page = self.tables[slot][position // self.page_size]
            cell = token, row.rope_offset + position
            self.memory[page * self.page_size + position % self.page_size] = cell
        self.length[slot] = start + len(tokens)

    def _sample(self, slot: int) -> int:
        row = self.rows[slot]
        assert row is not None
        read = array("i")
        offset = self.short_context if self.length[slot] > self.short_context else 0
        for position in range(self.length[slot]):
            cell = self.memory[
                self.tables[slot][position // self.page_size] * self.page_size + position % self.page_size
            ]
            assert cell is not None and cell[1] == offset + position, f"position {position} of row {slot} reads {cell}"
            read.append(cell[0])
        token = next_token(read, self.salt_of[row.uid])
        self.last[slot] = token
        return token


class ToyLoop:
    """A scheduler and a toy engine, stepped as step_loop does, with everything that came out written down."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        num_pages: int = 64,
        max_num_seqs: int = 8,
        max_batch_tokens: int = 16,
        max_model_len: int = 200,
        prefix_cache: bool = True,
        overlap: bool = False,
        check: bool = True,
        digest: str = "every-step",
        short_context: int = 0,
        **options: object,
    ) -> None:
        self.max_length = min(max_model_len, page_size * num_pages)
        self.scheduler = Scheduler(
            SchedulerOptions(max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, **options),  # type: ignore[arg-type]
            page_size=page_size,
            num_pages=num_pages,
            prefix_cache=prefix_cache,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            overlap=overlap,
            digest=digest,
            short_context=short_context,
        )
        self.salt_of: dict[int, str] = {}
        self.engine = ToyEngine(page_size, num_pages, max_num_seqs, short_context, self.salt_of)
        self.max_batch_tokens = max_batch_tokens
        self.overlap = overlap
        self.check = check
        self.step_number = 0
        self.now = 0.0
        self.phase = ServicePhase.RUN
        self.requests: dict[int, Request] = {}
        self.aborted: set[int] = set()
        self.texts: dict[int, list[int]] = {}
        self.first_step: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.ended: dict[int, Finish] = {}
        self.prompt_logprobs: dict[int, list[tuple[int, int]]] = {}
        self.outputs: list[StepOutput] = []
        self.batches: list[ScheduledBatch] = []
        self.uid_of: dict[int, int] = {}
        self.sampling_uids: set[int] = set()  # of the step in flight
        self.pending: deque[tuple[ScheduledBatch, StepTokens]] = deque()

    def request(self, uid: int, prompt: list[int], max_tokens: int = 8, **fields: object) -> Request:
        """Make a request; `fields` go to Request or SamplingParams by name."""
        own = {k: fields.pop(k) for k in ("deadline", "priority", "cache_salt") if k in fields}
        params = SamplingParams(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
        return Request(uid, array("i", prompt).tobytes(), params, **own)  # type: ignore[arg-type]

    def step(self, arrivals: list[Request] = (), aborts: list[Abort] = ()) -> StepOutput:  # type: ignore[assignment]
        """One turn of the loop; the checks of issue-level invariants after each."""
        for request in arrivals:
            self.requests[request.uid] = request
            self.salt_of[request.uid] = request.cache_salt
        self.aborted |= {abort.uid for abort in aborts}
        self.scheduler.apply(StepInput(self.step_number, self.now, tuple(arrivals), tuple(aborts), self.phase))
        self.step_number += 1
        batch = self.scheduler.schedule()
        if batch is None:
            self.sampling_uids = set()
        else:
            assert 0 < batch.num_tokens <= self.max_batch_tokens
            self._check_grammar_rows(batch)
            self.pending.append((batch, self.engine.launch(batch)))
            self.batches.append(batch)
        if self.pending and (batch is None or len(self.pending) > self.overlap):
            self.scheduler.commit(*self.pending.popleft())
        if self.check:
            self.scheduler.check_invariants()
        output = self.scheduler.take_output()
        self._note(output)
        return output

    def _check_grammar_rows(self, batch: ScheduledBatch) -> None:
        """A row with a grammar is never in flight twice: its mask needs the last token on the CPU."""
        for new in batch.new_rows:
            self.uid_of[new.slot] = new.uid
        uids = {self.uid_of[slot] for slot in (*batch.decode_slots, *(c.slot for c in batch.chunks if c.samples))}
        grammars = {uid for uid in uids if self.requests[uid].params.grammar is not None}
        assert grammars.isdisjoint(self.sampling_uids), "a grammar row is in flight twice"
        self.sampling_uids = uids if self.overlap else set()

    def _note(self, output: StepOutput) -> None:
        self.outputs.append(output)
        for uid, token in zip(output.uids, output.tokens, strict=True):
            assert uid not in self.ended, f"{uid} got a token after its end"
            self.texts.setdefault(uid, []).append(token)
        for uid, cached in output.started:
            assert uid not in self.first_step, f"{uid} started twice"
            self.first_step[uid] = self.step_number - 1
            self.cached[uid] = cached
        for uid, first, logprobs in output.prompt_logprobs:
            positions = self.prompt_logprobs.setdefault(uid, [])
            assert first == (positions[-1][0] + 1 if positions else 1)
            positions += [(first + i, entry.rank) for i, entry in enumerate(logprobs)]
        for finish in output.finished:
            assert finish.uid not in self.ended, f"{finish.uid} ended twice"
            self.ended[finish.uid] = finish

    def run(self, requests: list[Request] = (), limit: int = 10_000) -> None:  # type: ignore[assignment]
        """Step until nothing is left."""
        self.step(list(requests))
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.step()
        else:
            raise AssertionError(f"still at work after {limit} steps")
        assert self.ended.keys() == self.requests.keys()
        stats = self.scheduler.stats()
        assert stats.running == stats.waiting == 0
        assert stats.pages_free + stats.pages_cached == stats.pages_total

    def check_texts(self) -> None:
        """Every ended request said what the oracle says, or a beginning of it if it was cut."""
        for uid, finish in self.ended.items():
            text = self.texts.get(uid, [])
            expected, reason = oracle(self.requests[uid], self.max_length)
            if finish.code in ("context_length_exceeded", "empty_prompt", "overloaded", "draining"):
                assert text == []
            elif (finish.reason == "error" and finish.code != "model_error") or (
                uid in self.aborted and finish.reason in ("abort", "stop")
            ):
                assert text == expected[: len(text)]
            else:
                assert (text, str(finish.reason)) == (expected, reason), f"request {uid}"


def random_prompt(rng: random.Random, low: int, high: int) -> list[int]:
    """Token ids other than EOS."""
    return [rng.randrange(1, VOCAB) for _ in range(rng.randint(low, high))]


def prompts(count: int, low: int = 1, high: int = 30, seed: int = 0) -> list[list[int]]:
    """Random ones, the same for the same seed."""
    rng = random.Random(seed)
    return [random_prompt(rng, low, high) for _ in range(count)]


def make_loop(seed: int) -> ToyLoop:
    """A loop with a pool that is too small, the other settings drawn from the seed."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 16])
    return ToyLoop(
        page_size=page_size,
        num_pages=rng.choice([30, 60]) // page_size + 1,
        overlap=rng.random() < 0.5,
        max_batch_tokens=rng.choice([16, 64]),
        prefix_cache=rng.random() < 0.7,
        schedule=rng.choice(SCHEDULES),
        request_timeout=rng.choice([None, 12.0]),
        short_context=rng.choice([0, 0, 18]),
    )


def random_traffic(loop: ToyLoop, seed: int, steps: int) -> Iterator[tuple[list[Request], list[Abort]]]:
    """Arrivals (half of them with shared beginnings) and aborts for `steps` steps; moves the loop's clock on."""
    rng = random.Random(seed + 1000)
    base = random_prompt(rng, 5, 20)
    uid = 0
    for _ in range(steps):
        loop.now += 1.0
        arrivals = []
        for _ in range(rng.choice([0, 0, 1, 2, 3])):
            prompt = base[: rng.randint(1, len(base))] + random_prompt(rng, 0, 8)
            arrivals.append(
                loop.request(
                    uid,
                    prompt if rng.random() < 0.6 else random_prompt(rng, 1, 40),
                    rng.choice([0, 1, 5, 20, 30]),
                    ignore_eos=rng.random() < 0.6,
                    priority=rng.randint(0, 3),
                    cache_salt=rng.choice(["", "", "a"]),
                    grammar=rng.choice([None, None, None, "g"]),
                    deadline=rng.choice([None, None, None, loop.now + 6.0]),
                )
            )
            uid += 1
        aborts = [Abort(rng.randrange(uid))] if uid and rng.random() < 0.1 else []
        yield arrivals, aborts
