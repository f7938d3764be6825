"""Models with rotary frequencies of their own for short sequences: each sequence has those of its length, as in transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import VOCAB, write_family

from spmd_serve.llm import LLM, Generation
from spmd_serve.types import SamplingParams

SHORT = 16
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module", params=["phi3-long", "llama-dynamic"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_family(request.param, folder)
    return folder


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def expected_logprobs(folder: Path, tokens: list[int]) -> list[float]:
    """Of each token from the second one on, by transformers over the whole sequence before it: no cache of another length."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    with torch.no_grad():
        for end in range(1, len(tokens)):
            logits = model(torch.tensor([tokens[:end]])).logits[0, -1]
            found.append(float(logits.log_softmax(-1)[tokens[end]]))
    return found


def check(folder: Path, results: list[Generation]) -> None:
    for result in results:
        start, tokens = len(result.prompt_ids), result.prompt_ids + result.token_ids
        if folder.name.startswith(
            "llama-dynamic"
        ):  # beyond the short context transformers' frequencies change with each token
            tokens = tokens[: SHORT + 1]
        expected = expected_logprobs(folder, tokens)[start - 1 :]
        got = [entry.logprob for entry in result.logprobs[: len(expected)]]
        assert got == pytest.approx(expected, abs=2e-4), (start, result.token_ids)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_each_sequence_has_the_frequencies_of_its_length(folder: Path, overlap: str) -> None:
    """Prompts below, at and above the switch, some of which grow beyond it; again, with what is cached of them."""
    options = ("--dtype", "float32", "--page-size", "4", "--num-pages", "64", "--max-batch-tokens", "24")
    llm = LLM("--model", str(folder), "--device", "cpu", "--overlap", overlap, *options)
    try:
        prompts = random_prompts(5, SHORT - 1, SHORT, SHORT + 1, 20)
        results = llm.generate(prompts, GREEDY)
        check(folder, results)
        grown = [result.prompt_ids + result.token_ids[:3] for result in results]
        again = llm.generate([*prompts, *grown], GREEDY)
        assert all(result.cached_tokens for result in again)
        assert [result.token_ids for result in again[: len(prompts)]] == [result.token_ids for result in results]
        check(folder, again[len(prompts) :])
    finally:
        llm.close()


def test_a_context_that_is_short_has_one_set(folder: Path) -> None:
    llm = LLM("--model", str(folder), "--device", "cpu", "--dtype", "float32", "--max-model-len", str(SHORT))
    try:
        check(folder, llm.generate(random_prompts(5, 9), GREEDY))
    finally:
        llm.close()
