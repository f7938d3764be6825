"""Rows that are no numbers, on a GPU: they stay so through every kernel, and no other row takes them over."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from support.checkpoints import make_checkpoint
from support.poison import check_that_nobody_notices, poison

from spmd_serve.kernels.fp8 import FP8, Fp8Weight, fp8_linear
from spmd_serve.kernels.linear import Norm, linear
from spmd_serve.llm import LLM

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
@pytest.mark.parametrize("tokens", [2, 8, 16, 24, 40, 64, 100, 300])
@pytest.mark.parametrize("form", ["plain", "norm", "activation"])
def test_linear(weights: str, tokens: int, form: str) -> None:
    torch.manual_seed(0)
    rows, columns = 4096, 1024
    weight = torch.randn(rows, columns, device=DEVICE).bfloat16() / 32
    norm = Norm(torch.rand(columns, device=DEVICE).bfloat16(), 1e-6) if form == "norm" else None
    activation = "silu" if form == "activation" else None

    def run(x: torch.Tensor) -> torch.Tensor:
        if weights == "bfloat16":
            return linear(x, weight, norm=norm, activation=activation)
        quantized = Fp8Weight((weight.float() * 100).to(FP8), torch.full((rows, 1), 0.01, device=DEVICE))
        return fp8_linear(x, quantized, norm=norm, activation=activation)

    x = torch.randn(tokens, columns, device=DEVICE).bfloat16()
    expected = run(x)
    x[1, 700] = torch.nan
    got = run(x)
    others = [i for i in range(tokens) if i != 1]
    assert got[1].isnan().all()
    assert torch.equal(got[others], expected[others])


@pytest.mark.parametrize(
    "options", [("--page-size", "1"), ("--page-size", "16", "--quantization", "fp8", "--kv-dtype", "fp8")], ids=str
)
def test_nobody_notices(options: tuple[str, ...], tmp_path: Path) -> None:
    poison(make_checkpoint(tmp_path, "qwen3"))
    pages = 96 // int(options[1]) + 2
    llm = LLM("--model", str(tmp_path), "--num-pages", str(pages), "--max-num-seqs", "8", "--device", "cuda", *options)
    try:
        # FlashInfer reads FP8's NaN as 480.
        check_that_nobody_notices(llm, tolerance=0.1, caches_nan="--kv-dtype" not in options)
    finally:
        llm.close()
        torch.cuda.empty_cache()
