"""Equal StepInputs give equal decisions in every process, whatever its hash seed, clock, memory layout and start order."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from toy_engine import make_loop, random_traffic

from spmd_serve.types import ServicePhase, StepInput

SCRIPT = Path(__file__).with_name("scheduler_replica.py")


def record_inputs(seed: int, steps: int) -> list[StepInput]:
    """Overload with deadlines, aborts, preemption, then drain and stop."""
    loop = make_loop(seed)
    inputs = []
    for number, (arrivals, aborts) in enumerate(random_traffic(loop, seed, steps)):
        inputs.append(StepInput(number, loop.now, tuple(arrivals), tuple(aborts)))
    for number in range(steps, steps + 60):
        phase = ServicePhase.DRAIN if number < steps + 50 else ServicePhase.STOP
        inputs.append(StepInput(number, loop.now + number - steps, phase=phase))
    return inputs


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_replicas_agree(seed: int) -> None:
    inputs = pickle.dumps(record_inputs(seed, 100))
    processes = []
    for skew, hash_seed in ((0, "0"), (60, "1"), (-86_400, "4242"), (777, "random"))[:: -1 if seed % 2 else 1]:
        processes.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(seed), str(skew)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONHASHSEED": hash_seed},
            )
        )
        stdin = processes[-1].stdin
        assert stdin is not None
        stdin.write(inputs)
        stdin.close()
    reports = []
    for process in processes:
        stdout = process.stdout
        assert stdout is not None
        with stdout:
            reports.append(stdout.read().decode().splitlines())
        assert process.wait(60) == 0
    assert len(reports[0]) == 161 and len(set(reports[0])) > 100
    assert "timeout" in reports[0][-1] and "shutdown" not in reports[0][0]
    for other in reports[1:]:
        for step, (ours, theirs) in enumerate(zip(reports[0], other, strict=True)):
            assert ours == theirs, f"replicas differ at step {step}"


def test_a_local_clock_would_show() -> None:
    """The check can fail: a replica that expires requests by its own clock differs in the step in which it does."""
    inputs = record_inputs(0, 40)
    digests = []
    for skew in (0.0, 60.0):
        loop = make_loop(0)
        seen = []
        for step_input in inputs:
            loop.now, loop.phase = step_input.now + skew, step_input.phase
            loop.step(list(step_input.arrivals), list(step_input.aborts))
            seen.append(loop.scheduler.digest)
        digests.append(seen)
    assert digests[0] != digests[1]
