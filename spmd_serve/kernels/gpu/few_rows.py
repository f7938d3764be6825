"""Decode attention of few rows: the binding of few_rows.cu, and for which shapes it is taken."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_serve.kernels.gpu.build import aligned, launch, load_library
from spmd_serve.kernels.gpu.launch import launch_options
from spmd_serve.kernels.rope_cache import Rotation

MAX_HEADS = 128  # rows x KV heads


@dataclass(frozen=True)
class FewRowsConfig:
    """splits: blocks of a cluster, which share a row's tokens; warps: of each, 4 or 8."""

    splits: int
    warps: int


def few_rows_config(rows: int, kv_heads: int) -> FewRowsConfig | None:
    """None where the Triton kernel is the better choice. By measurements of whole layers on an H200."""
    heads = rows * kv_heads
    if heads > MAX_HEADS:
        return None
    if heads <= 8:
        return FewRowsConfig(8, 8)
    return FewRowsConfig(max(2, min(8, 200 // heads)), 4)  # some 200 blocks run at once


def few_rows_attention(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, slots: Tensor, lengths: Tensor, scale: float,
    window: int | None, softcap: float | None, rotation: Rotation, out: Tensor, config: FewRowsConfig,
) -> bool:  # fmt: skip
    """See spmd_serve.kernels.decode_attention.decode_attention. False: there is no such library, or no kernel for the shape."""
    page_size, kv_heads, head_dim = k_cache.shape[1:]
    group = out.shape[1] // kv_heads
    table, q_scale, k_scale = rotation.rope_table, rotation.q_scale, rotation.k_scale
    if table is not None and table.shape[2] != head_dim // 2:
        return False
    tensors = (qkv, k_cache, v_cache, out, q_scale, k_scale)
    if not aligned(*tensors, table) or any(t is not None and t.dtype != torch.bfloat16 for t in tensors):
        return False
    library = load_library("few_rows")
    if library is None:
        return False
    return launch(
        library.few_rows_attention, qkv.device,
        qkv, k_cache, v_cache, page_table, slots, lengths, rotation.positions, table, q_scale, k_scale, out, len(lengths),
        kv_heads, group, head_dim, page_size, page_table.stride(0), window or 0, float(rotation.eps), float(scale),
        float(softcap or 0.0), config.splits, config.warps, launch_options(len(lengths))["PDL"] > 0,
    )  # fmt: skip
