"""What FP8 costs in accuracy: the bundled model's perplexity on texts of the repository, against bfloat16."""

import math
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import spmd_serve
from spmd_serve.config import ModelOptions
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.llm import LLM
from spmd_serve.models.resolve import resolve_model
from spmd_serve.types import SamplingParams

ROOT = Path(spmd_serve.__file__).parents[1]
TEXTS = (ROOT / "LICENSE", ROOT / "README.md")
TOKENS = 250  # of each


@cache
def perplexity(*options: str) -> float:
    """Of the texts' tokens but the first."""
    folder = resolve_model(ModelOptions(), RankInfo())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text.read_text()).ids[:TOKENS] for text in TEXTS]
    llm = LLM("--device", "cpu", "--threads", "1", "--dtype", "bfloat16", "--max-model-len", str(TOKENS + 1), *options)
    results = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    logprobs = [entry.logprob for result in results for entry in result.prompt_logprobs]
    assert len(logprobs) == len(TEXTS) * (TOKENS - 1)
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.parametrize("options", [("--quantization", "fp8"), ("--kv-dtype", "fp8")], ids=["weights", "kv"])
def test_perplexity_is_within_two_percent(options: tuple[str, str]) -> None:
    ratio = perplexity(*options) / perplexity()
    print(f"perplexity {perplexity(*options):.4f} with {' '.join(options)}, {perplexity():.4f} in bfloat16")
    assert ratio != 1.0, "the option changed nothing"
    assert abs(ratio - 1) < 0.02
