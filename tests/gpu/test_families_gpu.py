"""Every kind of model on a GPU against transformers in float32: prefill whole and in chunks, decoding captured and eager.

With SPMD_TEST_DEVICE=cpu the same tests run on a CPU.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from support.checkpoints import make_checkpoint, random_prompts
from support.rounding import Reference, check

from spmd_serve.llm import LLM
from spmd_serve.types import SamplingParams

DEVICE = os.environ.get("SPMD_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device"),
]

# name -> (kind of checkpoint, the server's options, what the reference rounds)
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, bool]]] = {
    kind: (kind, (), {})
    for kind in (
        "gemma2",
        "gemma3",
        "olmo2",
        "qwen3-moe",
        "mixtral",
        "mistral",
        "phi3",
        "qwen2",
        "llama-untied",
        "llama-odd-heads",
    )
} | {
    "fp8 weights": ("llama", ("--quantization", "fp8"), {"fp8_weights": True}),
    "fp8 kv": ("llama", ("--kv-dtype", "fp8"), {"fp8_kv": True}),
}
PROMPTS = random_prompts(1, 700, 17, 64, 255, 257, 5, 130)
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SCORED = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)


@dataclass(frozen=True)
class Case:
    options: tuple[str, ...]
    reference: Reference


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    kind, options, rounds = CASES[request.param]
    folder = make_checkpoint(tmp_path_factory.mktemp(kind), kind)
    yield Case(("--model", str(folder), *options), Reference(folder, DEVICE, **rounds))
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def open_llm(*options: str) -> LLM:
    sizes = ("--page-size", "16", "--num-pages", "1024", "--max-num-seqs", "10", "--max-model-len", "1024")
    return LLM("--device", DEVICE, *sizes, *options)


def test_chunked_prefill_and_captured_decoding(case: Case) -> None:
    """Chunks of at most 256 tokens beside decoding rows; then decoding alone, in CUDA graphs where the model allows it."""
    llm = open_llm(*case.options, "--max-batch-tokens", "256")
    check(case.reference, llm.generate(PROMPTS, SCORED))
    check(case.reference, llm.generate(PROMPTS, PARAMS))  # sampled in the graph too
    llm.close()


def test_whole_prefill_and_eager_decoding(case: Case) -> None:
    llm = open_llm(*case.options, "--max-batch-tokens", "2048", "--cuda-graphs", "off")
    check(case.reference, llm.generate(PROMPTS, SCORED))
    llm.close()
