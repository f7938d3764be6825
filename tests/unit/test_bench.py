"""The benchmarks' arithmetic: workloads, floors, reports. Nothing is measured here."""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from spmd_serve.bench.__main__ import benchmarks, main
from spmd_serve.bench.offline import chosen_workload, make_parser, report_of
from spmd_serve.bench.roofline import Device, costs_of, floor_seconds
from spmd_serve.bench.workloads import Workload, decode, make_workload, offline_256, parse_range
from spmd_serve.kernels.packed import activation_dtype
from spmd_serve.llm import Generation
from spmd_serve.models.model_config import LayerSpec, ModelConfig, MoEConfig

QWEN3_06B = ModelConfig(
    "Qwen3ForCausalLM", 151936, 1024, 28, 16, 8, 128, 3072, 40960, (LayerSpec(),) * 28, tie_embeddings=True
)
H200 = Device(bandwidth=4.23e12, flops=792e12)


def rate(workload: Workload, model: ModelConfig = QWEN3_06B, device: Device = H200, rows: int = 256) -> float:
    return workload.output_tokens / floor_seconds(workload, model, costs_of(model, 2, 2), device, rows)


def test_offline_256_is_the_published_one() -> None:
    workload = offline_256()
    assert (workload.prompt_tokens, workload.output_tokens) == (142_827, 133_966)
    assert len(workload.lengths) == 256
    prompts = workload.prompts(0)
    assert [len(prompt) for prompt in prompts] == [prompt for prompt, _ in workload.lengths]
    assert prompts == workload.prompts(0)
    assert prompts != workload.prompts(1)


def test_weights_of_a_model_whose_size_is_known() -> None:
    costs = costs_of(QWEN3_06B, 2, 2)
    assert costs.weights_read(1) == pytest.approx(2 * 596e6, rel=0.002)  # 0.6B, the embedding counted once, as the head
    assert costs.kv_read(1) == 2 * 28 * 8 * 128 * 2
    head = 151_936 * 1024
    assert costs_of(QWEN3_06B, 2, 2, fp8=True).weights_read(1) == pytest.approx((596e6 - head) + 2 * head, rel=0.002)


@pytest.mark.parametrize(
    ("workload", "expected"),  # estimated by hand for a card with 4.23 TB/s and 792 TFLOP/s
    [(offline_256(), 35_800), (decode(1), 3_420), (decode(8), 21_800), (decode(64), 66_300)],
    ids=lambda value: value.name if isinstance(value, Workload) else "",
)
def test_floors_agree_with_an_estimate_by_hand(workload: Workload, expected: float) -> None:
    assert rate(workload) == pytest.approx(expected, rel=0.02)


def test_fewer_rows_and_slower_devices_are_slower() -> None:
    workload = make_workload("w", 32, (100, 200), (50, 100))
    assert rate(workload, rows=8) < rate(workload)
    assert rate(workload, device=Device(H200.bandwidth / 2, H200.flops)) < rate(workload)
    assert rate(workload, device=Device(H200.bandwidth, H200.flops / 1000)) < rate(workload)


def test_a_window_bounds_the_kv_that_is_read() -> None:
    layers = (LayerSpec(window=100), LayerSpec())
    costs = costs_of(replace(QWEN3_06B, num_layers=2, layers=layers), 2, 2)
    entry = 2 * 8 * 128 * 2
    assert costs.kv_read(50) == 2 * 50 * entry
    assert costs.kv_read(1000) == (100 + 1000) * entry


def test_more_tokens_hit_more_experts() -> None:
    moe = MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=512)
    costs = costs_of(replace(QWEN3_06B, moe=moe, layers=(LayerSpec(moe=True),) * 28), 2, 2)
    one_expert = 3 * 1024 * 512 * 28
    assert costs.weights_read(1) == 2 * (costs.shared_weights + 2 * one_expert)
    assert costs.weights_read(1) < costs.weights_read(4) < 2 * (costs.shared_weights + 8 * one_expert)
    assert costs.weights_read(1000) == pytest.approx(2 * (costs.shared_weights + 8 * one_expert))


def test_options_choose_the_workload() -> None:
    def chosen(*options: str) -> Workload:
        return chosen_workload(make_parser().parse_args(options))

    assert chosen() == offline_256()
    assert chosen("--batch-size", "4") == decode(4)
    assert chosen("--batch-size", "2", "--output-tokens", "9").lengths == ((128, 9), (128, 9))
    assert chosen("--requests", "3", "--prompt-tokens", "5", "--output-tokens", "7").lengths == ((5, 7),) * 3
    assert parse_range("100,1024") == (100, 1024)
    for text in ("", "0", "9,3", "a,b"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_range(text)


@pytest.mark.parametrize(
    "options",
    [
        "offline --batch-size 0",
        "serve --streams 0",
        "trace --steps x",
        "offline --repeat -1",
        "control_plane --ranks a",
    ],
)
def test_counts_are_one_or_more(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(options.split())
    assert "is not a number of 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("options", ["roofline --bandwidth 0", "roofline --tflops nan"])
def test_rates_are_above_0(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(options.split())
    assert "is not a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("options", ["serve --temperature nan", "serve --dummy-rate -1", "scheduler --cached-pages -5"])
def test_numbers_that_may_be_0(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(options.split())
    assert "of 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(benchmarks()))
def test_no_option_is_abbreviated(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As of the server, whose own options the benchmarks take too."""
    with suppress(SystemExit):
        main([name, "--hel", "--peer", "p"])
    out, error = capsys.readouterr()
    assert out == "" and "unrecognized arguments: --hel" in error


def test_the_report_of_a_run() -> None:
    results = [Generation([1], [5, 6, 7], [10.1, 10.2, 10.4]), Generation([1], [8, 9], [10.3, 10.4])]
    report = report_of(Workload("w", ((1, 3), (1, 2))), results, began=10.0, wall=0.5)
    assert report["output_tokens"] == 5
    assert report["output_tokens_per_s"] == 10.0
    assert report["ttft_p99_ms"] == pytest.approx(300)
    assert report["inter_token_p99_ms"] == pytest.approx(200)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["offline", "--no-such-option"], "--no-such-option"),
        (["offline", "--batch-size", "1", "--top-p", "5"], "top_p must be"),
        (["offline", "--model", "/no/such"], "--model /no/such"),
        (["serve", "--url", "http://127.0.0.1:1"], "--url http://127.0.0.1:1 cannot be reached"),
        (["compare", "--peer", "/no/such/program"], "--peer /no/such/program is no program"),
        (["serve", "--url", "https://localhost:8000"], "the clients speak no TLS"),
        (["trace", "--output", "/no/such/trace.json"], "--output: /no/such/trace.json cannot be written"),
        (["serve", "--url", "localhost"], "such as http://127.0.0.1:8000"),
        (["serve", "--url", "http://127.0.0.1:1", "--ranks", "1"], "--ranks has no effect on --url"),
        (["serve", "--dummy-engine", "--url", "http://127.0.0.1:1"], "--url has no effect on --dummy-engine"),
        (["serve", "--frontend", "process"], "--frontend has no effect on a server to start (it takes --server-args)"),
        (["offline", "--batch-size", "2", "--requests", "9"], "--batch-size is for requests of equal length"),
        (["offline", "--batch-size", "2", "--prompt-tokens", "5,9"], "LOW,HIGH do without it"),
    ],
)
def test_what_a_user_gave_wrongly_is_one_line(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith("spmd_serve.bench: error: ") and says in error and error.count("\n") == 1


def test_ranks_on_cpus_share_one_memory(capsys: pytest.CaptureFixture[str]) -> None:
    floors = []
    for ranks in ("1", "2"):
        assert main(f"roofline --device cpu --bandwidth 50 --tflops 1 --json --ranks {ranks}".split()) == 0
        floors.append(capsys.readouterr().out)
    assert floors[0] == floors[1]


def test_the_floor_counts_kv_in_the_type_that_is_computed_in(capsys: pytest.CaptureFixture[str]) -> None:
    """Which is float32 where a CPU has no arithmetic for the weights' 16 bits."""
    assert main(["roofline", "--device", "cpu", "--dtype", "float16", "--bandwidth", "50", "--tflops", "1"]) == 0
    size = activation_dtype(torch.float16, torch.device("cpu")).itemsize
    assert f"{2 * 30 * 3 * 64 * size} bytes of KV a token" in capsys.readouterr().out


def test_the_common_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"offline", "serve", "scheduler", "roofline"} <= benchmarks().keys()
    assert all(benchmarks().values()), "each says what it measures"
    assert main(["--help"]) == 0
    assert "roofline" in capsys.readouterr().out
    assert main(["no-such"]) == 2
    assert "there is no benchmark 'no-such'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["offline", "--help"])
    assert "--batch-size" in capsys.readouterr().out
