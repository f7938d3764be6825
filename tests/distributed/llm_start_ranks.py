"""What each of three ranks of test_llm.py runs: starts of the offline API that fail on one rank alone, then one that does not.

torchrun --nproc-per-node=3 tests/distributed/llm_start_ranks.py HERE THERE OUT

HERE and THERE are folders with a `model` of the same names and shapes, but of other weights; rank 1 is THERE for once.
"""

import json
import os
import sys
from pathlib import Path

from spmd_serve import assembly, llm
from spmd_serve.errors import WeightsError
from spmd_serve.types import SamplingParams

RANK = os.environ["RANK"]
OPTIONS = ("--model", "model", "--num-pages", "16", "--max-batch-tokens", "64", "--control-timeout", "20")


def start(module: object, name: str, exc: BaseException | None, rank: str = "1") -> str:
    """What an LLM answers, or why there is none, when `module.name` raises `exc` on one rank."""
    real = getattr(module, name)

    def fail(*arguments: object) -> None:
        assert exc is not None
        raise exc

    if exc is not None and rank == RANK:
        setattr(module, name, fail)
    try:
        made = llm.LLM(*OPTIONS)
        results = made.generate([[5, 6]], SamplingParams(max_tokens=2, temperature=0.0))  # and nobody closes it
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    finally:
        setattr(module, name, real)
    return f"{len(results)} results"


def main() -> None:
    here, there, out = sys.argv[1:]
    os.chdir(there if RANK == "1" else here)
    said = [start(assembly, "make_plan", None)]
    os.chdir(here)
    said.append(start(assembly, "make_plan", PermissionError(13, "no")))
    said.append(start(assembly, "build_runner", MemoryError("no")))
    said.append(start(assembly, "build_runner", WeightsError("damaged"), rank="0"))
    said.append(start(llm, "TextTokenizer", ValueError("no")))
    said += [start(assembly, "make_plan", None) for _ in range(2)]
    Path(f"{out}.{RANK}").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
