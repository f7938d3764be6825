"""From a Config to a scheduler and a runner with loaded weights: what the server and the offline API build alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from spmd_serve.config import Config, resolved
from spmd_serve.distributed.collectives import Communicator
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.engine.build import build_runner, count_pages, pick_device, resolve_config
from spmd_serve.engine.model_runner import ModelRunner
from spmd_serve.models.model_config import ModelConfig
from spmd_serve.models.registry import load_model_config
from spmd_serve.models.resolve import resolve_model
from spmd_serve.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class Plan:
    """What is known before anything is loaded. `config` has no "auto" left."""

    config: Config
    model: ModelConfig
    folder: Path
    device: torch.device

    @property
    def tokenizer_folder(self) -> Path:
        """Where tokenizer and chat template are."""
        return Path(self.config.model.tokenizer or self.folder)


@dataclass(frozen=True)
class Assembly:
    """What a rank runs."""

    plan: Plan
    runner: ModelRunner
    scheduler: Scheduler
    num_pages: int


def make_plan(config: Config, ranks: RankInfo) -> Plan:
    """Find the model and resolve the options. One rank per host may download or convert.

    Raises:
        ModelError, ConfigError: what the user gave cannot be served.
    """
    folder = resolve_model(config.model, ranks)
    model = load_model_config(folder)
    device = pick_device(config.engine.device, ranks.local_rank)
    return Plan(resolve_config(config, model, device), model, folder, device)


def assemble(plan: Plan, ranks: RankInfo) -> Assembly:
    """Load the weights, size and allocate the KV pool, capture graphs. Collective."""
    config, model = plan.config, plan.model
    comm = Communicator.create(ranks, plan.device, config.control.control_timeout)
    runner = build_runner(config, model, plan.folder, comm, plan.device)
    num_pages = count_pages(config, model, runner, comm, plan.device)
    runner.allocate(num_pages, cuda_graphs=config.engine.cuda_graphs)
    return Assembly(plan, runner, make_scheduler(config, model, num_pages), num_pages)


def make_scheduler(config: Config, model: ModelConfig, num_pages: int) -> Scheduler:
    """The scheduler for a resolved config."""
    cache = config.cache
    return Scheduler(
        config.scheduler,
        page_size=cache.page_size,
        num_pages=num_pages,
        prefix_cache=cache.prefix_cache,
        max_model_len=resolved(config.model.max_model_len),
        short_context=model.short_context(resolved(config.model.max_model_len)),
        eos_token_ids=model.eos_token_ids,
        overlap=resolved(config.engine.overlap),
        digest=config.control.digest,
    )
