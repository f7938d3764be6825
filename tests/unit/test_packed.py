"""Packed weights give what plain ones give, and stay plain where they cannot be packed."""

import platform
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from spmd_serve.distributed.collectives import Communicator
from spmd_serve.kernels import packed
from spmd_serve.kernels.linear import Norm, linear
from spmd_serve.layers.embedding import Embedding
from spmd_serve.layers.linear import Linear

CPU = torch.device("cpu")
assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-3)  # sums of up to 576 products of about 1
x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="weights are packed on x86 alone")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@x86
@pytest.mark.parametrize("tokens", [0, 1, 2, 16, 33, 300])
@pytest.mark.parametrize("shape", [(960, 576), (211, 48), (5, 3), (1, 7)])
def test_packed_equals_plain(tokens: int, shape: tuple[int, int]) -> None:
    x, weight, bias = random(tokens, shape[1]), random(*shape), random(shape[0])
    order = packed.pack(weight)
    assert order.is_mkldnn
    assert order.shape == weight.shape
    assert_close(packed.packed_linear(x, order, None), F.linear(x, weight))
    assert_close(packed.packed_linear(x, order, bias), F.linear(x, weight, bias))


@x86
def test_packed_weight_with_all_that_stands_around_a_linear_layer() -> None:
    x, weight, bias, stream = random(3, 48), random(80, 48), random(80), random(3, 80)
    norm = Norm(random(48), 1e-5)
    for options in ({}, {"bias": bias}, {"norm": norm}, {"activation": "silu", "bias": bias}):
        assert_close(linear(x, packed.pack(weight), **options), linear(x, weight, **options))
    for options in ({"norm": norm}, {"bias": bias}):
        expected, into = linear(x, weight, residual=stream.clone(), **options), stream.clone()
        assert linear(x, packed.pack(weight), residual=into, **options) is into
        assert_close(into, expected)


@x86
def test_rows_of_a_strided_input() -> None:
    x, weight = random(4, 96)[:, 16:64], random(32, 48)
    assert_close(packed.packed_linear(x, packed.pack(weight), None), F.linear(x, weight))


@pytest.mark.parametrize("shape", [(0, 32), (32, 0)])
def test_a_rank_that_owns_nothing(shape: tuple[int, int]) -> None:
    layer = Linear(shape[1], shape[0], dtype=torch.float32, device=CPU)
    layer.pack()
    assert torch.equal(layer(random(2, shape[1])), torch.zeros(2, shape[0]))


@pytest.fixture
def no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU like most: it computes in float32 only."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)


@x86
@pytest.mark.usefixtures("no_bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
def test_sixteen_bit_weights_where_the_cpu_computes_in_float32(dtype: torch.dtype, tokens: int) -> None:
    assert packed.is_fast(dtype)
    assert packed.activation_dtype(dtype, CPU) == torch.float32
    x, weight, bias = random(tokens, 576), random(211, 576).to(dtype), random(211).to(dtype)
    weight[:7] *= 1e-5  # bfloat16 goes below what float16 has
    half = packed.pack(weight)
    assert isinstance(half, packed.HalfWeight)
    exact = F.linear(x, weight.float())
    for found, expected in (
        (linear(x, half), exact),
        (linear(x, half, bias=bias), exact + bias),
        (linear(x, half, residual=bias.float().expand(tokens, -1).clone()), exact + bias),
    ):
        assert_close(found, expected)


@x86
@pytest.mark.usefixtures("no_bfloat16")
def test_weights_that_float16_does_not_hold_are_widened() -> None:
    x, weight = random(3, 48), random(80, 48).bfloat16()
    weight[3, 3] = 1e5
    wide = packed.pack(weight)
    assert isinstance(wide, Tensor)
    torch.testing.assert_close(linear(x, wide), F.linear(x, weight.float()))


def test_builds_without_packing_leave_weights_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    for weight in (random(8, 8), random(8, 8).bfloat16()):
        assert packed.pack(weight) is weight
        assert packed.activation_dtype(weight.dtype, CPU) == weight.dtype


@x86
def test_a_tied_head_leaves_the_rows_for_lookups() -> None:
    table = Embedding(range(64), 16, dtype=torch.float32, device=CPU, comm=Communicator())
    table.weight.copy_(random(64, 16))
    head = Linear(16, 64, dtype=torch.float32, device=CPU)
    head.weight = table.weight
    head.pack()
    tokens = torch.tensor([3, 63])
    assert torch.equal(table(tokens), random(64, 16)[tokens])
    assert_close(head(random(2, 16)), F.linear(random(2, 16), table.weight))
