"""Engines with random options on random models of several families: every greedy token and its log-probability is transformers'."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import VOCAB, write_family

from spmd_serve.llm import LLM, Generation
from spmd_serve.types import SamplingParams

LONGEST = 63  # tokens of a sequence, which the smallest model is made for


def random_options(rng: random.Random) -> dict[str, object]:
    tokens, page_size = rng.choice([4, 16, 64]), rng.choice([1, 2, 4, 16])
    return {
        "page-size": page_size,
        "num-pages": rng.choice([70, 130, 1000]) // page_size + 1,  # starved, scarce, plenty
        "max-batch-tokens": tokens,
        "max-num-seqs": min(tokens, rng.choice([1, 3, 16])),
        "overlap": rng.choice(["on", "off"]),
        "prefix-cache": rng.choice(["on", "on", "off"]),
    }


def random_prompts(rng: random.Random) -> list[list[int]]:
    """Some share a beginning, one comes twice, and two are made of whole pages."""
    common = [rng.randrange(3, VOCAB) for _ in range(40)]
    prompts = [
        common[: rng.randrange(25)] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 18))] for _ in range(6)
    ]
    return [*prompts, prompts[0], common[:32], common[:32]]


def check(model: Any, result: Generation) -> None:
    start, tokens = len(result.prompt_ids), result.prompt_ids + result.token_ids
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)[start - 1 : -1]
    assert len(result.token_ids) == len(result.logprobs) == len(expected)
    for token, got, wanted in zip(result.token_ids, result.logprobs, expected, strict=True):
        assert got.logprob == pytest.approx(float(wanted[token]), abs=1e-3)
        assert float(wanted.max() - wanted[token]) < 1e-3


@pytest.mark.parametrize("name", ["llama-yarn", "mistral", "mixtral", "gemma3", "smollm3", "olmo2"])
def test_random_engine(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    rng = random.Random(name)
    options = random_options(rng)
    print(name, options)
    write_family(name, tmp_path)
    prompts = random_prompts(rng)
    params = [
        SamplingParams(
            max_tokens=min(rng.randint(1, 16), LONGEST - len(prompt)), temperature=0.0, ignore_eos=True, logprobs=0
        )
        for prompt in prompts
    ]
    arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    llm = LLM("--model", str(tmp_path), "--device", "cpu", "--dtype", "float32", *arguments)
    try:
        results = llm.generate(prompts, params)
    finally:
        llm.close()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    for result in results:
        check(model, result)
