"""`bench roofline`: the tokens per second that no engine can exceed on this device, from the model's sizes.

A decode step reads each weight that it uses once, and each live KV entry once; prefill computes two operations a weight and
token. The device's bandwidth and arithmetic rate are measured here, or given. What a real engine adds to it (launches, the
CPU's work, communication, activations) is not in it: it is a floor of the time, and so a ceiling of the rate.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spmd_serve.assembly import make_plan
from spmd_serve.bench.workloads import (
    ENGINE_OPTIONS,
    Workload,
    decode,
    make_workload,
    offline_256,
    parse_count,
    parse_rate,
)
from spmd_serve.config import parse_args
from spmd_serve.distributed.ranks import rank_info
from spmd_serve.engine.build import pick_kv_dtype
from spmd_serve.models.fp8 import fp8_format
from spmd_serve.models.model_config import ModelConfig

COPY_BYTES = {"cpu": 2**28, "cuda": 2**32}
MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}
MEASURE_SECONDS = 1.0


@dataclass(frozen=True)
class Device:
    """What the hardware can do: bytes per second to and from memory, operations per second of a large matmul."""

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class Costs:
    """Sizes of a model that decide how fast it can be.

    Attributes:
        shared_weights: parameters outside of experts that each step reads, the LM head among them.
        expert_weights: parameters of one expert, over all layers that have experts.
        shared_bytes, expert_bytes: of these.
        num_experts, experts_per_token: 0 without experts.
        kv_bytes: (window or None, bytes per token of all layers with that window).
        attention_flops: operations per pair of query and key, over all layers.
    """

    shared_weights: int
    shared_bytes: int
    expert_weights: int
    expert_bytes: int
    num_experts: int
    experts_per_token: int
    kv_bytes: tuple[tuple[int | None, int], ...]
    attention_flops: int

    def weights_read(self, batch: int) -> float:
        """Bytes of weights that a step of `batch` tokens reads: of the experts, as many as so many draws hit on average."""
        hit = (
            self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** batch) if self.num_experts else 0
        )
        return self.shared_bytes + hit * self.expert_bytes

    def kv_read(self, context: int) -> int:
        """Bytes of KV that one decoded token reads, with `context` tokens before it."""
        return sum(size * min(context, window or context) for window, size in self.kv_bytes)

    def prefill_flops(self, prompt: int, head_weights: int) -> float:
        """Operations for a prompt; the LM head counts once, for the last token."""
        per_token = self.shared_weights - head_weights + self.experts_per_token * self.expert_weights
        return 2.0 * per_token * prompt + 2.0 * head_weights + self.attention_flops * prompt * (prompt + 1) / 2


def head_weights(model: ModelConfig) -> int:
    """Parameters of the LM head (tied or not, it is read in each step)."""
    return model.vocab_size * model.hidden_size


def costs_of(model: ModelConfig, weight_bytes: int, kv_entry_bytes: int, *, fp8: bool = False) -> Costs:
    """From a model's sizes. Norms and biases are left out: they are less than a thousandth.

    fp8: a weight of the layers takes one byte; LM head, routers and experts are never quantised.
    """
    q_width, kv_width = model.num_q_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.hidden_size * (q_width + 2 * kv_width) + q_width * model.hidden_size
    moe_layers = sum(layer.moe for layer in model.layers) if model.moe else 0
    dense_layers = len(model.layers) - moe_layers
    layers = attention * len(model.layers) + 3 * model.hidden_size * model.intermediate_size * dense_layers
    experts = model.moe.num_experts if model.moe and moe_layers else 0
    plain = head_weights(model)
    if model.moe:
        plain += moe_layers * model.hidden_size * model.moe.num_experts  # the router
    expert = 3 * model.hidden_size * model.moe.intermediate_size * moe_layers if model.moe else 0
    windows = Counter(layer.window for layer in model.layers)
    return Costs(
        shared_weights=layers + plain,
        shared_bytes=layers * (1 if fp8 else weight_bytes) + plain * weight_bytes,
        expert_weights=expert,
        expert_bytes=expert * weight_bytes,
        num_experts=experts,
        experts_per_token=model.moe.experts_per_token if model.moe and experts else 0,
        kv_bytes=tuple((window, count * 2 * kv_width * kv_entry_bytes) for window, count in windows.items()),
        attention_flops=4 * q_width * len(model.layers),
    )


def floor_seconds(workload: Workload, model: ModelConfig, costs: Costs, device: Device, max_num_seqs: int) -> float:
    """The least time for a workload whose requests are all there at once.

    Requests start in order as rows become free. Prefill is computed at the matmul rate; every further token of a request
    is one row of a decode step, which takes as long as its bytes or its operations, whichever is more.
    """
    prefill = sum(costs.prefill_flops(prompt, head_weights(model)) for prompt, _ in workload.lengths) / device.flops
    waiting = list(reversed(workload.lengths))
    running: list[tuple[int, int]] = []  # (tokens in the context, tokens to decode)
    seconds = prefill
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            prompt, output = waiting.pop()
            if output > 1:  # the first token comes out of the prefill
                running.append((prompt + 1, output - 1))
        if not running:
            break
        per_token = costs.shared_weights + costs.experts_per_token * costs.expert_weights
        context = sum(tokens for tokens, _ in running)
        moved = costs.weights_read(len(running)) + sum(costs.kv_read(tokens) for tokens, _ in running)
        computed = 2.0 * per_token * len(running) + costs.attention_flops * context
        seconds += max(moved / device.bandwidth, computed / device.flops)
        running = [(tokens + 1, left - 1) for tokens, left in running if left > 1]
    return seconds


# ---- the device ---------------------------------------------------------------------------------------------------


def measure_device(device: torch.device, dtype: torch.dtype) -> Device:
    """Best bandwidth of a large copy (bytes read and written) or sum, and best rate of a large matmul."""
    kind = device.type
    size = COPY_BYTES[kind]
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    bandwidth = max(
        2 * size / _best_seconds(lambda: target.copy_(source), device),
        size / _best_seconds(lambda: source.sum(), device),
    )
    n = MATMUL_SIZE[kind]
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    flops = 2 * n**3 / _best_seconds(lambda: a @ b, device)
    return Device(bandwidth, flops)


def _best_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The shortest of many calls, after a warm-up."""

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    deadline = time.perf_counter() + MEASURE_SECONDS
    best = once()
    while time.perf_counter() < deadline:
        best = min(best, once())
    return best


# ---- the command --------------------------------------------------------------------------------------------------


def workloads_for(kind: str) -> list[Workload]:
    """The workloads that the README gives figures for, on a kind of device."""
    if kind == "cuda":
        return [offline_256(), decode(1), decode(8), decode(64)]
    return [make_workload("16 x 128 -> 64", 16, (128, 128), (64, 64)), decode(1, 16, 64)]


def main(argv: list[str]) -> int:
    """Print a table of floors; options that are not listed are the engine's (--model, --dtype, ...)."""
    parser = argparse.ArgumentParser(
        prog="python -m spmd_serve.bench roofline", description=__doc__, epilog=ENGINE_OPTIONS, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=parse_count, default=1, help="GPUs that share the model (default: 1)")
    parser.add_argument("--bandwidth", type=parse_rate, help="GB/s of one device (default: measured)")
    parser.add_argument("--tflops", type=parse_rate, help="TFLOP/s of one device (default: measured)")
    parser.add_argument("--json", action="store_true", help="print one JSON line per workload")
    args, engine_options = parser.parse_known_args(argv)
    plan = make_plan(parse_args(engine_options), rank_info(os.environ))
    dtype: torch.dtype = getattr(torch, plan.config.model.dtype)
    requested, gpu = plan.config.model.quantization == "fp8", plan.device.type == "cuda"
    fp8 = fp8_format(plan.model, requested=requested, gpu=gpu) is not None
    costs = costs_of(plan.model, dtype.itemsize, pick_kv_dtype(plan).itemsize, fp8=fp8)
    bandwidth, flops = args.bandwidth and 1e9 * args.bandwidth, args.tflops and 1e12 * args.tflops
    if bandwidth is None or flops is None:
        measured = measure_device(plan.device, dtype)
        bandwidth, flops = bandwidth or measured.bandwidth, flops or measured.flops
    factor = args.ranks if gpu else 1  # GPUs add up; ranks on CPUs share one memory
    device = Device(bandwidth * factor, flops * factor)
    if not args.json:
        print(
            f"{plan.config.model.model} in {plan.config.model.dtype}: {costs.weights_read(1) / 1e6:.1f} MB of weights a step,"
        )
        print(
            f"{costs.kv_read(1)} bytes of KV a token; {device.bandwidth / 1e9:.1f} GB/s, {device.flops / 1e12:.2f} TFLOP/s"
        )
    for workload in workloads_for(plan.device.type):
        seconds = floor_seconds(workload, plan.model, costs, device, plan.config.scheduler.max_num_seqs)
        rate = workload.output_tokens / seconds
        if args.json:
            print(json.dumps({"workload": workload.name, "floor_s": seconds, "output_tokens_per_s": round(rate, 1)}))
        else:
            print(f"  {workload.name:16} at least {seconds:8.3f} s, at most {rate:10.1f} output tokens/s")
    return 0
