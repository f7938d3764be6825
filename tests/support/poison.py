"""Checkpoints whose numbers overflow on one token, and what other requests must not notice of it."""

from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd_serve.llm import LLM
from spmd_serve.types import FinishReason, SamplingParams

POISON = 5
_GOOD = [[7, 8, 9, 10, 11], [12, 13] * 9, [14] * 3]
_BROKEN = [[POISON, *range(20, 40)], [*_GOOD[1], POISON]]
_PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 3, "min_p": 0.1},
    {"repetition_penalty": 1.2, "logprobs": 2},
    {"max_tokens": 0, "prompt_logprobs": 0},
]


def poison(folder: Path) -> None:
    """Make the embedding of POISON, and nothing else, NaN."""
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for key in weights.keys() & {"model.embed_tokens.weight"}:
            if "lm_head.weight" not in weights:  # a tied one would be broken for all
                weights["lm_head.weight"] = weights[key].clone()
            weights[key][POISON] = torch.nan
        save_file(weights, file, metadata={"format": "pt"})


def check_that_nobody_notices(llm: LLM, tolerance: float, *, caches_nan: bool = True) -> None:
    """Requests with POISON end with an error; those beside and after them are as before, up to `tolerance` of a log-probability.

    llm: with pages for these requests and few more, so that those of the broken ones are used again at once.
    caches_nan: attention reads NaN back from the cache, so that one token breaks those behind it and in its tile, even before it.
    """
    plain = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
    expected = llm.generate(_GOOD, plain)
    for fields in _PARAMS:
        asked = SamplingParams(**({"max_tokens": 12, "temperature": 0.0, "logprobs": 0} | fields))
        results = llm.generate([_GOOD[0], _BROKEN[0], *_GOOD[1:], _BROKEN[1]], [plain, asked, plain, plain, asked])
        if caches_nan:
            broken = [results[1], results[4]]
        else:  # the last token breaks its own row alone, which nobody needs where nothing is sampled
            broken = [results[4]] if asked.max_tokens else []
        for result in broken:
            assert (result.finish_reason, result.token_ids) == (FinishReason.ERROR, [])
            assert all(isfinite(entry.logprob) for entry in result.prompt_logprobs)  # those of chunks before it
            assert "not a number" in result.error
        for beside in ([results[0], *results[2:4]], llm.generate(_GOOD, plain)):
            for got, wanted in zip(beside, expected, strict=True):
                same = 0  # rounding may turn a token, and then all behind it
                while same < 12 and got.token_ids[same] == wanted.token_ids[same]:
                    same += 1
                assert same == 12 or tolerance > 0.01
                for ours, theirs in zip(got.logprobs[:same], wanted.logprobs[:same], strict=True):
                    assert ours.logprob == pytest.approx(theirs.logprob, abs=tolerance)
