"""The engine on a GPU against a float32 reference: transformers on the same weights."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint, random_prompts
from support.rounding import Reference, check

from spmd_serve.llm import LLM
from spmd_serve.types import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3-wide"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint, "cuda")


@pytest.fixture(params=[1, 16, 64])
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    options = {
        "model": checkpoint,
        "page-size": request.param,
        "max-batch-tokens": 256,
        "num-pages": 32768 // request.param,
    }
    options |= {"max-num-seqs": 32, "device": "cuda"}
    llm = LLM(*[text for name, value in options.items() for text in (f"--{name}", str(value))])
    yield llm
    llm.close()
    del llm
    torch.cuda.empty_cache()


def prompts(count: int) -> list[list[int]]:
    return random_prompts(1, 700, 17, 64, 255, 256, 257, 33, 5, 129, 300, 2)[:count]


def test_logprobs_of_mixed_batches(reference: Reference, llm: LLM) -> None:
    """12 prompts of 1 to 700 tokens: chunks beside decodes, then captured decode steps."""
    params = SamplingParams(max_tokens=40, logprobs=0, **GREEDY)
    check(reference, llm.generate(prompts(12), params))


@pytest.mark.parametrize("rows", [1, 12, 40, 64, 90])
def test_logprobs_of_each_way_through_the_linear_layers(checkpoint: Path, reference: Reference, rows: int) -> None:
    """GEMV, `skinny.cu`, `wide.cu` (17 to 64 rows) and the matrix library, in captured steps of that many rows."""
    llm = LLM("--model", str(checkpoint), "--num-pages", "512", "--max-num-seqs", "96", "--device", "cuda")
    lengths = [3 + 5 * i % 97 for i in range(rows)]
    check(reference, llm.generate(random_prompts(*lengths), SamplingParams(max_tokens=24, logprobs=0, **GREEDY)))
    llm.close()


def test_prompt_logprobs_and_prefix_hit(reference: Reference, llm: LLM) -> None:
    prompt = prompts(2)[1]
    first = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=0, **GREEDY))[0]
    assert len(first.prompt_logprobs) == len(prompt) - 1
    check(reference, [first])
    params = SamplingParams(max_tokens=40, logprobs=0, **GREEDY)
    cold, warm = llm.generate([prompt], params)[0], llm.generate([prompt], params)[0]
    assert warm.cached_tokens > 600
    check(reference, [cold])
    check(reference, [warm])


def test_seeded_sampling_repeats(checkpoint: Path) -> None:
    """The same request has the same tokens again. (Without the prefix cache: a hit computes other sums, which round.)"""
    llm = LLM("--model", str(checkpoint), "--prefix-cache", "off", "--num-pages", "512", "--max-num-seqs", "8")
    params = SamplingParams(max_tokens=30, temperature=0.5, seed=42, ignore_eos=True)
    prompt = prompts(4)[3]
    first, again, twice = (llm.generate([prompt] * n, params)[-1].token_ids for n in (1, 1, 2))
    other = llm.generate([prompt], replace(params, seed=43))[0].token_ids
    llm.close()
    assert first == again
    assert first[:3] == twice[:3], "another batch size may round otherwise, not sample otherwise"
    assert first != other


def test_eager_and_captured_steps_agree(checkpoint: Path, reference: Reference) -> None:
    tokens = []
    for graphs in ("on", "off"):
        llm = LLM("--model", str(checkpoint), "--cuda-graphs", graphs, "--num-pages", "512", "--max-num-seqs", "16")
        params = SamplingParams(max_tokens=20, logprobs=0, **GREEDY)
        results = llm.generate(prompts(5), params)
        check(reference, results)
        tokens.append([r.token_ids for r in results])
        llm.close()
    same = sum(a == b for x, y in zip(*tokens, strict=True) for a, b in zip(x, y, strict=True))
    assert same >= 60


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 50, "top_p": 0.8}])
def test_filters_keep_what_they_should(llm: LLM, params: dict[str, float]) -> None:
    sampling = SamplingParams(max_tokens=30, temperature=1.0, logprobs=20, ignore_eos=True, **params)  # type: ignore[arg-type]
    for result in llm.generate(prompts(4), sampling):
        for entry in result.logprobs:
            if "top_k" in params:
                assert entry.rank <= params["top_k"]
            if "min_p" in params:
                assert entry.logprob >= entry.top_logprobs[0] + torch.tensor(params["min_p"]).log().item() - 0.05
            if params.get("top_p") == 0.6:
                better = torch.tensor(entry.top_logprobs[: entry.rank - 1]).exp().sum()
                assert entry.rank > 20 or float(better) < 0.61
