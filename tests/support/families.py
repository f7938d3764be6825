"""Tiny random models of every family: their logits in transformers, and in this package's decoder on any rank count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmd_serve.attention.base import AttentionBatch, ChunkSpan
from spmd_serve.attention.torch_native import TorchAttention
from spmd_serve.distributed.collectives import Communicator
from spmd_serve.engine.build import partition_of
from spmd_serve.engine.kv_cache import KVCache
from spmd_serve.kernels.fp8 import Fp8Format
from spmd_serve.models.blocks import DecoderContext
from spmd_serve.models.decoder import Decoder
from spmd_serve.models.registry import load_model_config
from spmd_serve.models.weights import has_own_head, is_unused, load_weights, open_source

VOCAB = 131
PAGE = 4
WINDOW = 7  # crosses pages and chunks
MAX_LEN = 41
TOLERANCE = 1e-4  # of logits in float32
LENGTHS = (MAX_LEN, 19)  # the two sequences that each family is compared on

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 70,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_SHORT = {"max_position_embeddings": 16}  # the sequences go beyond it


def _scaled(**scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **scaling}}


# name -> (class prefix in transformers, what differs from _COMMON)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", _scaled(rope_type="linear", factor=4.0)),
    "llama-dynamic": ("Llama", _SHORT | _scaled(rope_type="dynamic", factor=4.0)),
    "llama-yarn": ("Llama", _scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-3": (
        "Llama",
        _scaled(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"hidden_size": 60, "head_dim": None}),
    "qwen2-windowed": (
        "Qwen2",
        {"head_dim": None, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 5,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW, "intermediate_size": 72},
    ),
    "gemma": ("Gemma", {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 7,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 12,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": WINDOW, "head_dim": None}),
    "phi3-long": (
        "Phi3",
        {
            "head_dim": None,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "longrope",
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.5, 2.0, 4.0],
            },
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
}


# ---- transformers -------------------------------------------------------------------------------------------------


def write_family(name: str, folder: Path) -> None:
    """Save a random model with transformers, and its logits for the two sequences."""
    import transformers

    prefix, changes = FAMILIES[name]
    values = {key: value for key, value in (_COMMON | changes).items() if value is not None}
    config_class = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(prefix, f"{prefix}Config"))
    torch.manual_seed(1)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config_class(**values, attn_implementation="eager")).eval()
    for parameter in model.parameters():
        # Large enough that every part shows in the logits; norms stay near what they multiply by.
        spread = 0.2 if parameter.ndim > 1 else 0.3
        parameter.data = parameter.data.mul_(0.0 if parameter.ndim > 1 else 1.0) + spread * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    # transformers' dynamic scaling depends on the length at hand, ours on the longest that is served.
    save_reference(model, folder, (MAX_LEN, MAX_LEN) if name == "llama-dynamic" else LENGTHS)


def write_reference(folder: Path, weights: dict[str, Tensor]) -> None:
    """The logits of the model in `folder` if it had these weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.quantization_config = None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(weights)
    save_reference(model, folder)


def save_reference(model: Any, folder: Path, lengths: Sequence[int] = LENGTHS) -> None:
    """Random tokens, and transformers' logits for them."""
    tensors = {}
    for i, length in enumerate(lengths):
        tokens = torch.randint(3, VOCAB, (length,))
        with torch.no_grad():
            tensors |= {f"tokens{i}": tokens, f"logits{i}": model(tokens[None]).logits[0].contiguous()}
    save_file(tensors, folder / "reference.tensors")


# ---- this package -------------------------------------------------------------------------------------------------


class Shard:
    """One rank's decoder with a KV cache, fed by hand. `dtype` is the weights'. Collective."""

    def __init__(self, folder: Path, comm: Communicator, slots: int, fp8: Fp8Format | None, dtype: torch.dtype) -> None:
        self.model = model = load_model_config(folder)
        self.comm = comm
        self.partition = partition_of(model, comm, fp8)
        source = open_source(folder, model, "auto")
        if model.tie_embeddings and has_own_head(source, model, self.partition.vocab):
            self.model = model = replace(model, tie_embeddings=False)
        self.attention = TorchAttention()
        cpu = torch.device("cpu")
        context = DecoderContext(self.model, self.partition, comm, self.attention, dtype, cpu, fp8)
        self.decoder = Decoder(context, MAX_LEN)
        load_weights(self.decoder.pieces(), source, progress=False, ignore=is_unused(model))
        self.decoder.pack()
        pages = -(-MAX_LEN // PAGE)
        # Pages of a slot lie in no order, and the slots' pages between each other.
        order = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(3))
        self.page_table = order.view(slots, pages).to(torch.int32)
        self.kv = KVCache(
            self.model, max(len(self.partition.kv_heads), 1), slots * pages, PAGE, torch.float32, torch.device("cpu")
        )

    @torch.inference_mode()
    def step(
        self,
        decodes: Sequence[tuple[int, int, int]],
        chunks: Sequence[tuple[int, int, Tensor]],
        kept: Tensor | None = None,
    ) -> Tensor:
        """decodes: (slot, position, token); chunks: (slot, start, tokens) -> logits of all or the kept rows, [rows, vocabulary]."""
        tokens = [torch.tensor([token]) for _, _, token in decodes] + [t for _, _, t in chunks]
        slots = [slot for slot, _, _ in decodes] + [slot for slot, _, t in chunks for _ in t]
        positions = [p for _, p, _ in decodes] + [start + i for _, start, t in chunks for i in range(len(t))]
        spans, offset = [], len(decodes)
        for slot, start, chunk in chunks:
            pages = self.page_table[slot, : -(-(start + len(chunk)) // PAGE)].tolist()
            spans.append(ChunkSpan(slot, start, len(chunk), offset, pages))
            offset += len(chunk)
        where = torch.tensor(positions)
        pages_of_tokens = self.page_table[torch.tensor(slots), where // PAGE].long()
        lengths = [position + 1 for _, position, _ in decodes]
        self.attention.plan(
            AttentionBatch(
                page_table=self.page_table,
                page_size=PAGE,
                decode_slots=torch.tensor([slot for slot, _, _ in decodes], dtype=torch.int64),
                decode_lengths=torch.tensor(lengths, dtype=torch.int64),
                decode_lengths_host=lengths,
                chunks=tuple(spans),
            )
        )
        locations = pages_of_tokens * PAGE + where % PAGE
        rope_rows = where + self.model.short_context(MAX_LEN)  # the sequences are longer than that
        hidden = self.decoder(torch.cat(tokens), rope_rows, locations, len(decodes), self.kv.layers, kept)
        return self._whole_vocabulary(self.decoder.logits(hidden).float())

    def _whole_vocabulary(self, logits: Tensor) -> Tensor:
        width = -(-self.model.vocab_size // self.comm.world_size)
        padded = torch.zeros(logits.shape[0], width)
        padded[:, : logits.shape[1]] = logits
        parts = self.comm.all_gather(padded)
        base, longer = divmod(self.model.vocab_size, self.comm.world_size)
        return torch.cat([parts[r, :, : base + (r < longer)] for r in range(self.comm.world_size)], dim=1)


def largest_difference(
    folder: Path, comm: Communicator, fp8: Fp8Format | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Largest difference of logits from transformers' by way of computing: prefill, chunked prefill, decode. Collective."""
    reference = load_file(folder / "reference.tensors")
    tokens = [reference[f"tokens{i}"] for i in range(2)]
    wanted = [reference[f"logits{i}"] for i in range(2)]
    shard = Shard(folder, comm, 5, fp8, dtype)
    worst = {"prefill": 0.0, "kept": 0.0, "chunked": 0.0, "decode": 0.0}

    def note(way: str, got: Tensor, expected: Tensor) -> None:
        difference = float((got - expected).abs().max())
        if not difference <= worst[way]:  # NaN is the worst of all
            worst[way] = difference

    first = shard.step([], [(0, 0, tokens[0]), (1, 0, tokens[1])])
    note("prefill", first, torch.cat(wanted))
    kept = torch.tensor([len(tokens[0]) - 1, 3, len(first) - 1])
    note("kept", shard.step([], [(0, 0, tokens[0]), (1, 0, tokens[1])], kept), first[kept])
    # Slot 2 is prefilled in chunks while slots 3 and 4 decode.
    # The shorter sequence decodes from its start, the longer one to its end: all positions, in half of the steps.
    decoded = [(3, 0, 19), (4, 1, 2)]  # slot, sequence, position
    shard.step([], [(slot, 0, tokens[sequence][:position]) for slot, sequence, position in decoded])
    start, chunk = 0, 1
    while decoded:
        piece = tokens[0][start : start + chunk]
        rows = [(slot, position, int(tokens[sequence][position])) for slot, sequence, position in decoded]
        logits = shard.step(rows, [(2, start, piece)] if len(piece) else [])
        note("decode", logits[: len(rows)], torch.stack([wanted[s][p] for _, s, p in decoded]))
        if len(piece):
            note("chunked", logits[len(rows) :], wanted[0][start : start + len(piece)])
        start, chunk = start + len(piece), chunk + 4
        decoded = [(slot, s, p + 1) for slot, s, p in decoded if p + 1 < len(tokens[s])]
    return worst
