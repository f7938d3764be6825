"""The paged KV cache's memory. Which page belongs to whom is the scheduler's business alone."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_serve.models.model_config import ModelConfig


class KVCache:
    """K and V of every layer: [layers, 2, pages, page_size, kv_heads of this rank, head_dim], zeroed."""

    def __init__(
        self,
        model: ModelConfig,
        kv_heads: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        shape = (model.num_layers, 2, num_pages, page_size, kv_heads, model.head_dim)
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self.layers: list[tuple[Tensor, Tensor]] = [
            (self._data[i, 0], self._data[i, 1]) for i in range(model.num_layers)
        ]

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    @staticmethod
    def bytes_per_page(model: ModelConfig, kv_heads: int, page_size: int, dtype: torch.dtype) -> int:
        return 2 * model.num_layers * page_size * kv_heads * model.head_dim * dtype.itemsize
