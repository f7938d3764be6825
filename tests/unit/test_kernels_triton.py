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

from spmd_serve.kernels.activation import gated_activation_torch
from spmd_serve.kernels.gpu import activation, gumbel, norm, rope_cache
from spmd_serve.kernels.gumbel import gumbel_argmax_cpu
from spmd_serve.kernels.norm import add_rms_norm_torch_, rms_norm_torch
from spmd_serve.kernels.rope_cache import rope_and_cache_torch

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
    caches = [torch.randn(pages, page_size, kv_heads, head_dim, generator=rng).to(dtype) for _ in range(2)]
    copies = [c.clone() for c in caches]
    got = rope_cache.rope_and_cache(qkv, positions, locations, *caches, table, *scales, 1e-6)
    expected = rope_and_cache_torch(qkv, positions, locations, *copies, table, *scales, 1e-6)
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
