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

DEVICE = "cuda"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3-wide"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint, DEVICE)


class Engines:
    """One engine at a time, kept while tests ask for the same: its start takes longer than most tests."""

    def __init__(self) -> None:
        self._options: dict[str, object] = {}
        self._llm: LLM | None = None

    def get(self, checkpoint: Path, **options: object) -> LLM:
        """options: the server's, with _ for -."""
        options = {"model": checkpoint, "device": DEVICE} | options
        if self._llm is None or options != self._options:
            self.close()
            arguments = [
                text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))
            ]
            self._llm, self._options = LLM(*arguments), options
        return self._llm

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()
            self._llm = None
            torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    engines.close()


@pytest.fixture(scope="module", params=[1, 16, 64])
def page_size(request: pytest.FixtureRequest) -> int:
    """Of the module's scope, so that all tests of a size follow one another."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def llm(engines: Engines, checkpoint: Path, page_size: int) -> LLM:
    pages = 32768 // page_size
    return engines.get(checkpoint, page_size=page_size, num_pages=pages, max_batch_tokens=256, max_num_seqs=32)


def prompts(count: int) -> list[list[int]]:
    return random_prompts(1, 700, 17, 64, 255, 256, 257, 33, 5, 129, 300, 2)[:count]


def test_no_kernel_compiles_under_a_request(engines: Engines, checkpoint: Path) -> None:
    """The first of all tests: what it asks for has not been compiled by others."""
    from triton import knobs

    compiled: list[str] = []
    llm = engines.get(checkpoint, num_pages=2048, max_num_seqs=96, prefix_cache="off")
    knobs.runtime.jit_cache_hook = lambda **compilation: compiled.append(compilation["fn"].name)
    try:
        for rows in (1, 2, 9, 24, 40, 64, 90):
            lengths = [3 + 5 * i % 97 for i in range(rows)]
            for params in ({}, {"top_k": 20}, {"presence_penalty": 1.0, "top_p": 0.9}):
                llm.generate(random_prompts(*lengths), SamplingParams(max_tokens=3, temperature=1.0, **params))
    finally:
        knobs.runtime.jit_cache_hook = None
    assert compiled == []


def test_logprobs_of_mixed_batches(reference: Reference, llm: LLM) -> None:
    """12 prompts of 1 to 700 tokens: chunks beside decodes, then captured decode steps."""
    params = SamplingParams(max_tokens=40, logprobs=0, **GREEDY)
    check(reference, llm.generate(prompts(12), params))


@pytest.mark.parametrize("rows", [1, 12, 40, 64, 90])
def test_logprobs_of_each_way_through_the_linear_layers(
    engines: Engines, checkpoint: Path, reference: Reference, rows: int
) -> None:
    """GEMV, `skinny.cu`, `wide.cu` (17 to 64 rows) and the matrix library, in captured steps of that many rows."""
    llm = engines.get(checkpoint, num_pages=2048, max_num_seqs=96, prefix_cache="off")
    lengths = [3 + 5 * i % 97 for i in range(rows)]
    results = llm.generate(random_prompts(*lengths), SamplingParams(max_tokens=24, logprobs=0, **GREEDY))
    check(reference, results[:: max(1, rows // 16)])  # the reference takes them one by one


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


def test_seeded_sampling_repeats(engines: Engines, checkpoint: Path) -> None:
    """The same request has the same tokens again. (Without the prefix cache: a hit computes other sums, which round.)"""
    llm = engines.get(checkpoint, num_pages=2048, max_num_seqs=96, prefix_cache="off")
    params = SamplingParams(max_tokens=30, temperature=0.5, seed=42, ignore_eos=True)
    prompt = prompts(4)[3]
    first, again, twice = (llm.generate([prompt] * n, params)[-1].token_ids for n in (1, 1, 2))
    other = llm.generate([prompt], replace(params, seed=43))[0].token_ids
    assert first == again
    assert first[:3] == twice[:3], "another batch size may round otherwise, not sample otherwise"
    assert first != other


def test_eager_and_captured_steps_agree(engines: Engines, checkpoint: Path, reference: Reference) -> None:
    tokens = []
    for graphs in ("on", "off"):
        llm = engines.get(checkpoint, cuda_graphs=graphs, num_pages=512, max_num_seqs=16)
        params = SamplingParams(max_tokens=20, logprobs=0, **GREEDY)
        results = llm.generate(prompts(5), params)
        check(reference, results)
        tokens.append([r.token_ids for r in results])
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
