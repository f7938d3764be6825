"""The Triton kernels compile for Hopper, with the shapes and types of served models: no GPU is needed for that.

The interpreter lets pass what the compiler refuses, such as a variable whose type changes in a branch. Calls of kernels stop
after the compilation here. Needs triton, without TRITON_INTERPRET.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("SPMD_TEST_COMPILE") != "1":
    pytest.skip("set SPMD_TEST_COMPILE=1 to compile the kernels", allow_module_level=True)
pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from spmd_serve.kernels.decode_attention import DecodeWorkspace
from spmd_serve.kernels.filters import Filters
from spmd_serve.kernels.fp8 import FP8, Fp8Format, Fp8Weight
from spmd_serve.kernels.gpu import (
    activation,
    decode_attention,
    filters,
    fp8,
    gumbel,
    linear,
    norm,
    rope_cache,
    rows,
    wide,
)
from spmd_serve.kernels.linear import Norm
from spmd_serve.kernels.rope_cache import Rotation

BF16 = torch.bfloat16
SHARED_BYTES = 227 * 1024  # that a block may have
TOKENS = pytest.mark.parametrize("tokens", [1, 8])  # programmatic dependent launch differs


class NoDevice(DriverBase):  # type: ignore[misc]
    """Says that the device is a Hopper GPU, and has none."""

    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """The kernels that a test has had compiled: name and hash."""
    names: list[tuple[str, str]] = []
    launch = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        assert kernel.metadata.shared <= SHARED_BYTES
        names.append((self.__name__, kernel.hash))
        return kernel

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (9, 0))
    triton.runtime.driver.set_active(NoDevice())
    yield names
    assert names


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@TOKENS
def test_norms_and_activations(tokens: int) -> None:
    for size in (1024, 5120):
        x, scale = zeros(tokens, size), zeros(size)
        norm.rms_norm(x, scale, 1e-6)
        norm.add_rms_norm_(x, zeros(tokens, size), scale, 1e-6)
        wide.add_parts_(zeros(4, tokens, size, dtype=torch.float32), None, x, Norm(scale, 1e-6))
        wide.add_parts_(zeros(2, tokens, size, dtype=torch.float32), scale, x, None)
    for kind in ("silu", "gelu_tanh"):
        activation.gated_activation(zeros(tokens, 6144), kind)


@pytest.mark.parametrize(("out_features", "size"), [(4096, 1024), (5120, 17408)])
def test_linear_layers(out_features: int, size: int) -> None:
    x, weight, scale = zeros(1, size), zeros(out_features, size), zeros(size)
    config = linear.gemv_config(out_features, size, gated=False)
    linear.gemv(x, weight, None, scale, 1e-6, None, None, config)
    linear.gemv(x, weight, None, None, 0.0, None, zeros(1, out_features), config)
    linear.gemv(
        x,
        weight,
        zeros(out_features),
        scale,
        1e-6,
        "silu",
        None,
        linear.gemv_config(out_features // 2, size, gated=True),
    )


@TOKENS
def test_rows_and_rotation(tokens: int) -> None:
    slots, table = torch.arange(tokens), torch.zeros(64, dtype=torch.int64)
    lengths = rows.decode_inputs(slots, table, table, table, 63)[2]
    rows.advance_rows_(slots, slots, lengths, table, table, table.view(4, 16))
    rows.lookup(zeros(1000, 1024), slots, 0)
    caches = [zeros(8, 16, 8, 128) for _ in range(2)]
    angles, scale = zeros(4096, 128, dtype=torch.float32).view(2048, 2, 128)[:, :, :64], zeros(128)
    rotation = Rotation(slots, angles.contiguous(), scale, scale)
    rope_cache.rope_and_cache(zeros(tokens, 32 * 128), rotation, slots, *caches)


@TOKENS
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_sampling(tokens: int, dtype: torch.dtype) -> None:
    slots, table = torch.arange(tokens), torch.zeros(tokens)
    logits = zeros(tokens, 151936, dtype=dtype)
    gumbel.gumbel_argmax(logits, table, slots, slots, slots=slots)
    asked = Filters(table, table.int(), table, table)
    filters.lowest_kept(logits[None], asked, slots)
    filters.lowest_kept(zeros(3, tokens, 50656, dtype=dtype), asked, slots)


def test_no_compilation_for_other_rows(compiled: list[tuple[str, str]]) -> None:
    """Steps differ in how many rows they have, and where in its tensors a chunk begins."""
    caches = [zeros(8, 16, 8, 128) for _ in range(2)]
    angles, scale = torch.zeros(2048, 2, 64), zeros(128)
    for count, first in ((8, 0), (7, 1), (32, 3), (31, 2)):
        index, table = torch.arange(first + count)[first:], torch.zeros(64)
        logits = zeros(count, 50257)
        gumbel.gumbel_argmax(logits, table, table.long(), index, slots=index)
        filters.lowest_kept(logits[None], Filters(table, table.int(), table, table), index)
        rows.lookup(zeros(1000, 1024), index, 0)
        rope_cache.rope_and_cache(zeros(count, 32 * 128), Rotation(index, angles, scale, scale), index, *caches)
        norm.rms_norm(zeros(count, 1024), zeros(1024), 1e-6)
        activation.gated_activation(zeros(count, 6144), "silu")
    variants = {name: len({key for other, key in compiled if other == name}) for name, _ in compiled}
    assert variants.pop("_best_of_slices") <= 3  # by how many programs share a row: powers of two
    assert set(variants.values()) == {1}, variants


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(16, 8, 128), (40, 8, 128), (9, 3, 64), (4, 1, 256)])
@pytest.mark.parametrize("count", [1, 64])
def test_decode_attention(count: int, q_heads: int, kv_heads: int, head_dim: int, kv_dtype: torch.dtype) -> None:
    caches = [zeros(8, 16, kv_heads, head_dim, dtype=kv_dtype) for _ in range(2)]
    workspace = DecodeWorkspace(count, q_heads, kv_heads, head_dim, torch.device("cpu"))
    slots, pages = torch.arange(count), torch.zeros(count, 64, dtype=torch.int32)
    scale = zeros(head_dim)
    rotation = Rotation(slots, torch.zeros(1024, 2, head_dim // 2), scale, scale, 1e-6)
    qkv = zeros(count, (q_heads + 2 * kv_heads) * head_dim)
    config = decode_attention.choose_config(count, kv_heads, head_dim)
    decode_attention.decode_attention(qkv, *caches, pages, slots, slots, 0.1, None, None, rotation, workspace, config)
    q = zeros(count, q_heads, head_dim)
    decode_attention.decode_attention(q, *caches, pages, slots, slots, 0.1, 512, 50.0, None, workspace)


@pytest.mark.parametrize("block", [None, 128])
def test_fp8(block: int | None) -> None:
    for gate in (None, "silu"):
        fp8.quantize_rows(zeros(64, 5120), None if gate else zeros(5120), 1e-6, gate)
    weight = Fp8Weight.empty(5120, 1024, Fp8Format(block), torch.device("cpu"))
    config = fp8.gemv_config(1024, gated=False)
    linear.gemv(zeros(1, 1024), weight.values, None, None, 0.0, None, None, config, weight.scales, block)
    fp8.matmul(zeros(64, 1024), weight)
