"""From a Config to a scheduler and a runner with loaded weights: what the server and the offline API build alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spmd_serve.config import Config, resolved
from spmd_serve.distributed.board import Board
from spmd_serve.distributed.collectives import Communicator
from spmd_serve.distributed.fingerprint import agree, model_fingerprint, options_fingerprint, software_fingerprint
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.engine.build import Plan, build_runner, count_pages, pick_device, resolve_config
from spmd_serve.engine.model_runner import ModelRunner
from spmd_serve.models.registry import load_model_config
from spmd_serve.models.resolve import resolve_model
from spmd_serve.scheduler.scheduler import Scheduler


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
    model = load_model_config(folder, Path(config.model.tokenizer) if config.model.tokenizer else None)
    device = pick_device(config.engine.device, ranks.local_rank)
    return Plan(resolve_config(config, model, device), model, folder, device)


def make_agreed_plan(config: Config, board: Board) -> Plan:
    """As make_plan, for ranks that will compute together: all must run the same software, with the same model. Collective.

    Raises:
        FingerprintMismatchError: they do not.
    """
    agree(board, "software", software_fingerprint())
    plan = make_plan(config, board.ranks)
    model = model_fingerprint(plan.model, plan.folder, plan.tokenizer_folder)
    agree(board, "model", model | options_fingerprint(plan.config))
    return plan


def assemble(plan: Plan, ranks: RankInfo, meet: Callable[[], object] = lambda: None) -> Assembly:
    """Load the weights, size and allocate the KV pool, capture graphs. Collective.

    meet: waits until all ranks have loaded, which a rank whose weights are damaged never has: a collective knows nothing of that.
    """
    config = plan.config
    comm = Communicator.create(ranks, plan.device, config.control.control_timeout)
    runner = build_runner(plan, comm)
    meet()
    num_pages = count_pages(plan, runner, comm)
    runner.allocate(num_pages, cuda_graphs=config.engine.cuda_graphs)
    return Assembly(plan, runner, make_scheduler(plan, num_pages), num_pages)


def make_scheduler(plan: Plan, num_pages: int) -> Scheduler:
    """The scheduler of a plan, over `num_pages` pages."""
    config = plan.config
    return Scheduler(
        config.scheduler,
        page_size=config.cache.page_size,
        num_pages=num_pages,
        prefix_cache=config.cache.prefix_cache,
        max_model_len=resolved(config.model.max_model_len),
        short_context=plan.model.short_context(resolved(config.model.max_model_len)),
        eos_token_ids=plan.model.eos_token_ids,
        overlap=resolved(config.engine.overlap),
        digest=config.control.digest,
    )
