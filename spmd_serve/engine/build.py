"""From options and a model to a ModelRunner with loaded weights."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from spmd_serve.attention.base import make_backend
from spmd_serve.config import Config, resolved
from spmd_serve.distributed.collectives import Communicator
from spmd_serve.distributed.partition import Partition, make_partition
from spmd_serve.engine.grammar import Grammars
from spmd_serve.engine.kv_cache import KVCache
from spmd_serve.engine.model_runner import ModelRunner, RunnerLimits
from spmd_serve.errors import ConfigError, DeviceMemoryError
from spmd_serve.kernels.fp8 import FP8, Fp8Format
from spmd_serve.kernels.packed import activation_dtype, is_fast
from spmd_serve.models.blocks import DecoderContext
from spmd_serve.models.decoder import Decoder
from spmd_serve.models.fp8 import fp8_format
from spmd_serve.models.model_config import ModelConfig
from spmd_serve.models.weights import LoadReport, has_own_head, is_unused, load_weights, open_source

logger = logging.getLogger(__name__)

_CPU_KV_MEMORY = 2**30
_FLASHINFER_HEAD_DIMS = (64, 128, 256)  # of its prefill kernels for Hopper


@dataclass(frozen=True)
class Plan:
    """What is known before anything is loaded. `config` is what `resolve_config` has made."""

    config: Config
    model: ModelConfig
    folder: Path
    device: torch.device

    @property
    def tokenizer_folder(self) -> Path:
        """Where tokenizer and chat template are."""
        return Path(self.config.model.tokenizer or self.folder)


def pick_device(name: str, local_rank: int) -> torch.device:
    """`name`: auto, cpu or cuda. A rank's GPU is the one with its local rank's number.

    Raises:
        ConfigError: CUDA is asked for and not there, or has fewer GPUs than the host has ranks.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda needs an NVIDIA GPU and a CUDA build of torch; neither was found together")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} are visible; start as many ranks as GPUs"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def pick_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The type of the weights. auto is the checkpoint's 16-bit type where the device is fast with it, else float32."""
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    dtype = torch.float16 if model.dtype == "float16" else torch.bfloat16
    return dtype if device.type == "cuda" or is_fast(dtype) else torch.float32


def pick_kv_dtype(plan: Plan) -> torch.dtype:
    """The type of the KV pool's entries: the one that attention computes in, so that nothing is converted, or FP8."""
    if plan.config.cache.kv_dtype == "fp8":
        return FP8
    return activation_dtype(pick_dtype(plan.config.model.dtype, plan.model, plan.device), plan.device)


def resolve_config(config: Config, model: ModelConfig, device: torch.device) -> Config:
    """A new Config, with every value that depends on the model and the kind of device filled in, but for the KV pool's.

    Raises:
        ConfigError: the options contradict the model.
    """
    gpu = device.type == "cuda"
    max_len = config.model.max_model_len or model.max_position
    if max_len > model.max_position:
        raise ConfigError(
            f"--max-model-len {max_len} exceeds what the model was made for ({model.max_position} tokens)"
        )
    dtype = str(pick_dtype(config.model.dtype, model, device)).removeprefix("torch.")
    attention = _pick_attention(config.engine.attention, model, gpu=gpu)
    frontend = config.server.frontend
    if frontend == "auto":
        # Measured with 200 streams: with a GPU's quick steps the GIL of a thread costs 10% of them; where the CPU computes,
        # a process more gains nothing.
        frontend = "process" if gpu else "thread"
    replace = dataclasses.replace
    return replace(
        config,
        model=replace(config.model, max_model_len=max_len, dtype=dtype),
        scheduler=replace(
            config.scheduler, max_batch_tokens=config.scheduler.max_batch_tokens or (8192 if gpu else 512)
        ),
        engine=replace(
            config.engine,
            device=device.type,
            attention=attention,
            overlap=gpu if config.engine.overlap is None else config.engine.overlap,
            cuda_graphs=config.engine.cuda_graphs and attention == "flashinfer" and _can_capture(model, dtype, device),
        ),
        server=replace(config.server, frontend=frontend),
    )


def _pick_attention(requested: str, model: ModelConfig, *, gpu: bool) -> str:
    """What is asked for; for auto flashinfer where it can be, else torch.

    Raises:
        ConfigError: FlashInfer was asked for, and there is no GPU, or no prefill kernel for the model's heads; or it is wanted
            and not installed.
    """
    if requested not in ("auto", "flashinfer"):
        return requested
    if requested == "flashinfer" and not gpu:
        raise ConfigError(
            "--attention flashinfer needs an NVIDIA GPU; give --attention torch, or leave the option away"
        )
    fits = model.head_dim in _FLASHINFER_HEAD_DIMS
    if requested == "flashinfer" and not fits:
        raise ConfigError(
            f"FlashInfer has no prefill kernel for heads of {model.head_dim} (it has {_FLASHINFER_HEAD_DIMS}); give --attention torch"
        )
    if gpu and requested == "auto" and not fits:
        logger.warning(
            "attention in plain torch, without CUDA graphs: FlashInfer has no kernel for heads of %d", model.head_dim
        )
    if not gpu or not fits:
        return "torch"
    if importlib.util.find_spec("flashinfer") is None:  # else its import fails once the weights are read
        raise ConfigError(
            "FlashInfer is not installed; run `pip install flashinfer-python`, or give --attention torch, which is slower and "
            "has no CUDA graphs"
        )
    return "flashinfer"


def _can_capture(model: ModelConfig, dtype: str, device: torch.device) -> bool:
    """Whether decode steps never wait for the device: torch's grouped product reads sizes back where it has no kernel."""
    return model.moe is None or (dtype == "bfloat16" and torch.cuda.get_device_capability(device)[0] in (9, 10))


def partition_of(model: ModelConfig, comm: Communicator, fp8: Fp8Format | None = None) -> Partition:
    """What this rank owns of the model. fp8: of the weights."""
    return make_partition(
        rank=comm.rank,
        world_size=comm.world_size,
        num_q_heads=model.num_q_heads,
        num_kv_heads=model.num_kv_heads,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        num_experts=model.moe.num_experts if model.moe else 0,
        # Columns of a block have one scale: those of a block that is cut would have to be quantised again.
        ffn_unit=(fp8 and fp8.block) or 1,
    )


def build_decoder(plan: Plan, comm: Communicator) -> tuple[Decoder, DecoderContext, LoadReport]:
    """This rank's shard with its weights loaded. Collective.

    Raises:
        ModelError: the weights do not fit the model.
        DeviceMemoryError: this rank's part of the model does not fit the device.
    """
    options, model, device = plan.config.model, plan.model, plan.device
    dtype = pick_dtype(options.dtype, model, device)
    fp8 = fp8_format(model, requested=options.quantization == "fp8", gpu=device.type == "cuda")
    partition = partition_of(model, comm, fp8)
    if device.type == "cuda" and comm.world_size > 1 and comm.one_host:
        largest = resolved(plan.config.scheduler.max_batch_tokens), model.hidden_size
        comm.use_symmetric_memory(dtype, device, largest)
    attention = make_backend(plan.config.engine.attention, device)
    source = open_source(plan.folder, model, options.load_format, device)
    if model.tie_embeddings and has_own_head(source, model, partition.vocab):
        model = dataclasses.replace(model, tie_embeddings=False)
    context = DecoderContext(model, partition, comm, attention, dtype, device, fp8)
    try:
        with torch.inference_mode():
            decoder = Decoder(context, resolved(options.max_model_len))
            report = load_weights(decoder.pieces(), source, progress=comm.rank == 0, ignore=is_unused(model))
            decoder.pack()
    except RuntimeError as exc:
        if not isinstance(exc, torch.OutOfMemoryError) and "can't allocate memory" not in str(exc):  # as a CPU says it
            raise
        raise DeviceMemoryError(
            f"there is no memory for rank {comm.rank}'s part of the model ({str(exc).splitlines()[0]}): start more ranks, or give "
            "--quantization fp8 or a smaller --max-model-len"
        ) from exc
    logger.info("weights loaded: %s", report)
    return decoder, context, report


def build_runner(plan: Plan, comm: Communicator) -> ModelRunner:
    """Build this rank's shard and load its weights. Collective.

    Raises:
        ModelError: the weights do not fit the model.
    """
    model, config = plan.model, plan.config
    decoder, context, _ = build_decoder(plan, comm)
    limits = RunnerLimits(
        page_size=config.cache.page_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=resolved(config.model.max_model_len),
        max_batch_tokens=resolved(config.scheduler.max_batch_tokens),
    )
    grammars = Grammars(plan.tokenizer_folder, model.vocab_size, model.eos_token_ids)
    return ModelRunner(
        model, context.partition, decoder, context.attention, comm, limits, grammars, pick_kv_dtype(plan), plan.device
    )


def count_pages(plan: Plan, runner: ModelRunner, comm: Communicator) -> int:
    """Pages that all ranks can hold: the minimum over ranks. On a GPU, what is left after the largest step. Collective.

    Raises:
        ConfigError: not one page fits.
    """
    cache, gpu = plan.config.cache, plan.device.type == "cuda"
    if cache.num_pages is not None:
        return cache.num_pages
    kv_heads = max(len(partition_of(plan.model, comm).kv_heads), 1)
    per_page = KVCache.bytes_per_page(plan.model, kv_heads, cache.page_size, pick_kv_dtype(plan))
    memory = cache.kv_memory
    if memory is None:
        memory = _free_gpu_memory(plan.config, runner) if gpu else _CPU_KV_MEMORY
    pages = torch.tensor(memory // per_page, dtype=torch.int64, device=plan.device)
    count = int(comm.all_reduce_min_(pages))
    if count < 1:
        option = "--gpu-memory-utilization" if gpu and cache.kv_memory is None else "--kv-memory"
        raise ConfigError(
            f"the KV pool has no room for one page of {cache.page_size} tokens ({per_page} bytes): give more {option}"
        )
    return count


def _free_gpu_memory(config: Config, runner: ModelRunner) -> int:
    activations = runner.measure_activations(cuda_graphs=config.engine.cuda_graphs)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return max(int(free - (1 - config.cache.gpu_memory_utilization) * total) - activations, 0)
