"""Attention on a GPU: FlashInfer for prefill chunks, the device-planned kernel of kernels/decode_attention for decodes.

The only importer of FlashInfer's attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmd_serve.attention.base import AttentionBackend, AttentionBatch, AttentionSpec
from spmd_serve.kernels.decode_attention import DecodeWorkspace, decode_attention
from spmd_serve.kernels.rope_cache import Rotation

_WORKSPACE_BYTES = 256 * 2**20
_PLANS_IN_FLIGHT = 2  # steps whose plan a GPU may still be copying when the next one is made


@dataclass
class _PrefillPlan:
    """One step's prefill wrappers, one for each kind of attention in the model."""

    wrappers: dict[AttentionSpec, Any] = field(default_factory=dict)
    planned: set[AttentionSpec] = field(default_factory=set)


class FlashInferAttention(AttentionBackend):
    """See AttentionBackend.

    FlashInfer's plan is copied to the GPU from a pinned buffer that belongs to the wrapper; planning again before that
    copy has run would change it. So steps take turns between wrappers, as many as there are steps in flight.
    """

    fuses_decode = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._workspace: Tensor | None = None
        self._plans = [_PrefillPlan() for _ in range(_PLANS_IN_FLIGHT)]
        self._turn = 0
        self._batch: AttentionBatch | None = None
        self._indptr: tuple[Tensor, Tensor, Tensor] | None = None
        self._indices: Tensor | None = None
        self._decode: DecodeWorkspace | None = None

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        if not batch.chunks:
            return
        self._turn = (self._turn + 1) % _PLANS_IN_FLIGHT
        self._plans[self._turn].planned.clear()
        ends = [chunk.start + chunk.length for chunk in batch.chunks]
        queries = np.cumsum([0] + [chunk.length for chunk in batch.chunks], dtype=np.int32)
        pages = np.cumsum([0] + [len(chunk.pages) for chunk in batch.chunks], dtype=np.int32)
        last = np.array([(end - 1) % batch.page_size + 1 for end in ends], dtype=np.int32)
        self._indptr = torch.from_numpy(queries), torch.from_numpy(pages), torch.from_numpy(last)
        indices = torch.from_numpy(np.concatenate([np.array(c.pages, dtype=np.int32) for c in batch.chunks]))
        self._indices = indices.pin_memory().to(self._device, non_blocking=True)

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, spec: AttentionSpec, out: Tensor | None = None
    ) -> Tensor:
        # Without one, FlashInfer makes and zeroes it.
        out = torch.empty_like(q) if out is None else out
        result: Tensor = self._planned(q, k_cache, spec).run(q, (k_cache, v_cache), out=out)
        return result

    def decode(
        self,
        qkv: Tensor,
        rotation: Rotation,
        k_cache: Tensor,
        v_cache: Tensor,
        spec: AttentionSpec,
        out: Tensor | None = None,
    ) -> Tensor:
        assert self._batch is not None
        batch = self._batch
        if self._decode is None:
            rows, (kv_heads, head_dim) = batch.page_table.shape[0], k_cache.shape[2:]
            q_heads = qkv.shape[1] // head_dim - 2 * kv_heads
            self._decode = DecodeWorkspace(rows, q_heads, kv_heads, head_dim, self._device)
        return decode_attention(
            qkv,
            k_cache,
            v_cache,
            batch.page_table,
            batch.decode_slots,
            batch.decode_lengths,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
            rotation=rotation,
            workspace=self._decode,
            out=out,
        )

    def _planned(self, q: Tensor, k_cache: Tensor, spec: AttentionSpec) -> Any:
        """This step's prefill wrapper for one kind of layer, planned when its first layer comes."""
        plan = self._plans[self._turn]
        if spec not in plan.wrappers:
            import flashinfer

            if self._workspace is None:
                self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            plan.wrappers[spec] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        wrapper = plan.wrappers[spec]
        if spec not in plan.planned:
            assert self._indptr is not None and self._indices is not None
            queries, pages, last = self._indptr
            wrapper.plan(
                queries,
                pages,
                self._indices,
                last,
                q.shape[1],
                k_cache.shape[2],
                q.shape[2],
                k_cache.shape[1],
                causal=True,
                sm_scale=spec.scale,
                window_left=-1 if spec.window is None else spec.window - 1,
                logits_soft_cap=spec.softcap,
                q_data_type=q.dtype,
                kv_data_type=k_cache.dtype,
            )
            plan.planned.add(spec)
        return wrapper
