"""A model whose numbers overflow on one token: requests with it end with an error, and no other request notices."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import write_family

from spmd_serve.llm import LLM
from spmd_serve.types import FinishReason, SamplingParams

POISON = 5
GOOD = [[7, 8, 9, 10, 11], [12, 13] * 9, [14] * 3]
PARAMS = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 3, "min_p": 0.1},
    {"repetition_penalty": 1.2, "logprobs": 2},
    {"max_tokens": 0, "prompt_logprobs": 0},
]


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 0} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3-moe"])
@pytest.mark.parametrize("options", [("--overlap", "on"), ("--overlap", "off", "--max-batch-tokens", "8")])
def test_neighbours_do_not_notice(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    write_family(name, tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        weights = load_file(file)
        for key in weights.keys() & {"model.embed_tokens.weight"}:
            weights[key][POISON] = torch.nan
            if "lm_head.weight" not in weights:
                weights["lm_head.weight"] = weights[key].nan_to_num()  # that of a tied one would be broken for all
        save_file(weights, file, metadata={"format": "pt"})
    # Few pages, so that those of the broken requests are used again at once.
    pool = ("--page-size", "4", "--num-pages", "24", "--device", "cpu", "--dtype", "float32")
    llm = LLM("--model", str(tmp_path), *pool, *options)
    try:
        expected = [(r.token_ids, [e.logprob for e in r.logprobs]) for r in llm.generate(GOOD, params())]
        for fields in PARAMS:
            first, broken, *others, last = llm.generate(
                [GOOD[0], [POISON, *range(20, 40)], *GOOD[1:], [*GOOD[1], POISON]],
                [params(), params(**fields), *[params()] * 2, params(**fields)],
            )
            assert "not a number" in broken.error and broken.error == last.error
            assert broken.finish_reason is last.finish_reason is FinishReason.ERROR
            assert broken.token_ids == last.token_ids == [] == broken.prompt_logprobs
            for results in ([first, *others], llm.generate(GOOD, params())):
                for result, (tokens, logprobs) in zip(results, expected, strict=True):
                    assert result.token_ids == tokens
                    assert [e.logprob for e in result.logprobs] == pytest.approx(logprobs, abs=1e-4)
    finally:
        llm.close()
