"""The kernels' torch references, which are also the CPU path, against the definitions written out."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmd_serve.kernels.activation import gated_activation
from spmd_serve.kernels.decode_attention import decode_attention
from spmd_serve.kernels.gpu import build
from spmd_serve.kernels.gpu.build import launch
from spmd_serve.kernels.linear import Norm, linear
from spmd_serve.kernels.norm import add_rms_norm_, rms_norm
from spmd_serve.kernels.rope_cache import Rotation, rope_and_cache


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def definition_of_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(dtype: torch.dtype) -> None:
    x, residual, scale = torch.randn(3, 2, 40).to(dtype), torch.randn(3, 2, 40).to(dtype), torch.randn(40).to(dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    expected = definition_of_norm(x.double(), scale.double(), 1e-3)
    torch.testing.assert_close(rms_norm(x, scale, 1e-3).double(), expected, **tolerance)
    total = (residual.float() + x.float()).to(dtype)
    got, summed = add_rms_norm_(x, residual, scale, 1e-3)
    assert summed is residual
    assert torch.equal(summed, total)
    torch.testing.assert_close(got, rms_norm(total, scale, 1e-3))


def test_gated_activation() -> None:
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    both = torch.cat((gate, up), dim=-1)
    torch.testing.assert_close(gated_activation(both, "silu"), gate / (1 + (-gate).exp()) * up)
    gelu = gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(gated_activation(both, "gelu_tanh"), gelu * up)


@pytest.mark.parametrize("biased", [False, True])
def test_linear(biased: bool) -> None:
    x, weight, scale = torch.randn(3, 8), torch.randn(10, 8), torch.randn(8)
    bias = torch.randn(10) if biased else None
    product = x @ weight.T + (0 if bias is None else bias)
    torch.testing.assert_close(linear(x, weight, bias=bias), product)
    residual = torch.randn(3, 10)
    expected = residual + product
    got = linear(x, weight, bias=bias, residual=residual)
    assert got is residual
    torch.testing.assert_close(got, expected)
    after = torch.randn(10)
    got = linear(x, weight, bias=bias, residual=residual, following=Norm(after, 1e-5))
    torch.testing.assert_close(residual, expected + product)
    torch.testing.assert_close(got, definition_of_norm(expected + product, after, 1e-5))
    normed = definition_of_norm(x, scale, 1e-5) @ weight.T + (0 if bias is None else bias)
    gated = torch.nn.functional.silu(normed[:, :5]) * normed[:, 5:]
    got = linear(x, weight, bias=bias, norm=Norm(scale, 1e-5), activation="silu")
    torch.testing.assert_close(got, gated, rtol=1e-4, atol=1e-4)


def test_rope_and_cache_rotates_pairs_and_skips_padding() -> None:
    q_heads, kv_heads, head_dim, half = 3, 1, 8, 2  # the last 4 features of a head are not rotated
    qkv = torch.randn(3, (q_heads + 2 * kv_heads) * head_dim)
    positions, locations = torch.tensor([2, 0, 1]), torch.tensor([5, -1, 0])
    angles = torch.randn(4, half)
    table = torch.stack((angles.cos(), angles.sin()), dim=1)
    k_cache, v_cache = torch.zeros(3, 2, kv_heads, head_dim), torch.zeros(3, 2, kv_heads, head_dim)
    q = rope_and_cache(qkv, Rotation(positions, table), locations, k_cache, v_cache)
    heads = qkv.view(3, -1, head_dim)
    turn = torch.exp(1j * angles[positions])[:, None]
    pairs = torch.complex(heads[..., :half], heads[..., half : 2 * half]) * turn
    rotated = torch.cat((pairs.real, pairs.imag, heads[..., 2 * half :]), dim=-1)
    torch.testing.assert_close(q, rotated[:, :q_heads])
    flat_k, flat_v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    for row, location in ((0, 5), (2, 0)):
        torch.testing.assert_close(flat_k[location], rotated[row, q_heads : q_heads + kv_heads])
        torch.testing.assert_close(flat_v[location], heads[row, q_heads + kv_heads :])
    assert not flat_k[1:5].any()
    assert not flat_v[1:5].any()


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 2.0)])
def test_decode_attention_is_causal_attention_of_the_last_token(window: int | None, softcap: float | None) -> None:
    length, q_heads, kv_heads, head_dim, page_size = 7, 4, 2, 6, 2
    q = torch.randn(1, q_heads, head_dim)
    k, v = torch.randn(length, kv_heads, head_dim), torch.randn(length, kv_heads, head_dim)
    pages = torch.tensor([[9, 9, 9, 9], [4, 1, 0, 3]], dtype=torch.int32)
    caches = [torch.full((5, page_size, kv_heads, head_dim), torch.nan) for _ in range(2)]
    for t in range(length):
        for cache, values in zip(caches, (k, v), strict=True):
            cache[pages[1, t // page_size], t % page_size] = values[t]
    slots, lengths = torch.tensor([1, 0]), torch.tensor([length, 0])
    got = decode_attention(
        torch.cat((q, q)), *caches, pages, slots, lengths, scale=0.5, window=window, softcap=softcap
    )  # fmt: skip
    first = 0 if window is None else length - window
    for head in range(q_heads):
        scores = k[first:, head // 2] @ q[0, head] * 0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        torch.testing.assert_close(got[0, head], scores.softmax(0) @ v[first:, head // 2])
    assert not got[1].any()  # the padding row


def test_decode_attention_from_the_projection_is_its_parts_in_turn() -> None:
    q_heads, kv_heads, head_dim, page_size = 4, 2, 8, 4
    qkv = torch.randn(2, (q_heads + 2 * kv_heads) * head_dim)
    angles = torch.randn(16, head_dim // 2)
    caches = [torch.randn(8, page_size, kv_heads, head_dim) for _ in range(2)]
    copies = [c.clone() for c in caches]
    table = torch.tensor([[3, 5, 1], [7, 2, 6]], dtype=torch.int32)
    slots, lengths = torch.tensor([1, 0]), torch.tensor([10, 5])
    table_rows = torch.stack((angles.cos(), angles.sin()), dim=1)
    rotation = Rotation(lengths + 3, table_rows, torch.randn(head_dim), torch.randn(head_dim))
    got = decode_attention(qkv, *caches, table, slots, lengths, scale=0.3, rotation=rotation)
    locations = torch.tensor([6 * page_size + 1, 5 * page_size])
    q = rope_and_cache(qkv, rotation, locations, *copies)
    torch.testing.assert_close(got, decode_attention(q, *copies, table, slots, lengths, scale=0.3))
    for cache, copy in zip(caches, copies, strict=True):
        assert torch.equal(cache, copy)


def test_arguments_of_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    calls: list[list[Any]] = []
    answers = [0, -1, 700]

    def kernel(*arguments: Any) -> int:
        calls.append([getattr(argument, "value", argument) for argument in arguments])
        return answers[len(calls) - 1]

    tensor, device = torch.zeros(4), torch.device("cuda", 3)
    assert launch(kernel, device, tensor, None, 5, 0.5, True)
    assert calls[0] == [tensor.data_ptr(), None, 5, 0.5, True, 3, 77]
    assert not launch(kernel, device)  # no kernel for the shape
    with pytest.raises(RuntimeError, match="kernel: CUDA error 700"):
        launch(kernel, device)


def test_a_library_that_is_compiled_needs_no_folder_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image on a read-only file system; here a folder stands where the lock would be written."""
    compiled: list[Path] = []

    def compile_(command: list[str], target: Path) -> None:
        target.touch()
        compiled.append(target)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(build, "_nvcc", lambda: "nvcc")
    monkeypatch.setattr(build, "_compile", compile_)
    monkeypatch.setattr(build.ctypes, "CDLL", str)
    first = build.load_library.__wrapped__("skinny")
    lock = tmp_path / "spmd_serve" / "kernels" / "skinny.lock"
    lock.unlink()
    lock.mkdir()
    assert build.load_library.__wrapped__("skinny") == first == str(compiled[0])
    assert len(compiled) == 1
