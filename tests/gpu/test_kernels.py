"""The kernels on a GPU, in bfloat16, against float32 references."""

import itertools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from spmd_serve.kernels.activation import gated_activation
from spmd_serve.kernels.decode_attention import DecodeWorkspace, decode_attention_torch
from spmd_serve.kernels.filters import Filters, lowest_kept, lowest_kept_torch
from spmd_serve.kernels.gpu import decode_attention as triton_attention
from spmd_serve.kernels.gpu.few_rows import FewRowsConfig, few_rows_attention
from spmd_serve.kernels.gpu.linear import MmaConfig, mma
from spmd_serve.kernels.gpu.wide import WHOLE_ROOM, WideConfig, add_parts_, wide_linear
from spmd_serve.kernels.gumbel import gumbel_argmax, gumbel_argmax_cpu
from spmd_serve.kernels.linear import Norm, linear
from spmd_serve.kernels.norm import add_rms_norm_, rms_norm
from spmd_serve.kernels.rope_cache import Rotation, rope_and_cache, rope_and_cache_torch
from spmd_serve.types import NOT_A_TOKEN

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def assert_near(got: torch.Tensor, expected: torch.Tensor, limit: float = 6e-3) -> None:
    """Relative error of the whole, in the 2-norm: bf16 rounds to 4e-3 at most, 1.7e-3 on average."""
    assert got.shape == expected.shape
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < limit, f"relative error {error:.2e}"  # NaN fails


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def reference_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * scale.float()


@pytest.mark.parametrize("size", [64, 576, 1024, 5120])
@pytest.mark.parametrize("tokens", [1, 37])
def test_norms(tokens: int, size: int) -> None:
    x, residual, scale = rand(tokens, size), rand(tokens, size), rand(size)
    assert_near(rms_norm(x, scale, 1e-5), reference_norm(x, scale, 1e-5))
    total = residual.float() + x.float()
    got, summed = add_rms_norm_(x, residual, scale, 1e-5)
    assert torch.equal(summed, total.bfloat16())
    assert_near(got, reference_norm(summed, scale, 1e-5))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1536, 3072, 1000])
def test_gated_activation(kind: str, size: int) -> None:
    x = rand(19, 2 * size) * 3
    gate, up = x.float().chunk(2, -1)
    act = torch.nn.functional.silu(gate) if kind == "silu" else tanh_gelu(gate)
    assert_near(gated_activation(x, kind), act * up)


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 16, 33, 64, 100])
@pytest.mark.parametrize(
    ("features", "size"), [(4096, 1024), (1024, 3072), (5120, 5120), (960, 576), (1000, 1544), (17408, 2048)]
)
@pytest.mark.parametrize("form", ["plain", "norm", "gated", "residual"])
def test_linear(form: str, features: int, size: int, tokens: int) -> None:
    x, weight = rand(tokens, size), rand(features, size)
    bias = rand(features) if form in ("plain", "gated") else None
    norm = Norm(rand(size), 1e-5) if form in ("norm", "gated") else None
    residual = rand(tokens, features) * 8 if form == "residual" else None
    wide = x.float() if norm is None else reference_norm(x, norm.scale, norm.eps)
    expected = wide @ weight.float().T
    if bias is not None:
        expected += bias.float()
    if form == "gated":
        gate, up = expected.chunk(2, -1)
        expected = torch.nn.functional.silu(gate) * up
    if residual is not None:
        expected += residual.float()
    activation = "silu" if form == "gated" else None
    got = linear(x, weight, bias=bias, norm=norm, activation=activation, residual=residual)
    assert_near(got, expected, 8e-3)
    assert residual is None or got is residual


@pytest.mark.parametrize("tokens", [2, 8, 11, 16])
@pytest.mark.parametrize(("features", "size"), [(1024, 1024), (96, 3072), (1000, 1056), (54, 416)])
def test_every_way_to_share_a_layer_out(features: int, size: int, tokens: int) -> None:
    """skinny.cu sums over warps and clusters; every combination, so that no edge depends on the one in use."""
    x, scale, residual = rand(tokens, size), rand(size), rand(tokens, features)
    weight, wide = rand(features, size), rand(2 * features, size)
    normed = reference_norm(x, scale, 1e-5)
    gate, up = (normed @ wide.float().T).chunk(2, -1)
    gated = torch.nn.functional.silu(gate) * up
    added = residual.float() + x.float() @ weight.float().T
    ran = 0
    for row_warps, column_warps, splits in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 3, 8)):
        config = MmaConfig(row_warps, column_warps, splits, early=splits % 3)
        got = mma(x, weight, None, None, 0.0, None, residual.clone(), config)
        if got is not None:
            ran += 1
            assert_near(got, added)
        got = mma(x, wide, None, scale, 1e-5, "silu", None, config)
        if got is not None:
            ran += 1
            assert_near(got, gated, 8e-3)
    assert ran > 8


@pytest.mark.parametrize("tokens", [1, 17, 50, 64])
@pytest.mark.parametrize(
    ("features", "size", "activation", "configs"),
    [
        (64, 64, None, [WideConfig(32), WideConfig(64), WideConfig(8)]),
        (4096, 1024, None, [WideConfig(32), WideConfig(64, room=WHOLE_ROOM), WideConfig(32, 4, parts=True)]),
        (
            1024,
            2048,
            None,
            [WideConfig(32, 4, parts=True), WideConfig(40, 3, parts=True), WideConfig(64, 8, parts=True)],
        ),
        (3072, 1024, "silu", [WideConfig(24), WideConfig(30), WideConfig(48)]),
        (17408, 5120, "silu", [WideConfig(128, room=WHOLE_ROOM), WideConfig(66)]),
        (
            5120,
            17408,
            None,
            [WideConfig(40), WideConfig(80, 2, parts=True), WideConfig(128, 4, room=WHOLE_ROOM, parts=True)],
        ),
        (
            5120,
            2560,
            None,
            [WideConfig(40, 2), WideConfig(160, 4, room=WHOLE_ROOM), WideConfig(256, 8, room=WHOLE_ROOM)],
        ),
        (
            8704,
            5120,
            "silu",
            [WideConfig(132, 2, room=WHOLE_ROOM), WideConfig(98, 3, room=WHOLE_ROOM), WideConfig(66, 2)],
        ),
        (5000, 1000, None, [WideConfig(126, room=WHOLE_ROOM), WideConfig(98), WideConfig(90, 3)]),
        (
            1002,
            520,
            "gelu_tanh",
            [WideConfig(54), WideConfig(112, room=WHOLE_ROOM), WideConfig(30, 4), WideConfig(8, 2)],
        ),
    ],
)
def test_wide(features: int, size: int, activation: str | None, configs: list[WideConfig], tokens: int) -> None:
    """Tiles that end beyond the last row or column, rows of a wider matrix, weights one after the other."""
    x = rand(tokens, size + 8)[:, :size]
    halves = 1 if activation is None else 2
    weight, bias = rand(halves * features, size) / size**0.5, rand(halves * features)
    product = x.float() @ weight.float().T
    for config in configs:
        expected = product if config.parts else product + bias.float()
        if activation is not None:
            gate, up = expected.chunk(2, -1)
            function = torch.nn.functional.silu if activation == "silu" else tanh_gelu
            expected = function(gate) * up
        for _ in range(3):
            got = wide_linear(x, weight, bias, activation, config)
            assert got is not None
            assert_near(got.sum(0) if config.parts else got, expected, 4e-3)


@pytest.mark.parametrize("size", [64, 1000, 5120])
def test_parts_with_the_next_norm(size: int) -> None:
    parts, residual, bias, scale = torch.randn(4, 37, size, device=DEVICE), rand(37, size), rand(size), rand(size)
    expected = residual.float() + parts.sum(0) + bias.float()
    kept = residual.clone()
    got = add_parts_(parts, bias, residual, Norm(scale, 1e-5))
    assert_near(residual, expected, 4e-3)
    assert_near(got, reference_norm(residual, scale, 1e-5))
    assert torch.equal(add_parts_(parts, bias, kept, None), residual)


@pytest.mark.parametrize("tokens", [1, 70, 300])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(16, 8, 128), (9, 3, 64), (40, 8, 128), (8, 4, 256), (6, 2, 96)]
)
@pytest.mark.parametrize("rotary", [1.0, 0.5, 0.0])
def test_rope_and_cache(q_heads: int, kv_heads: int, head_dim: int, rotary: float, tokens: int) -> None:
    pages, page_size = 64, 16
    qkv = rand(tokens, (q_heads + 2 * kv_heads) * head_dim)
    positions = torch.randint(0, 500, (tokens,), device=DEVICE)
    locations = torch.randperm(pages * page_size, device=DEVICE)[:tokens]
    locations[::3] = -1
    angles = torch.randn(500, int(head_dim * rotary) // 2, device=DEVICE)
    table = torch.stack((angles.cos(), angles.sin()), dim=1) if rotary else None
    scales = [rand(head_dim) if rotary else None for _ in range(2)]
    caches = [rand(pages, page_size, kv_heads, head_dim) for _ in range(2)]
    copies = [c.clone() for c in caches]
    rotation = Rotation(positions, table, *scales)
    got = rope_and_cache(qkv, rotation, locations, *caches)
    expected = rope_and_cache_torch(qkv, rotation, locations, *copies)
    assert_near(got, expected)
    for cache, copy in zip(caches, copies, strict=True):
        assert_near(cache, copy)
        untouched = torch.ones(pages * page_size, dtype=torch.bool, device=DEVICE)
        untouched[locations[locations >= 0]] = False
        assert torch.equal(cache.flatten(0, 1)[untouched], copy.flatten(0, 1)[untouched])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 151936), (5, 49152), (300, 2000), (3, 1001)])
def test_gumbel_argmax(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(rows, vocab, device=DEVICE) * 2).to(dtype)
    temperature = torch.tensor([0.0, 0.3, 1.0, 0.7, 1.5], device=DEVICE).repeat(rows)[:rows]
    seeds = torch.randint(0, 2**62, (rows,), device=DEVICE)
    positions = torch.randint(0, 100_000, (rows,), device=DEVICE)
    arguments = (logits, temperature, seeds, positions)
    values, index = gumbel_argmax(*arguments, 77)
    expected_values, expected_index = gumbel_argmax_cpu(*(a.cpu() for a in arguments), 77)
    torch.testing.assert_close(values.cpu(), expected_values, rtol=1e-5, atol=1e-4)
    # The same noise: another token only where the best two are closer than the logarithms' rounding.
    assert (index.cpu() == expected_index).float().mean() > 0.99
    middle = vocab // 3
    parts = [
        gumbel_argmax(logits[:, :middle], *arguments[1:], 77),
        gumbel_argmax(logits[:, middle:], *arguments[1:], 77 + middle),
    ]
    winner = torch.stack([p[0] for p in parts]).argmax(0)
    assert torch.equal(torch.stack([p[1] for p in parts]).gather(0, winner[None])[0], index)


def test_gumbel_argmax_of_what_is_no_number() -> None:
    logits = torch.randn(6, 151_936, device=DEVICE)
    logits[0, 150_000] = logits[1, 40] = torch.nan
    logits[2, 1025] = logits[3, 7] = torch.inf
    table = torch.tensor([0.0, 0.7] * 3, device=DEVICE), *[torch.arange(6, device=DEVICE)] * 2
    _, index = gumbel_argmax(logits, *table)
    _, expected = gumbel_argmax_cpu(logits.cpu(), *(t.cpu() for t in table))
    assert index.tolist() == expected.tolist() and index.tolist().count(NOT_A_TOKEN) == 4


def test_gumbel_draws_follow_the_softmax() -> None:
    draws = 200_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf, 1.5, 0.3], device=DEVICE)
    expected = torch.softmax(logits.double() / 0.7, -1).cpu() * draws
    counter = torch.arange(draws, device=DEVICE)
    temperature = torch.full((draws,), 0.7, device=DEVICE)
    _, index = gumbel_argmax(logits.expand(draws, -1).contiguous(), temperature, torch.zeros_like(counter) + 5, counter)
    counts = torch.bincount(index, minlength=7).double().cpu()
    alive = expected > 0
    assert counts[4] == 0
    assert ((counts - expected)[alive] ** 2 / expected[alive]).sum() < 25.0  # 5 degrees of freedom: p = 1.4e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [1, 2])
def test_lowest_kept(ranks: int, dtype: torch.dtype) -> None:
    """Against sorting, over a whole vocabulary; a sum in float32 may miss the border by a token."""
    cases = list(itertools.product((0, 1, 20, 10**6), (1.0, 0.95, 0.5), (0.0, 0.05), (0.0, 0.6, 1.5)))
    columns = [torch.tensor(column, device=DEVICE) for column in zip(*cases, strict=True)]
    filters = Filters(columns[3], columns[0].int(), columns[1], columns[2])
    slots = torch.arange(len(cases), device=DEVICE)
    logits = (torch.randn(len(cases), 151936, device=DEVICE) * 4).to(dtype)
    parts = torch.stack(logits.chunk(ranks, dim=1))
    got, expected = lowest_kept(parts, filters, slots), lowest_kept_torch(parts, filters, slots)
    kept, wanted = ((logits >= lowest[:, None]).sum(dim=1) for lowest in (got, expected))
    ties = (logits == expected[:, None]).sum(dim=1)
    assert ((kept - wanted).abs() <= 1 + 1e-4 * wanted + ties).all()
    counted = (columns[1] == 1) & (columns[2] == 0)
    assert torch.equal(kept[counted], wanted[counted])


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(16, 8, 128), (9, 3, 64), (40, 8, 128), (8, 1, 64), (8, 4, 256)]
)
@pytest.mark.parametrize("fused", [False, True])
def test_decode_attention(fused: bool, q_heads: int, kv_heads: int, head_dim: int, page_size: int, rows: int) -> None:
    for window, softcap, longest in ((None, None, 1500), (256, 30.0, 700)):
        if softcap is not None and page_size != 16:
            continue
        lengths = torch.randint(1, longest, (rows,), device=DEVICE)
        lengths[0] = longest
        if rows > 2:
            lengths[1], lengths[2] = 0, 1
        needed = -(-lengths // page_size)
        pages = torch.randperm(int(needed.sum()) + 3, device=DEVICE, dtype=torch.int32)
        slots = torch.randperm(rows + 2, device=DEVICE)[:rows]
        table = torch.full((rows + 2, int(needed.max()) + 4), 2**30, dtype=torch.int32, device=DEVICE)
        start = 0
        for slot, count in zip(slots.tolist(), needed.tolist(), strict=True):
            table[slot, :count] = pages[start : start + count]
            start += count
        caches = [rand(len(pages), page_size, kv_heads, head_dim) for _ in range(2)]
        caches[1][pages[start:].long()] = torch.nan
        copies = [c.clone() for c in caches]
        rotation = None
        q = rand(rows, q_heads, head_dim)
        if fused:
            angles = torch.randn(2000, head_dim // 2, device=DEVICE)
            table_rows = torch.stack((angles.cos(), angles.sin()), dim=1)
            rotation = Rotation((lengths - 1).clamp(min=0), table_rows, rand(head_dim), rand(head_dim))
            q = rand(rows, (q_heads + 2 * kv_heads) * head_dim)
        workspace = DecodeWorkspace(rows, q_heads, kv_heads, head_dim, DEVICE)
        scale = head_dim**-0.5
        wide = [c.float() for c in copies]
        arguments = (table, slots, lengths, scale, window, softcap, rotation)
        expected = decode_attention_torch(q.float(), *wide, *arguments)
        # By the kernel that fits, and twice by the one for all rows: the second run finds the counters as the first one left them.
        for config in (None, *[triton_attention.choose_config(rows, kv_heads, head_dim)] * 2):
            mine = [c.clone() for c in copies]
            got = triton_attention.decode_attention(q, *mine, *arguments, workspace, config)
            assert_near(got, expected, 1e-2)
            assert not workspace.arrived.any()
            assert not got[lengths == 0].any()
            for cache, copy in zip(mine, wide, strict=True):
                assert_near(cache.nan_to_num(), copy.nan_to_num())


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 6, 8])
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(16, 8, 128), (40, 8, 128), (9, 3, 64), (8, 1, 128)])
def test_every_way_to_share_few_rows_out(q_heads: int, kv_heads: int, head_dim: int, warps: int, splits: int) -> None:
    rows = 9
    lengths = torch.tensor([1, 0, 700, 17, 2, 16, 33, 3000, 5], device=DEVICE)
    angles = torch.randn(4000, head_dim // 2, device=DEVICE)
    tables = torch.stack((angles.cos(), angles.sin()), dim=1), None
    scales = (rand(head_dim), rand(head_dim)), (None, None)
    for page_size, window, softcap, rope_table, (q_scale, k_scale) in (
        (16, None, None, tables[0], scales[0]), (7, 37, None, tables[0], scales[1]), (1, None, 20.0, None, scales[0]),
    ):  # fmt: skip
        most = -(-3000 // page_size)
        table = torch.randperm(rows * most, device=DEVICE).int().view(rows, most)
        caches = [rand(rows * most, page_size, kv_heads, head_dim) for _ in range(2)]
        copies = [c.clone() for c in caches]
        rotation = Rotation((lengths - 1).clamp(min=0), rope_table, q_scale, k_scale)
        qkv = rand(rows, (q_heads + 2 * kv_heads) * head_dim)
        out = rand(rows, q_heads, head_dim)
        arguments = (table, torch.randperm(rows, device=DEVICE), lengths, head_dim**-0.5, window, softcap, rotation)
        assert few_rows_attention(qkv, *caches, *arguments, out, FewRowsConfig(splits, warps))
        assert_near(out, decode_attention_torch(qkv, *copies, *arguments))
        for cache, copy in zip(caches, copies, strict=True):
            assert_near(cache, copy)
