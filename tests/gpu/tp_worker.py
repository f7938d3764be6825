"""What each rank of test_two_gpus.py runs: the jobs of FOLDER/jobs.json, one process start for all of them.

    torchrun --nproc-per-node=2 tests/gpu/tp_worker.py FOLDER

jobs.json is {"checks": [...], "load": {...} or null}:
    a check  {"name", "options": the server's, "runs": [{"prompts": [[id]], "params": [fields of SamplingParams], "alone"}]};
             rank 0 writes FOLDER/NAME-RANKS.json: of each run, of each prompt {"token_ids", "logprobs"}.
    the load {"options", "steps", "seed"}: random requests of all kinds come and go for that many steps; rank 0 writes
             FOLDER/load-RANKS.json with counts and every rank's last digest.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import time
from array import array
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from spmd_serve.assembly import Assembly, assemble, make_plan
from spmd_serve.config import parse_args
from spmd_serve.distributed import copied_sums
from spmd_serve.distributed.beats import Progress
from spmd_serve.distributed.channel import make_channel
from spmd_serve.distributed.ranks import RankInfo, join_group, leave_group, rank_info
from spmd_serve.step_loop import GivenLink, StepLoop
from spmd_serve.types import (
    Abort,
    FinishReason,
    Request,
    SamplingParams,
    ServicePhase,
    ServiceState,
    StepOutput,
)

TIMEOUT_S = 60.0
copied_sums.MIN_BYTES = 1  # the models are small: prefills of more than one token are halved, as those of large models


class Given(GivenLink):
    """Rank 0's link for requests that all come at once; `tokens` and `logprobs` by uid."""

    def __init__(self) -> None:
        super().__init__([])
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}

    def submit(self, requests: list[Request]) -> None:
        self._requests = requests
        for request in requests:
            self.tokens[request.uid], self.logprobs[request.uid] = [], []

    def publish(self, output: StepOutput) -> None:
        for i, (uid, token) in enumerate(zip(output.uids, output.tokens, strict=True)):
            self.tokens[uid].append(token)
            if i in output.logprobs:
                self.logprobs[uid].append(output.logprobs[i].logprob)
        for finish in output.finished:
            assert finish.reason is not FinishReason.ERROR, finish.message


class Load:
    """Rank 0's link for random requests: they come and go until `steps` steps have run, then the rest may end."""

    MAX_LIVE = 24

    def __init__(self, steps: int, seed: int, vocab_size: int) -> None:
        self._random = Random(seed)
        self._vocab_size = vocab_size
        self._wanted = steps
        self._prefixes = [self._ids(160) for _ in range(3)]
        self._live: dict[int, SamplingParams] = {}
        self._made: Counter[int] = Counter()  # tokens by uid
        self._next_uid = 0
        self._preempted = 0
        self.steps = 0
        self.finished: Counter[str] = Counter()

    @property
    def phase(self) -> ServicePhase:
        return ServicePhase.RUN if self.steps < self._wanted else ServicePhase.DRAIN

    def report(self) -> dict[str, Any]:
        assert not self._live, f"{len(self._live)} requests never ended"
        tokens = sum(self._made.values())
        return {"steps": self.steps, "finished": self.finished, "tokens": tokens, "preempted": self._preempted}

    def drain(self) -> tuple[list[Request], list[Abort]]:
        r = self._random
        arrivals, aborts = [], []
        if self.phase is ServicePhase.RUN and (not self._live or r.random() < 0.3):
            for _ in range(min(r.randint(1, 3), self.MAX_LIVE - len(self._live))):
                arrivals.append(self._request())
        if self._live and r.random() < 0.05:
            uid = r.choice(list(self._live))
            aborts.append(Abort(uid, r.choice((FinishReason.ABORT, FinishReason.STOP))))
        return arrivals, aborts

    def wait(self, timeout_s: float) -> bool:
        return True

    def set_state(self, state: ServiceState, reason: str = "") -> None:
        pass

    def publish(self, output: StepOutput) -> None:
        self.steps += 1
        for uid, token in zip(output.uids, output.tokens, strict=True):
            assert 0 <= token < self._vocab_size and uid in self._live
            self._made[uid] += 1
        for finish in output.finished:
            params = self._live.pop(finish.uid)  # KeyError: it ended twice
            self.finished[finish.reason] += 1
            assert finish.reason is not FinishReason.ERROR, finish.message
            made = self._made[finish.uid]
            assert made <= params.max_tokens
            assert made == params.max_tokens or finish.reason is not FinishReason.LENGTH
        assert output.stats is not None
        self._preempted = output.stats.preempted_total

    def _request(self) -> Request:
        r = self._random
        prompt = self._ids(r.choice((1, 3, 17, 40, 130, 300)))
        if r.random() < 0.4:  # a prefix that others have too
            prompt = r.choice(self._prefixes)[: r.randint(1, 160)] + prompt[:60]
        self._next_uid += 1
        request = Request(self._next_uid, array("i", prompt).tobytes(), self._params())
        self._live[request.uid] = request.params
        return request

    def _params(self) -> SamplingParams:
        r = self._random
        length = r.randint(1, 60) if r.random() < 0.7 else r.randint(100, 300)  # some outgrow the pages that are left
        common: dict[str, Any] = {"max_tokens": length, "seed": r.getrandbits(62), "ignore_eos": True}
        filters = {"top_k": r.choice((0, 1, 40)), "top_p": r.choice((1.0, 0.9, 0.3)), "min_p": r.choice((0.0, 0.1))}
        penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
        bias = {"logit_bias": tuple((t, r.uniform(-5, 5)) for t in self._ids(8))}
        stops = {"stop_token_ids": tuple(self._ids(40)), "min_tokens": r.randint(0, 5), "ignore_eos": False}
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.0},
            {"temperature": 0.8},
            filters | {"temperature": 1.0},
            penalties | {"temperature": r.choice((0.0, 0.7))},
            {"temperature": 0.0, "logprobs": r.randint(0, 5), "prompt_logprobs": r.choice((None, 0, 2))},
            bias | stops | {"temperature": 1.3},
            filters | penalties | bias | stops | {"temperature": 0.9, "logprobs": 1},
        ]
        return SamplingParams(**(common | r.choice(kinds)))

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(count)]


class Engine:
    """What LLM and the server build, on a process group that several of them share one after the other. Collective."""

    def __init__(self, ranks: RankInfo, options: list[str]) -> None:
        self._ranks = ranks
        self._plan = make_plan(parse_args(options), ranks)
        self.assembly: Assembly = assemble(self._plan, ranks)
        self.vocab_size = self._plan.model.vocab_size

    def loop(self, link: Given | Load, **more: Any) -> StepLoop:
        config = self._plan.config
        return StepLoop(
            self._ranks,
            make_channel(self._ranks),
            self.assembly.scheduler,
            self.assembly.runner,
            config.control,
            overlap=bool(config.engine.overlap),
            progress=Progress(),
            link=link if self._ranks.rank == 0 else None,
            **more,
        )

    def close(self) -> None:
        if self._ranks.world_size > 1:
            dist.barrier()
        self.assembly.runner.close()
        del self.assembly
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_check(ranks: RankInfo, check: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Of each run, of each prompt, what was generated; of use on rank 0."""
    engine, link, uid = Engine(ranks, check["options"]), Given(), 0
    loop = engine.loop(link)
    found = []
    for run in check["runs"]:
        requests = []
        for prompt, params in zip(run["prompts"], run["params"], strict=True):
            requests.append(Request(uid, array("i", prompt).tobytes(), SamplingParams(**params)))
            uid += 1
        for batch in [[request] for request in requests] if run["alone"] else [requests]:
            link.submit(batch)
            loop.run(until_idle=True)
        found.append([{"token_ids": link.tokens[r.uid], "logprobs": link.logprobs[r.uid]} for r in requests])
    engine.close()
    return found


def run_load(ranks: RankInfo, load: dict[str, Any]) -> dict[str, Any]:
    """Counts (of use on rank 0), and the last digest of every rank."""
    engine = Engine(ranks, load["options"])
    link = Load(load["steps"], load["seed"], engine.vocab_size)
    began = time.monotonic()
    engine.loop(link, requested_phase=lambda: link.phase).run()
    digests: list[Any] = [dataclasses.astuple(engine.assembly.scheduler.digest)] * ranks.world_size
    if ranks.world_size > 1:
        dist.all_gather_object(digests, digests[0])
    engine.close()
    counts = link.report() if ranks.rank == 0 else {}
    return counts | {"digests": digests, "seconds": time.monotonic() - began}


def main(folder: Path) -> None:
    jobs = json.loads((folder / "jobs.json").read_text())
    ranks = rank_info(os.environ)
    torch.set_num_threads(1)
    join_group(ranks, None, TIMEOUT_S)
    work = [(check["name"], run_check, check) for check in jobs["checks"]]
    work += [("load", run_load, jobs["load"])] if jobs["load"] else []
    for name, run, job in work:
        began = time.monotonic()
        result = run(ranks, job)
        if ranks.rank == 0:
            (folder / f"{name}-{ranks.world_size}.json").write_text(json.dumps(result))
            print(f"worker: {name} on {ranks.world_size} ranks: {time.monotonic() - began:.1f} s", flush=True)
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # like the server: what is left are library threads, on which the interpreter's own way out may hang
