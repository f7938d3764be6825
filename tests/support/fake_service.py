"""The real frontend over a dummy engine that parrots: the HTTP API without a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import httpx
import openai

from spmd_serve.bench.dummy_core import DummyCore
from spmd_serve.config import Config, ModelOptions
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.frontend.server import Frontend, start_frontend
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.models.resolve import resolve_model
from spmd_serve.types import Lengths, ModelInfo, Request, ServiceState

EOS = 2
VOCAB = 49152
CONTEXT = 8192
MODEL = "parrot"
_TURN, _END = 1, 2  # <|im_start|>, <|im_end|>


@cache
def model_folder() -> Path:
    """The bundled model's folder; its tokenizer is what these tests use."""
    return resolve_model(ModelOptions(), RankInfo())


@cache
def bundled_tokenizer() -> TextTokenizer:
    """The frontend's tokenizer over that folder."""
    return TextTokenizer(model_folder(), VOCAB)


def parrot(request: Request) -> Iterator[int]:
    """Says the prompt again, then EOS, and so on; of a chat, its last message."""
    ids = request.prompt_ids().tolist()
    if ids[0] == _TURN and _TURN in ids[1:]:
        turns = [i for i, token in enumerate(ids) if token == _TURN]
        turn = ids[turns[-2] :]
        ids = turn[3 : turn.index(_END)]  # after <|im_start|>, the role and a line break
    return itertools.cycle([*ids, EOS])


@dataclass
class FakeService:
    """A frontend and its dummy engine."""

    frontend: Frontend
    core: DummyCore

    @property
    def url(self) -> str:
        return self.frontend.url

    @cached_property
    def http(self) -> httpx.Client:
        """A plain client (one for all: each makes a TLS context)."""
        return httpx.Client(base_url=self.url, timeout=20)

    @cached_property
    def client(self) -> openai.OpenAI:
        """The official client, without retries."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    def metric(self, name: str) -> float:
        """One number of /metrics."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"there is no metric {name}")

    def close(self) -> None:
        for name in ("client", "http"):
            if name in self.__dict__:
                getattr(self, name).close()
        self.core.stop()
        self.frontend.stop(1.0)


def start_fake(
    config: Config | None = None,
    script: Callable[[Request], Iterator[int]] = parrot,
    *,
    step_interval: float = 0.0,
    max_running: int = 256,
    ready: bool = True,
    info: ModelInfo | None = None,
) -> FakeService:
    """A running FakeService on a free port."""
    config = config or Config()
    config = replace(config, server=replace(config.server, port=0))
    frontend = start_frontend(config, info or fake_info())
    core = DummyCore(
        frontend.link,
        script,
        eos=(EOS,),
        vocab_size=VOCAB,
        max_running=max_running,
        step_interval=step_interval,
    )
    if ready:
        frontend.link.set_state(ServiceState.READY)
    core.start()
    return FakeService(frontend, core)


def fake_info(**changes: object) -> ModelInfo:
    """What the frontend knows of the parrot."""
    info = ModelInfo(MODEL, str(model_folder()), Lengths(CONTEXT, CONTEXT), VOCAB, (EOS,), created=1_700_000_000)
    return replace(info, **changes)  # type: ignore[arg-type]
