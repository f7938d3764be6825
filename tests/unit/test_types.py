"""Sampling parameters that no frontend has checked."""

from typing import Any

import pytest

from spmd_serve.types import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("min_tokens", 11),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),
        ("logprobs", -1),
        ("logprobs", True),
        ("logprobs", 51),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 51),
        ("stop_token_ids", (50,)),
        ("stop_token_ids", (1.0,)),
        ("logit_bias", ((50, 1.0),)),
        ("logit_bias", ((5, float("nan")),)),
        ("logit_bias", ((5, 1e30),)),
        ("grammar", 5),
    ],
)
def test_the_field_at_fault_is_named(name: str, value: Any) -> None:
    assert SamplingParams(**{"max_tokens": 10} | {name: value}).problem(50).startswith(f"{name} must be ")


def test_ordinary_values_are_no_problem() -> None:
    assert SamplingParams(10).problem(50) == ""
    assert SamplingParams(0, prompt_logprobs=1).problem(50) == ""
    everything = SamplingParams(
        max_tokens=10,
        temperature=0.0,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        seed=2**63 - 1,
        stop_token_ids=(49,),
        ignore_eos=True,
        min_tokens=10,
        presence_penalty=2.0,
        frequency_penalty=-2.0,
        repetition_penalty=1.2,
        logit_bias=((0, -5.0),),
        logprobs=0,
        prompt_logprobs=3,
    )
    assert everything.problem(50) == ""
    assert "ids from 0 to 49" in SamplingParams(10, logit_bias=((50, 1.0),)).problem(50)


@pytest.mark.parametrize("temperature", [1e-6, 1e-39, 5e-324])
def test_a_temperature_that_would_overflow_logits_is_greedy(temperature: float) -> None:
    params = SamplingParams(10, temperature, top_k=5)
    assert params.temperature == 0.0
    assert not params.is_filtered
    assert SamplingParams(10, 1e-5).temperature == 1e-5
