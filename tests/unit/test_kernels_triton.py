"""The Triton kernels on the CPU, through Triton's interpreter, against their torch references.

    TRITON_INTERPRET=1 pytest tests/unit/test_kernels_triton.py

The variable must be set before Triton is imported (torch imports it), hence not here. Needs triton, and numpy < 2.4.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("set TRITON_INTERPRET=1 to run the kernels in Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton")

from spmd_serve.kernels import rows as reference
from spmd_serve.kernels.activation import gated_activation_torch
from spmd_serve.kernels.decode_attention import DecodeWorkspace, decode_attention_torch
from spmd_serve.kernels.fp8 import FP8, Fp8Format, Fp8Weight, fp8_linear_torch
from spmd_serve.kernels.gpu import (
    activation,
    decode_attention,
    few_rows,
    fp8,
    gumbel,
    linear,
    norm,
    rope_cache,
    rows,
    wide,
)
from spmd_serve.kernels.gumbel import gumbel_argmax_cpu
from spmd_serve.kernels.linear import Norm, linear_torch
from spmd_serve.kernels.norm import add_rms_norm_torch_, rms_norm_torch
from spmd_serve.kernels.rope_cache import Rotation, rope_and_cache_torch
from spmd_serve.types import NOT_A_TOKEN

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")  # the interpreter's
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype
    if a.dtype == torch.float32:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(a, b, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576])
def test_norms(size: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    x, residual = (torch.randn(3, size, generator=rng).to(dtype) for _ in range(2))
    scale = torch.randn(size, generator=rng).to(dtype)
    close(norm.rms_norm(x, scale, 1e-5), rms_norm_torch(x, scale, 1e-5))
    close(
        norm.rms_norm(x.view(3, 2, -1), scale[: size // 2], 1e-5),
        rms_norm_torch(x.view(3, 2, -1), scale[: size // 2], 1e-5),
    )
    kept = residual.clone()
    got, summed = norm.add_rms_norm_(x, residual, scale, 1e-5)
    expected, expected_sum = add_rms_norm_torch_(x, kept, scale, 1e-5)
    assert summed is residual
    close(got, expected)
    close(summed, expected_sum)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation(kind: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    gate_up = (torch.randn(3, 2 * 1030, generator=rng) * 4).to(dtype)
    close(activation.gated_activation(gate_up, kind), gated_activation_torch(gate_up, kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "rotary"), [(3, 1, 64, 64), (4, 2, 96, 32), (2, 2, 16, None)]
)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_cache(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary: int | None,
    normed: bool,
    dtype: torch.dtype,
    rng: torch.Generator,
) -> None:
    tokens, pages, page_size = 5, 4, 3
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim, generator=rng).to(dtype)
    positions = torch.tensor([0, 7, 3, 19, 2])
    locations = torch.tensor([4, -1, 11, 0, -1])
    angles = torch.randn(20, (rotary or 2) // 2, generator=rng)
    table = None if rotary is None else torch.stack((angles.cos(), angles.sin()), dim=1)
    scales = [torch.randn(head_dim, generator=rng).to(dtype) if normed else None for _ in range(2)]
    rotation = Rotation(positions, table, *scales)
    caches = [torch.randn(pages, page_size, kv_heads, head_dim, generator=rng).to(dtype) for _ in range(2)]
    copies = [c.clone() for c in caches]
    got = rope_cache.rope_and_cache(qkv, rotation, locations, *caches)
    expected = rope_and_cache_torch(qkv, rotation, locations, *copies)
    close(got, expected)
    for cache, copy in zip(caches, copies, strict=True):
        close(cache, copy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [100, 5001])
def test_gumbel_argmax(vocab: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    logits = torch.randn(6, vocab, generator=rng).to(dtype)
    logits[1, [40, 77]] = 9.0
    logits[2, 10:] = -torch.inf
    temperature = torch.tensor([0.0, 0.0, 0.7, 1.0, 0.01, 1.5])
    seeds = torch.tensor([0, 1, 2**63 - 1, 7, 8, 9])
    positions = torch.tensor([5, 6, 2**31, 0, 1, 2])
    values, index = gumbel.gumbel_argmax(logits, temperature, seeds, positions, 1000)
    expected_values, expected_index = gumbel_argmax_cpu(logits, temperature, seeds, positions, 1000)
    assert index.tolist() == expected_index.tolist()
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5)


def test_gumbel_argmax_of_what_is_no_number(rng: torch.Generator) -> None:
    logits = torch.randn(6, 5001, generator=rng)
    logits[0, 5000] = logits[1, 40] = torch.nan
    logits[2, 1025] = logits[3, 7] = torch.inf
    logits[4, 9] = -torch.inf
    table = torch.tensor([0.0, 0.7] * 3), torch.arange(6), torch.arange(6)
    got = gumbel.gumbel_argmax(logits, *table, 1000)
    expected = gumbel_argmax_cpu(logits, *table, 1000)
    assert got[1].tolist() == expected[1].tolist() and got[1].tolist().count(NOT_A_TOKEN) == 4
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)


def test_gumbel_argmax_of_rows_of_a_table(rng: torch.Generator) -> None:
    logits = torch.randn(3, 500, generator=rng)
    temperature, seeds = torch.rand(8, generator=rng), torch.arange(8) * 77
    slots, positions = torch.tensor([5, 0, 7]), torch.tensor([3, 3, 4])
    got = gumbel.gumbel_argmax(logits, temperature, seeds, positions, slots=slots)
    expected = gumbel_argmax_cpu(logits, temperature[slots], seeds[slots], positions)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [64, 576, 1500])
@pytest.mark.parametrize("first", [0, 40])
def test_lookup(first: int, width: int, rng: torch.Generator) -> None:
    table = torch.randn(30, width, generator=rng).bfloat16()
    index = torch.tensor([first, first + 29, first + 30, 3, first + 7, 0])
    expected = torch.stack([table[i - first] if 0 <= i - first < 30 else torch.zeros(width).bfloat16() for i in index])
    assert torch.equal(rows.lookup(table, index, first), expected)


def test_rows_advance_and_leave_their_tokens_for_the_host() -> None:
    """Two steps of the same rows in another order, and padding: the second overwrites nothing of the first."""
    last_token, length = torch.tensor([10, 11, 12, 13, 0]), torch.tensor([5, 8, 3, 7, 0])
    rope_offset = torch.tensor([100, 0, 0, 200, 0])
    drawn = torch.full((4, 5), -1)
    for step, slots in enumerate((torch.tensor([2, 0, 4]), torch.tensor([0, 2, 4]))):
        expected = [tensor.clone() for tensor in (last_token, length, drawn)]
        tokens, positions, lengths = rows.decode_inputs(slots, last_token, length, rope_offset, 4)
        assert tokens.tolist() == last_token[slots].tolist()
        assert positions.tolist() == (length + rope_offset)[slots].tolist()
        assert lengths.tolist() == [int(length[i]) + 1 for i in slots[:2]] + [0]
        new = 100 * (step + 1) + slots
        reference.advance_rows_(slots, new, lengths, *expected)
        rows.advance_rows_(slots, new, lengths, last_token, length, drawn)
        for got, wanted in zip((last_token, length, drawn), expected, strict=True):
            assert torch.equal(got, wanted)
    assert [int(drawn[n % 4, slot]) for n, slot in ((6, 0), (7, 0), (4, 2), (5, 2))] == [100, 200, 102, 202]


@pytest.mark.parametrize(
    "config", [linear.GemvConfig(4, 64, 4, static=True), linear.GemvConfig(2, 32, 4, static=False)]
)
@pytest.mark.parametrize(("features", "size"), [(64, 128), (54, 72)])
@pytest.mark.parametrize("form", ["plain", "norm", "gated", "residual"])
@pytest.mark.parametrize("biased", [False, True])
def test_gemv(
    config: linear.GemvConfig, features: int, size: int, form: str, biased: bool, rng: torch.Generator
) -> None:
    x = torch.randn(1, size, generator=rng)
    weight = torch.randn(features, size, generator=rng) / 8
    bias = torch.randn(features, generator=rng) if biased else None
    scale = torch.randn(size, generator=rng) if form in ("norm", "gated") else None
    activation = "silu" if form == "gated" else None
    residual = torch.randn(1, features, generator=rng) if form == "residual" else None
    copy = None if residual is None else residual.clone()
    expected = linear_torch(x, weight, bias, None if scale is None else Norm(scale, 1e-5), activation, copy)
    got = linear.gemv(x, weight, bias, scale, 1e-5, activation, residual, config)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert residual is None or got is residual


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 32), (5, 1, 24)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, 5.0)])
@pytest.mark.parametrize("fused", [False, True])
def test_decode_attention(
    splits: int, q_heads: int, kv_heads: int, head_dim: int, window: int | None, softcap: float | None, fused: bool,
    rng: torch.Generator,
) -> None:  # fmt: skip
    page_size, num_pages, max_pages = 4, 80, 30
    lengths = torch.tensor([1, 0, 33, 117, 64])
    rows = len(lengths)
    slots = torch.tensor([5, 0, 2, 3, 1])
    table = torch.full((6, max_pages), 10**6, dtype=torch.int32)
    free = torch.randperm(num_pages, generator=rng).int()
    used = 0
    for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
        need = -(-length // page_size)
        table[slot, :need] = free[used : used + need]
        used += need
    caches = [torch.randn(num_pages, page_size, kv_heads, head_dim, generator=rng) for _ in range(2)]
    caches[1][free[used:]] = torch.nan  # never read
    copies = [c.clone() for c in caches]
    rotation = None
    q = torch.randn(rows, q_heads, head_dim, generator=rng)
    if fused:
        angles = torch.randn(200, head_dim // 4, generator=rng)
        scales = [torch.randn(head_dim, generator=rng) for _ in range(2)]
        positions = (lengths - 1).clamp(min=0) + 60 * (
            slots % 2
        )  # rows of the table, of which each row may have others
        rotation = Rotation(positions, torch.stack((angles.cos(), angles.sin()), dim=1), *scales, 1e-6)
        q = torch.randn(rows, (q_heads + 2 * kv_heads) * head_dim, generator=rng)
    workspace = DecodeWorkspace(rows, q_heads, kv_heads, head_dim, torch.device("cpu"))
    slices, block = (2, 16) if splits == 2 else (1, 32)
    config = decode_attention.DecodeConfig(slices, block, warps=slices, stages=2, splits=splits, ahead=splits > 2)
    arguments = (table, slots, lengths, 0.3, window, softcap, rotation)
    got = decode_attention.decode_attention(q, *caches, *arguments, workspace, config)
    expected = decode_attention_torch(q, *copies, *arguments)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert not workspace.arrived.any()
    for cache, copy in zip(caches, copies, strict=True):
        torch.testing.assert_close(cache, copy, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("block", [None, 16])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("form", ["plain", "norm", "gated", "residual"])
def test_fp8_linear(form: str, tokens: int, block: int | None, rng: torch.Generator) -> None:
    size, features = 72, 54
    x = torch.randn(tokens, size, generator=rng)
    weight = Fp8Weight.empty(features, size, Fp8Format(block), torch.device("cpu"))
    weight.quantize_(torch.randn(features, size, generator=rng) / 8)
    bias = torch.randn(features, generator=rng)
    scale = torch.randn(size, generator=rng) if form in ("norm", "gated") else None
    activation = "silu" if form == "gated" else None
    residual = torch.randn(tokens, features, generator=rng) if form == "residual" else None
    copy = None if residual is None else residual.clone()
    expected = fp8_linear_torch(x, weight, bias, None if scale is None else Norm(scale, 1e-5), activation, copy)
    got = fp8.fp8_linear(x, weight, bias, scale, 1e-5, activation, residual, None)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert residual is None or got is residual


def test_fp8_gemv_static(rng: torch.Generator) -> None:
    x = torch.randn(1, 72, generator=rng)
    for block in (None, 16):
        weight = Fp8Weight.empty(54, 72, Fp8Format(block), torch.device("cpu"))
        weight.quantize_(torch.randn(54, 72, generator=rng))
        for config in (linear.GemvConfig(4, 64, 4, static=True), linear.GemvConfig(2, 32, 4, static=False)):
            arguments = (weight.values, None, None, 0.0, "gelu_tanh", None, config, weight.scales, block)
            expected = fp8_linear_torch(x, weight, None, None, "gelu_tanh", None)
            torch.testing.assert_close(linear.gemv(x, *arguments), expected, rtol=1e-4, atol=1e-4)


def test_scaled_mm(rng: torch.Generator) -> None:
    x = torch.randn(70, 64, generator=rng).bfloat16()
    weight = Fp8Weight.empty(32, 64, Fp8Format(), torch.device("cpu"))
    weight.quantize_(torch.randn(32, 64, generator=rng))
    expected = x.float() @ weight.dequantize(torch.float32).T
    error = (fp8.scaled_mm(x, weight).float() - expected).norm() / expected.norm()
    assert error < 0.06  # rounding the activations to three bits costs 0.03; Triton's interpreter loses some carries


@pytest.mark.parametrize("form", ["plain", "norm", "silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [72, 1300])
def test_quantize_rows(form: str, size: int, rng: torch.Generator) -> None:
    width = size if form in ("plain", "norm") else 2 * size
    wide = torch.randn(5, width + 24, generator=rng) * torch.tensor([1.0, 1e-3, 50.0, 0.0, 1.0])[:, None]
    x = wide.bfloat16()[:, :width]
    scale = torch.rand(size, generator=rng).bfloat16() if form == "norm" else None
    gate = form if width > size else None
    values, scales = fp8.quantize_rows(x, scale, 1e-6, gate)
    expected = x.float() if scale is None else rms_norm_torch(x.float(), scale.float(), 1e-6)
    if gate is not None:
        expected = gated_activation_torch(expected, gate)
    assert values.dtype == FP8 and values.shape == expected.shape and scales.shape == (5, 1)
    torch.testing.assert_close(scales[:, 0], expected.abs().amax(1).clamp(min=1e-12) / 448, rtol=1e-5, atol=0.0)
    assert torch.equal(values.float().abs().amax(1), torch.tensor([448.0, 448.0, 448.0, 0.0, 448.0]))
    off = (values.float() * scales - expected).abs() > expected.abs() / 15 + scales / 100
    assert off.float().mean() < 0.05  # the interpreter loses some carries; tests/gpu has the card's rounding


@pytest.mark.parametrize("form", ["plain", "norm", "silu"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_quantize_rows_keeps_what_is_no_number(form: str, value: float, rng: torch.Generator) -> None:
    """FP8 has no infinity, and a cut to its range makes a number of NaN: the token's scale is NaN, and so all that it gives."""
    x = torch.randn(3, 600 if form == "silu" else 300, generator=rng).bfloat16()
    x[1, 271] = value
    scale = torch.rand(300, generator=rng).bfloat16() if form == "norm" else None
    _, scales = fp8.quantize_rows(x, scale, 1e-6, form if form == "silu" else None)
    assert scales[:, 0].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("fused", [False, True])
def test_decode_attention_over_fp8(fused: bool, rng: torch.Generator) -> None:
    q_heads, kv_heads, head_dim, page_size = 4, 2, 16, 4
    lengths, slots = torch.tensor([9, 30]), torch.tensor([1, 0])
    table = torch.randperm(16, generator=rng).int().view(2, 8)
    caches = [torch.randn(16, page_size, kv_heads, head_dim, generator=rng).to(FP8) for _ in range(2)]
    copies = [c.clone() for c in caches]
    angles = torch.randn(40, head_dim // 2, generator=rng)
    rotation = Rotation(lengths - 1, torch.stack((angles.cos(), angles.sin()), dim=1)) if fused else None
    heads = q_heads + 2 * kv_heads if fused else q_heads
    q = torch.randn(2, heads * head_dim, generator=rng)
    q = q if fused else q.view(2, q_heads, head_dim)
    workspace = DecodeWorkspace(2, q_heads, kv_heads, head_dim, torch.device("cpu"))
    config = decode_attention.DecodeConfig(1, 16, warps=1, stages=1, splits=2)
    arguments = (table, slots, lengths, 0.3, None, None, rotation)
    got = decode_attention.decode_attention(q, *caches, *arguments, workspace, config)
    expected = decode_attention_torch(q, *copies, *arguments)
    # The row's own key and value are used before they are rounded for the cache.
    torch.testing.assert_close(got, expected, rtol=0.05 if fused else 1e-4, atol=0.05 if fused else 1e-4)
    for cache, copy in zip(caches, copies, strict=True):
        # The interpreter's rounding to FP8 loses a carry now and then.
        assert ((cache.float() - copy.float()).abs() > 0.13 * copy.float().abs()).float().mean() < 0.005


def test_parts_with_the_next_norm(rng: torch.Generator) -> None:
    parts, residual = torch.randn(3, 17, 120, generator=rng), torch.randn(17, 120, generator=rng)
    scale, bias = torch.rand(120, generator=rng), torch.randn(120, generator=rng)
    kept, added = residual.clone(), residual.clone()
    got = wide.add_parts_(parts, bias, residual, Norm(scale, 1e-6))
    expected, total = add_rms_norm_torch_(parts.sum(0) + bias, kept, scale, 1e-6)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(residual, total, rtol=1e-4, atol=1e-4)
    assert wide.add_parts_(parts, bias, added, None) is added
    torch.testing.assert_close(added, total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_a_wide_layer_is_shared_out_whole(gated: bool, added: bool) -> None:
    taken = 0
    for features in (132, 134, 576, 1024, 3072, 4096, 5120, 17_408, 20_000):
        for columns in (64, 136, 576, 1024, 4096, 5120, 17_408):
            config = linear.wide_config(40, features * (1 + gated), columns, gated=gated, added=added)
            if config is None:
                continue
            taken += 1
            blocks = -(-features // config.rows) * config.splits
            assert blocks <= 2 * (linear.MULTIPROCESSORS + config.splits) and config.rows % 2 == 0
            assert config.rows <= (wide.WIDE_GATED_ROWS if gated else wide.WIDE_ROWS)
            assert config.splits == 1 or columns // config.splits >= 128
    assert taken > 10
    assert linear.wide_config(16, 2048, 1024, gated=False, added=added) is None
    assert linear.wide_config(65, 2048, 1024, gated=False, added=added) is None


def test_few_rows_run_at_once() -> None:
    """A second wave of blocks takes as long as the first."""
    for kv_heads in (1, 2, 3, 4, 8, 16, 32):
        for count in range(1, few_rows.MAX_HEADS // kv_heads + 1):
            config = few_rows.few_rows_config(count, kv_heads)
            assert config is not None and 2 <= config.splits <= 8
            blocks = count * kv_heads * config.splits
            assert blocks <= (64 if config.warps == 8 else 256)
            assert blocks >= 48 or config.splits == 8
        assert few_rows.few_rows_config(few_rows.MAX_HEADS // kv_heads + 1, kv_heads) is None


def test_a_layer_with_a_norm_before_it_is_wide_where_that_pays() -> None:
    """Qwen3-14B's on two ranks, and 0.6B's: with sums over ranks the norm is no part of the kernel before."""
    for out_features, gated in ((17_408, True), (3584, False)):
        config = linear.wide_config(64, out_features, 5120, gated=gated, added=False, normed=True)
        assert config is not None
        assert config.rows * 2 * linear.MULTIPROCESSORS // config.splits >= out_features // (1 + gated)
    assert linear.wide_config(64, 6144, 1024, gated=True, added=False, normed=True) is None
