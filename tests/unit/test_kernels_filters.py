"""The threshold of top-k, top-p and min-p, by sorting and by the GPU's search, against the definition."""

import itertools
import os

import pytest
import torch
from torch import Tensor

from spmd_serve.kernels.filters import Filters, lowest_kept_torch

CASES = list(itertools.product((0, 1, 20, 10**6), (1.0, 0.9, 1e-6), (0.0, 0.05), (0.0, 0.7, 3.0)))


def tables(cases: list[tuple[int, float, float, float]]) -> Filters:
    top_k, top_p, min_p, temperature = zip(*cases, strict=True)
    return Filters(
        torch.tensor(temperature), torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p), torch.tensor(min_p)
    )


def kept_by_definition(row: Tensor, case: tuple[int, float, float, float]) -> tuple[Tensor, float]:
    """Which tokens are kept, and how near a sum was to top_p (relative)."""
    top_k, top_p, min_p, temperature = case
    if temperature == 0:
        return torch.ones(len(row), dtype=torch.bool), 1.0
    row = row.double()
    order = row.argsort(descending=True, stable=True)[: top_k or None]
    probabilities = (row[order] / temperature).softmax(0)
    better = probabilities.cumsum(0) - probabilities
    keep = ((better < top_p) | (top_p >= 1)) & (probabilities >= min_p * probabilities[0] * (1 - 1e-12))
    keep[0] = True
    return row >= row[order[keep]].min(), float((better / top_p - 1).abs().min()) if top_p < 1 else 1.0


def logits_of_all_kinds(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    logits = (
        torch.randn(rows, width, generator=generator) * torch.tensor([0.01, 1.0, 4.0, 30.0]).repeat(rows)[:rows, None]
    )
    logits[1::7] -= 100.0
    logits[2::7] = logits[2::7].round()  # many ties
    logits[3::7, ::3] = float("-inf")
    logits[4::7] = 1.5
    return logits.to(dtype)


def check(lowest: Tensor, logits: Tensor) -> None:
    near = 0
    for row, case in enumerate(CASES):
        kept, distance = kept_by_definition(logits[row], case)
        got = logits[row].float() >= lowest[row]
        near += distance < 1e-5
        assert torch.equal(kept, got) or distance < 1e-5, (row, case, int(kept.sum()), int(got.sum()))
    assert near < len(CASES) / 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sorting(dtype: torch.dtype) -> None:
    logits = logits_of_all_kinds(len(CASES), 500, dtype)
    slots = torch.arange(len(CASES)).flip(0)
    lowest = lowest_kept_torch(logits.unsqueeze(0), tables(CASES[::-1]), slots)
    check(lowest, logits)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the interpreter's
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(), reason="needs Triton")
@pytest.mark.parametrize("block", [32, 512])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_searching(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, ranks: int, block: int) -> None:
    """Lanes of 10 logits, whose four best are mostly but not always enough; and lanes that know all of theirs."""
    pytest.importorskip("triton")
    from spmd_serve.kernels.gpu import filters as gpu

    monkeypatch.setattr(gpu, "BLOCK", block)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = logits_of_all_kinds(len(CASES), 301, dtype)
    parts = torch.nn.functional.pad(logits, (0, -301 % ranks), value=float("-inf"))
    parts = torch.stack(parts.chunk(ranks, dim=1)).to(device)
    filters = Filters(**{name: table.to(device) for name, table in vars(tables(CASES[::-1])).items()})
    slots = torch.arange(len(CASES), device=device).flip(0)
    check(gpu.lowest_kept(parts, filters, slots).cpu(), logits)
