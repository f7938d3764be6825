"""Linear layers over FP8 weights on a GPU, against float32 over the dequantised weights."""

import itertools
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from spmd_serve.kernels.fp8 import FP8, Fp8Weight, fp8_linear
from spmd_serve.kernels.gpu import fp8 as gpu
from spmd_serve.kernels.linear import Norm

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
LARGE = [(7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)]
HALVES = [(3584, 5120), (5120, 2560), (17408, 5120), (5120, 8704)]
SMALL = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
ODD = [(1000, 1040), (54, 416), (1712, 2064), (16, 16), (32, 48)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def make_weight(rows: int, columns: int, block: int | None = None) -> Fp8Weight:
    values = (torch.randn(rows, columns, device=DEVICE) * 60).clamp_(-440, 440).to(FP8)
    blocks = 1 if block is None else -(-columns // block)
    scales = torch.logspace(-1, 1, rows, device=DEVICE)[:, None] * (0.5 + torch.rand(rows, blocks, device=DEVICE))
    return Fp8Weight(values, scales / columns**0.5 / 60, block)


def make_tokens(tokens: int, columns: int) -> torch.Tensor:
    """Rows of a wider matrix, of very different sizes."""
    return (
        torch.randn(tokens, columns + 8, device=DEVICE) * torch.logspace(-3, 3, tokens, device=DEVICE)[:, None]
    ).bfloat16()[:, :columns]


def assert_near(got: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """Of each row the relative error, in the 2-norm."""
    assert got.shape == expected.shape and got.dtype == torch.bfloat16
    error = ((got.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1)).max()
    assert error < limit, f"relative error {error:.2e}"  # NaN fails


def normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    x = x.float()
    return x if norm is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.scale.float()


def gated(both: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = both.float().chunk(2, -1)
    act = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    return act * up


def forms(tokens: int, rows: int, columns: int) -> list[dict[str, Any]]:
    norm = Norm(rand(columns), 1e-5)
    return [
        {"bias": rand(rows)},
        {"norm": norm},
        {"norm": norm, "activation": "silu", "bias": rand(rows)},
        {"activation": "gelu_tanh"},
        {"residual": rand(tokens, rows), "bias": rand(rows)},
    ]


def reference(x: torch.Tensor, plain: torch.Tensor, form: dict[str, Any]) -> torch.Tensor:
    out = normed(x, form.get("norm")) @ plain.T
    if "bias" in form:
        out += form["bias"].float()
    if "activation" in form:
        return gated(out, form["activation"])
    return out + form["residual"].float() if "residual" in form else out


def stream(
    x: torch.Tensor, weight: Fp8Weight, form: dict[str, Any], config: gpu.StreamConfig | None = None
) -> torch.Tensor | None:
    norm, residual = form.get("norm"), form.get("residual")
    scale, eps = (None, 0.0) if norm is None else (norm.scale, norm.eps)
    residual = None if residual is None else residual.clone()
    return gpu.stream(x, weight, form.get("bias"), scale, eps, form.get("activation"), residual, config)


@pytest.mark.parametrize("shape", LARGE + HALVES + SMALL + ODD, ids=str)
def test_few_tokens(shape: tuple[int, int]) -> None:
    weight = make_weight(*shape)
    plain = weight.dequantize(torch.float32)
    for tokens in (1, 2, 5, 8, 11, 16):
        x = make_tokens(tokens, shape[1])
        for form in forms(tokens, *shape):
            got = stream(x, weight, form)
            assert got is not None
            assert_near(got, reference(x, plain, form), 8e-3)
            again = stream(x, weight, form)
            assert again is not None and torch.equal(got, again)


@pytest.mark.parametrize("shape", [(7168, 5120), (5120, 17408), (1000, 1040), (54, 416)], ids=str)
def test_few_tokens_and_scales_of_blocks(shape: tuple[int, int]) -> None:
    weight = make_weight(*shape, block=128)
    plain = weight.dequantize(torch.float32)
    for tokens in (1, 8, 16):
        x = make_tokens(tokens, shape[1])
        for form in forms(tokens, *shape):
            got = stream(x, weight, form)
            assert got is not None
            assert_near(got, reference(x, plain, form), 8e-3)


def test_every_configuration() -> None:
    ran = 0
    for shape in ((1000, 1040), (520, 8704)):
        weight = make_weight(*shape)
        plain = weight.dequantize(torch.float32)
        for tokens in (1, 16):
            x = make_tokens(tokens, shape[1])
            for form in forms(tokens, *shape):
                expected = reference(x, plain, form)
                for choice in itertools.product((4, 8, 16), (4, 5, 6, 8), (1, 2, 4), (0, 1, 2)):
                    got = stream(x, weight, form, gpu.StreamConfig(*choice))
                    if got is not None:
                        ran += 1
                        assert_near(got, expected, 8e-3)
    assert ran > 1000


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_layers_that_overlap(tokens: int) -> None:
    """In a CUDA graph, kernels start before the ones whose results they need have ended."""
    hidden, inner, layers = 2048, 6144, 6
    norm = Norm(rand(hidden), 1e-6)
    weights = [(make_weight(2 * inner, hidden), make_weight(hidden, inner)) for _ in range(layers)]
    x = rand(tokens, hidden)

    def run(h: torch.Tensor, *, wait: bool) -> torch.Tensor:
        for up, down in weights:
            middle = fp8_linear(h, up, norm=norm, activation="silu")
            if wait:
                torch.cuda.synchronize()
            h = fp8_linear(middle, down, residual=h)
            if wait:
                torch.cuda.synchronize()
        return h

    expected = run(x.clone(), wait=True)
    state = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(state, wait=False)
    for _ in range(20):
        state.copy_(x)
        graph.replay()
        assert torch.equal(state, expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize("size", [416, 1024, 5120, 8704, 17408])
@pytest.mark.parametrize("form", ["plain", "norm", "silu", "gelu_tanh"])
def test_quantize_rows(form: str, size: int) -> None:
    gate = form if form in ("silu", "gelu_tanh") else None
    x = make_tokens(19, size if gate is None else 2 * size)
    x[3] = 0
    norm = Norm(rand(size), 1e-6) if form == "norm" else None
    values, scales = gpu.quantize_rows(x, None if norm is None else norm.scale, 1e-6, gate)
    expected = gated(x, gate) if gate is not None else normed(x, norm)
    largest = expected.abs().amax(1, keepdim=True).clamp(min=1e-12)
    torch.testing.assert_close(scales, largest / 448, rtol=1e-5, atol=0.0)
    wanted = (expected / scales).clamp(-448, 448).to(FP8)
    # The values' bits without the sign count FP8's numbers from zero up.
    steps = (values.view(torch.uint8).int() & 127) - (wanted.view(torch.uint8).int() & 127)
    assert steps.abs().max() <= 1
    assert (steps != 0).float().mean() < 1e-3
    assert not ((values.float() * wanted.float()) < 0).any()


@pytest.mark.parametrize("tokens", [33, 300])
@pytest.mark.parametrize("shape", [(7168, 5120), (5120, 17408), (1008, 1040)], ids=str)
def test_many_tokens(tokens: int, shape: tuple[int, int]) -> None:
    """FP8 activations: near what the rounded ones give, and as far from the unrounded ones as three bits are."""
    weight = make_weight(*shape)
    plain = weight.dequantize(torch.float32)
    x = make_tokens(tokens, shape[1])
    for form in forms(tokens, *shape):
        kept = form | ({"residual": form["residual"].clone()} if "residual" in form else {})
        got = fp8_linear(x, weight, **kept)
        values, scales = gpu.quantize_rows(normed(x, form.get("norm")).bfloat16())
        rounded = reference(values.float() * scales, plain, {k: v for k, v in form.items() if k != "norm"})
        if "norm" not in form:
            assert_near(got, rounded, 1.2e-2)
        assert_near(got, reference(x, plain, form), 0.08)
        if "residual" in form:
            assert got is kept["residual"]


def test_gate_before_many_tokens() -> None:
    weight = make_weight(1024, 3072)
    x = rand(70, 6144)
    residual = rand(70, 1024)
    expected = residual.float() + gated(x, "silu") @ weight.dequantize(torch.float32).T
    assert_near(fp8_linear(x, weight, gate="silu", residual=residual.clone()), expected, 0.08)
    few = fp8_linear(x[:5], weight, gate="silu", residual=residual[:5].clone())
    assert_near(few, expected[:5], 1.2e-2)  # the activation's result is rounded to bf16 here


@pytest.mark.parametrize("tokens", [3, 70])
def test_scales_of_small_blocks(tokens: int) -> None:
    """No kernel of fp8_stream.cu, nor torch._scaled_mm: the product in bf16."""
    weight = make_weight(1000, 1040, block=64)
    x = make_tokens(tokens, 1040)
    plain = weight.dequantize(torch.float32)
    for form in forms(tokens, 1000, 1040):
        kept = form | ({"residual": form["residual"].clone()} if "residual" in form else {})
        assert_near(fp8_linear(x, weight, **kept), reference(x, plain, form), 1.2e-2)
