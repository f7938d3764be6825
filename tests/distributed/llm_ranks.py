"""What each of two ranks of test_llm.py runs: the offline API, with errors in between.

torchrun --nproc-per-node=2 tests/distributed/llm_ranks.py OUT
"""

import json
import os
import sys
from pathlib import Path

from spmd_serve.errors import ConfigError, DistributedError, ModelError, RequestError
from spmd_serve.llm import LLM
from spmd_serve.types import SamplingParams

PROMPT = "The capital of France is"
PARAMS = SamplingParams(max_tokens=4, temperature=0.0)
OPTIONS = ("--num-pages", "16", "--max-batch-tokens", "64", "--control-timeout", "20")


def main() -> None:
    said: list[str] = []
    llm = LLM(*OPTIONS)
    for prompts in ([PROMPT], [PROMPT, [5] * 3000], [[2**40], PROMPT], [[-1]], [PROMPT]):
        try:
            said += [result.text for result in llm.generate(prompts, PARAMS)]
        except RequestError as exc:
            said.append(str(exc))
    try:
        llm.generate([PROMPT, PROMPT], [PARAMS, SamplingParams(max_tokens=4, temperature=-1.0)])
    except RequestError as exc:
        said.append(str(exc))
    try:
        LLM(*OPTIONS)  # beside the first one, which goes on
    except DistributedError as exc:
        said.append(str(exc))
    # What rank 0 alone is given, and what is wrong with it, does not leave the others a call behind.
    first = os.environ["RANK"] == "0"
    for prompts, params in (("text", PARAMS), ([PROMPT], []), ([[1.5]], PARAMS), (["\ud800"], PARAMS), (None, PARAMS)):
        try:
            llm.generate(prompts if first else [], params if first else [])  # type: ignore[arg-type]
        except (RequestError, TypeError, ValueError) as exc:
            said.append(type(exc).__name__)
        said += [result.text for result in llm.generate([PROMPT], PARAMS)]
    llm.close()
    llm.close()
    for wrong in (("--model", "/nowhere"), ("--nope",)):  # rank 0's arguments count, and raise on all ranks
        try:
            LLM(*(wrong if first else OPTIONS))
        except (ModelError, ConfigError) as exc:
            said.append(str(exc))
    llm = LLM(*(OPTIONS if first else ("--page-size", "4", "--nope")))
    said += [result.text for result in llm.generate([PROMPT], PARAMS)]
    llm.close()
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
