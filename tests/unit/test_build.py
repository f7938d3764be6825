"""What "auto" becomes: decisions that depend on the model and the device."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from support.models import TINY_LLAMA

from spmd_serve.attention.base import make_backend
from spmd_serve.config import Config
from spmd_serve.engine.build import resolve_config
from spmd_serve.errors import ConfigError
from spmd_serve.models.model_config import ModelConfig, MoEConfig

MODEL = dataclasses.replace(TINY_LLAMA, head_dim=128, dtype="bfloat16")
MIXTURE = dataclasses.replace(MODEL, moe=MoEConfig(8, 2, 64, True))
ODD_HEADS = dataclasses.replace(MODEL, head_dim=96)
GPU = torch.device("cuda", 0)


def resolved(
    model: ModelConfig, device: torch.device = GPU, attention: str = "auto", dtype: str = "auto"
) -> tuple[str, bool]:
    """Attention backend, and whether decode steps are captured."""
    config = Config()
    config = dataclasses.replace(
        config,
        engine=dataclasses.replace(config.engine, attention=attention),
        model=dataclasses.replace(config.model, dtype=dtype),
    )
    engine = resolve_config(config, model, device).engine
    return engine.attention, engine.cuda_graphs


@pytest.fixture(params=[(9, 0), (8, 0)], ids=["hopper", "ampere"])
def is_hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    return bool(request.param[0] == 9)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("flashinfer")
def test_attention_and_graphs_on_a_gpu(is_hopper: bool) -> None:
    assert resolved(MODEL) == ("flashinfer", True)
    assert resolved(MODEL, attention="torch") == ("torch", False), "its steps look at lengths on the host"
    assert resolved(MIXTURE) == ("flashinfer", is_hopper), "elsewhere the grouped product waits for the device"
    assert resolved(MIXTURE, dtype="float16") == ("flashinfer", False)


def test_heads_that_flashinfer_does_not_know() -> None:
    assert resolved(ODD_HEADS) == ("torch", False)
    with pytest.raises(ConfigError, match=r"heads of 96.*--attention torch"):
        resolved(ODD_HEADS, attention="flashinfer")


def test_flashinfer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for attention in ("auto", "flashinfer"):
        with pytest.raises(ConfigError, match=r"not installed; run `pip install flashinfer-python`, or .*torch"):
            resolved(MODEL, attention=attention)
    assert resolved(MODEL, attention="torch") == resolved(ODD_HEADS) == ("torch", False)


def test_a_cpu_has_torch_attention_and_no_graphs() -> None:
    assert resolved(MODEL, torch.device("cpu")) == resolved(ODD_HEADS, torch.device("cpu")) == ("torch", False)
    with pytest.raises(ConfigError, match="--attention flashinfer needs an NVIDIA GPU"):
        resolved(MODEL, torch.device("cpu"), attention="flashinfer")


def test_a_backend_that_nobody_makes_is_not_replaced() -> None:
    with pytest.raises(AssertionError, match="no attention backend mine"):
        make_backend("mine", torch.device("cpu"))
