"""What an attention backend is given and what it must do.

Queries come packed: first one row per decoding sequence, then the rows of the prefill chunks. K and V of all of them
are in the paged cache already when `attend` runs, so a backend only reads the cache.

A backend's name is a choice of --attention (config.py) and known to `make_backend`; engine/build.py has what auto becomes, and
with which backend decode steps are captured. Of TorchAttention decode steps on CPUs are computed in kernels/scripted.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_serve.kernels.rope_cache import Rotation


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's kind of attention. `window`: a query sees itself and window - 1 tokens before it."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class ChunkSpan:
    """A prefill chunk: query rows offset .. offset+length-1 of the batch are positions start .. start+length-1 of a row.

    `pages`: the row's page ids, enough for start + length tokens (host side, not to be changed).
    """

    slot: int
    start: int
    length: int
    offset: int
    pages: list[int]


@dataclass(frozen=True)
class AttentionBatch:
    """One step's shape.

    Attributes:
        page_table: int32 [rows, max_pages] on the device; row = slot.
        decode_slots: int64 [num_decodes] on the device.
        decode_lengths: int64 [num_decodes] on the device, KV length including the token of this step.
        decode_lengths_host: the same on the host; empty inside a captured graph, where backends must plan on the device.
    """

    page_table: Tensor
    page_size: int
    decode_slots: Tensor
    decode_lengths: Tensor
    decode_lengths_host: list[int]
    chunks: tuple[ChunkSpan, ...] = ()

    @property
    def num_decodes(self) -> int:
        return self.decode_slots.shape[0]


class AttentionBackend(ABC):
    """One object per rank. `plan` runs once per step, `attend` once per layer."""

    fuses_decode = False
    """Whether decoding rows go through `decode`; `attend` then gets the chunks' rows only."""
    weighs_the_rest = False
    """Whether what lies behind a row's end in its last page is read too, and weighed with 0: it must be numbers."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare the step; everything that does not depend on the layer."""

    @abstractmethod
    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, spec: AttentionSpec, out: Tensor | None = None
    ) -> Tensor:
        """q: [tokens, q_heads, head_dim]; caches: [pages, page_size, kv_heads, head_dim] -> [tokens, q_heads, head_dim].

        Query head h attends to KV head h // (q_heads / kv_heads). The result goes to `out` if there is one.
        """

    def decode(
        self,
        qkv: Tensor,
        rotation: Rotation,
        k_cache: Tensor,
        v_cache: Tensor,
        spec: AttentionSpec,
        out: Tensor | None = None,
    ) -> Tensor:
        """The decoding rows from their raw projection: norms, rotation and the cache write are done inside.

        qkv: [rows, (q_heads + 2 * kv_heads) * head_dim] -> [rows, q_heads, head_dim], in `out` if there is one.
        """
        raise NotImplementedError("this backend attends to decoding rows like to others")


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """`name`: as --attention, but for auto. Imported here so that nobody needs FlashInfer without a GPU."""
    if name == "flashinfer":
        from spmd_serve.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(device)
    from spmd_serve.attention.torch_native import TorchAttention

    assert name == "torch", f"there is no attention backend {name}"
    return TorchAttention()
