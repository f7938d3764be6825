"""The paged KV cache's memory. Which page belongs to whom is the scheduler's business alone."""

from __future__ import annotations

import math
import mmap

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
        shape = (model.num_layers, 2, num_pages, page_size, kv_heads, model.head_dim)
        self._data = _zeros(shape, dtype, device)
        self.layers: list[tuple[Tensor, Tensor]] = [
            (self._data[i, 0], self._data[i, 1]) for i in range(model.num_layers)
        ]

    def blank(self, pages: list[int]) -> None:
        """Fill pages with zeros."""
        for page in pages:  # a fifth of the time of one index_fill_, on a CPU
            self._data[:, :, page] = 0

    @property
    def nbytes(self) -> int:
        return self._data.nbytes

    @staticmethod
    def bytes_per_page(model: ModelConfig, kv_heads: int, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page with K and V of all layers, of a rank with `kv_heads`."""
        return 2 * model.num_layers * page_size * kv_heads * model.head_dim * dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. Main memory comes zeroed from the operating system when it is first written, so a large pool starts at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = max(math.prod(shape) * dtype.itemsize, 1)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return (
        torch.frombuffer(memory, dtype=torch.uint8)[: size // dtype.itemsize * dtype.itemsize].view(dtype).view(shape)
    )
