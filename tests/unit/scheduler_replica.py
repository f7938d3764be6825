"""One replica for test_scheduler_replicas.py: feeds recorded StepInputs to a scheduler and prints its digest after every step.

python scheduler_replica.py SEED CLOCK_SKEW_SECONDS < inputs.pickle
"""

from __future__ import annotations

import pickle
import random
import sys
import time


def main() -> None:
    seed, skew = int(sys.argv[1]), float(sys.argv[2])
    # Everything that may differ between hosts does, before the scheduler is imported.
    for clock in ("time", "monotonic", "perf_counter"):
        real = getattr(time, clock)
        setattr(time, clock, lambda real=real: real() * 1.5 + skew)
    random.seed(skew)
    ballast = [object() for _ in range(int(skew) % 1000)]  # other addresses, hence other id()s

    from toy_engine import make_loop

    inputs = pickle.load(sys.stdin.buffer)
    loop = make_loop(seed)
    for step_input in inputs:
        loop.now, loop.phase = step_input.now, step_input.phase
        loop.step(list(step_input.arrivals), list(step_input.aborts))
        digest, stats = loop.scheduler.digest, loop.scheduler.stats()
        print(digest.step, digest.rows, digest.pages, digest.tokens, stats.running, stats.waiting, stats.pages_cached)
    print("ended", [(uid, str(finish.reason), finish.code) for uid, finish in loop.ended.items()])
    del ballast


if __name__ == "__main__":
    main()
