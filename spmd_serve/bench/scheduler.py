"""`bench scheduler`: what the scheduler costs in Python; no model, no device, one process.

Each row of the report is a steady state of decoding sequences whose lengths are spread over a page, so that each step gives a
page to one in `page_size` of them. The first part grows the number of sequences. The second grows the number of pages in the prefix
cache, with no free page left: each page that a sequence gets is evicted there, and newcomers look their prompts up in it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median

from spmd_serve.bench.stats import quantile
from spmd_serve.bench.workloads import parse_count
from spmd_serve.config import SchedulerOptions
from spmd_serve.scheduler.digest import RollingDigest
from spmd_serve.scheduler.scheduler import Scheduler
from spmd_serve.types import Abort, Request, SamplingParams, ScheduledBatch, StepInput, StepTokens

PAGE_SIZE = 16
EOS = 0
CACHED_PROMPT = 1008  # tokens of a prompt that fills the cache: 63 pages


@dataclass(frozen=True)
class Figures:
    """Medians in microseconds over the steps of one state; `p99` is of schedule + commit."""

    sequences: int
    cached_pages: int
    schedule: float
    commit: float
    total: float
    p99: float
    per_sequence: float
    digest: float
    # apply + schedule of one request of 1,008 cached tokens, beyond a step without it; None: no cache
    newcomer: float | None


class Driver:
    """A scheduler at work, with an engine that always samples the same token."""

    def __init__(self, sequences: int, cached_pages: int, steps: int, digest: str, seed: int) -> None:
        self._rng = random.Random(seed)
        own_pages = sequences * ((2 * PAGE_SIZE + steps) // PAGE_SIZE + 2)
        options = SchedulerOptions(
            max_batch_tokens=max(8192, 2 * sequences), max_num_seqs=sequences + 1, max_queue=2 * sequences
        )
        self.scheduler = Scheduler(
            options,
            page_size=PAGE_SIZE,
            num_pages=own_pages + 2 * CACHED_PROMPT // PAGE_SIZE + cached_pages,
            prefix_cache=True,
            max_model_len=10**6,
            eos_token_ids=(EOS,),
            overlap=False,
            digest=digest,
        )
        self._step = self._uid = 0
        self._tokens = [self._rng.randrange(1, 50_000) for _ in range(2 * sequences + 64)]
        self.prompt = b""
        while cached_pages and self.scheduler.stats().pages_free:
            self.prompt = self._random_prompt(CACHED_PROMPT)
            self.run([self._request(self.prompt, 1)])
            while self.scheduler.has_work:
                self.run([])
        spread = [self._request(self._random_prompt(PAGE_SIZE + i % PAGE_SIZE), 10**5) for i in range(sequences)]
        self.run(spread)
        while not self.scheduler.is_pure_decode:
            self.run([])

    def _random_prompt(self, length: int) -> bytes:
        return array("i", (self._rng.randrange(1, 50_000) for _ in range(length))).tobytes()

    def _request(self, prompt: bytes, max_tokens: int) -> Request:
        self._uid += 1
        return Request(self._uid, prompt, SamplingParams(max_tokens))

    def run(
        self, arrivals: list[Request], aborts: tuple[Abort, ...] = ()
    ) -> tuple[float, float, float, ScheduledBatch]:
        """One step: seconds of apply, schedule and commit, and the batch."""
        scheduler = self.scheduler
        step_input = StepInput(self._step, 0.0, tuple(arrivals), aborts)
        self._step += 1
        begin = time.perf_counter()
        scheduler.apply(step_input)
        applied = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        assert batch is not None
        result = StepTokens(self._tokens[: batch.num_sampled])
        sampled = time.perf_counter()
        scheduler.commit(batch, result)
        committed = time.perf_counter()
        scheduler.take_output()
        return applied - begin, scheduled - applied, committed - sampled, batch

    def newcomers(self, count: int) -> Iterator[tuple[float, float]]:
        """Seconds of apply + schedule in a step with a newcomer whose prompt was just cached, and in the step after it."""
        for _ in range(count):
            request = self._request(self.prompt, 10)
            apply, schedule, _, _ = self.run([request])
            plain_apply, plain_schedule, _, _ = self.run([])
            yield apply + schedule, plain_apply + plain_schedule
            self.run([], (Abort(request.uid),))


def measure(sequences: int, cached_pages: int, *, steps: int, digest: str, seed: int) -> Figures:
    """Figures of one steady state."""
    driver = Driver(sequences, cached_pages, 2 * steps, digest, seed)
    times = [driver.run([]) for _ in range(steps)]
    newcomer = None  # there is no cache for it to look its prompt up in
    if cached_pages:
        pairs = driver.newcomers(min(max(1, steps // 4), 50))
        newcomer = 1e6 * median(with_it - without for with_it, without in pairs)
    rolling, digests = RollingDigest(digest), []
    for number, (_, _, _, batch) in enumerate(times):
        batch = replace(batch, step=number)
        tokens = driver._tokens[: batch.num_sampled]
        begin = time.perf_counter()
        rolling.fold_plan(batch)
        rolling.fold_tokens(number, tokens)
        digests.append(time.perf_counter() - begin)
    driver.scheduler.check_invariants()
    totals = [schedule + commit for _, schedule, commit, _ in times]
    return Figures(
        sequences=sequences,
        cached_pages=driver.scheduler.stats().pages_cached,
        schedule=1e6 * median(schedule for _, schedule, _, _ in times),
        commit=1e6 * median(commit for _, _, commit, _ in times),
        total=1e6 * median(totals),
        p99=1e6 * quantile(totals, 0.99),
        per_sequence=1e6 * median(totals) / sequences,
        digest=1e6 * median(digests),
        newcomer=newcomer,
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m spmd_serve.bench scheduler", description=__doc__, allow_abbrev=False
    )
    default = "(default: %(default)s)"
    parser.add_argument(
        "--sequences", type=parse_count, nargs="*", default=[16, 64, 256, 1024], help=f"decoding sequences {default}"
    )
    parser.add_argument(
        "--cached-pages",
        type=partial(parse_count, least=0),
        nargs="*",
        default=[1_000, 10_000, 100_000],
        help=f"pages in the prefix cache, of 64 sequences {default}",
    )
    parser.add_argument("--steps", type=parse_count, default=200, help=f"steps measured in each state {default}")
    parser.add_argument("--digest", choices=("every-step", "sampled", "off"), default="every-step", help=default)
    parser.add_argument("--seed", type=int, default=0, help=f"of prompts and tokens {default}")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def main(argv: list[str]) -> int:
    """Run the benchmark and print its report."""
    args = make_parser().parse_args(argv)
    states = [(count, 0) for count in args.sequences] + [(64, pages) for pages in args.cached_pages]
    rows = []
    if not args.json:
        print(f"microseconds a step, medians of {args.steps}; page size {PAGE_SIZE}, digest {args.digest}")
        print(f"newcomer: one more request, whose {CACHED_PROMPT:,} prompt tokens are cached; - without a cache")
        print("sequences cached pages  schedule    commit     total       p99   per seq.    digest  newcomer")
    for sequences, cached_pages in states:
        row = measure(sequences, cached_pages, steps=args.steps, digest=args.digest, seed=args.seed)
        rows.append(row)
        if not args.json:
            newcomer = "-" if row.newcomer is None else f"{row.newcomer:.1f}"
            print(
                f"{row.sequences:9} {row.cached_pages:12}{row.schedule:10.1f}{row.commit:10.1f}{row.total:10.1f}{row.p99:10.1f}"
                f"{row.per_sequence:11.3f}{row.digest:10.1f}{newcomer:>10}",
                flush=True,
            )
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    return 0
