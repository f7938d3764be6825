"""The engine on a GPU against a float32 reference: transformers on the same weights."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spmd_serve.llm import LLM, Generation
from spmd_serve.types import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def make_checkpoint(folder: Path, family: str) -> Path:
    """A small random model whose logits have some spread, saved in bfloat16."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 1003,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 704,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    config = {
        "llama": lambda: LlamaConfig(**sizes | {"hidden_size": 576}, num_attention_heads=9, num_key_value_heads=3),
        "qwen3": lambda: Qwen3Config(num_attention_heads=16, num_key_value_heads=8, head_dim=128, **sizes),
        "qwen3-wide": lambda: Qwen3Config(num_attention_heads=16, num_key_value_heads=2, head_dim=128, **sizes),
    }[family]()
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.06) if parameter.ndim > 1 else torch.nn.init.uniform_(
            parameter, 0.5, 1.5
        )
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3-wide"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


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


def reference_logprobs(folder: Path, tokens: list[int]) -> tuple[torch.Tensor, float]:
    """transformers' log-probabilities in float32, and how far its own bfloat16 ones are from them at most."""
    from transformers import AutoModelForCausalLM

    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()
        with torch.no_grad():
            found.append(model(torch.tensor([tokens], device="cuda")).logits[0].float().log_softmax(-1).cpu())
    return found[0], float((found[0] - found[1]).abs().max())


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = [1, 700, 17, 64, 255, 256, 257, 33, 5, 129, 300, 2]
    return [torch.randint(3, 1003, (lengths[i % 12],), generator=generator).tolist() for i in range(count)]


def check(folder: Path, result: Generation) -> None:
    """Log-probabilities within bfloat16's error, and no token that the reference finds clearly worse than its best."""
    tokens = result.prompt_ids + result.token_ids
    expected, error = reference_logprobs(folder, tokens)
    first = len(result.prompt_ids) - 1
    for i, (token, entry) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        row = expected[first + i]
        assert abs(entry.logprob - float(row[token])) < 1.5 * error, (i, entry.logprob, float(row[token]))
        assert float(row.max() - row[token]) < 2 * error, "another token than the reference's by more than rounding"
    for i, entry in enumerate(result.prompt_logprobs):
        assert abs(entry.logprob - float(expected[i, tokens[i + 1]])) < 1.5 * error, i


def test_logprobs_of_mixed_batches(checkpoint: Path, llm: LLM) -> None:
    """12 prompts of 1 to 700 tokens: chunks beside decodes, then captured decode steps."""
    params = SamplingParams(max_tokens=40, logprobs=0, **GREEDY)
    for result in llm.generate(prompts(12), params):
        check(checkpoint, result)


def test_prompt_logprobs_and_prefix_hit(checkpoint: Path, llm: LLM) -> None:
    prompt = prompts(2)[1]
    first = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=0, **GREEDY))[0]
    assert len(first.prompt_logprobs) == len(prompt) - 1
    check(checkpoint, first)
    params = SamplingParams(max_tokens=40, logprobs=0, **GREEDY)
    cold, warm = llm.generate([prompt], params)[0], llm.generate([prompt], params)[0]
    assert warm.cached_tokens > 600
    check(checkpoint, cold)
    check(checkpoint, warm)


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


def test_eager_and_captured_steps_agree(checkpoint: Path) -> None:
    tokens = []
    for graphs in ("on", "off"):
        llm = LLM("--model", str(checkpoint), "--cuda-graphs", graphs, "--num-pages", "512", "--max-num-seqs", "16")
        params = SamplingParams(max_tokens=20, logprobs=0, **GREEDY)
        results = llm.generate(prompts(5), params)
        for result in results:
            check(checkpoint, result)
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
