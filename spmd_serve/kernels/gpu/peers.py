"""Sums and choices over the GPUs of one host for small tensors, by peers.cu: each rank writes into the others' memory."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spmd_serve.kernels.gpu.build import aligned, launch, load_library
from spmd_serve.kernels.gpu.launch import launch_options

MAX_RANKS = 8
MAX_BYTES = {"cells": 2**20, "lines": 2**31}  # of a tensor
_PLACES = {"cells": 2**20 // 2048, "lines": 640}  # see peers.cu
_PLACE_BYTES = 4096  # of memory, for one call and one writer
_TYPES = (torch.bfloat16, torch.float16)


def memory_bytes(ranks: int) -> int:
    """How much memory each rank needs: at every place, two calls' data from every rank."""
    return sum(_PLACES.values()) * 2 * ranks * _PLACE_BYTES


class Peers:
    """The kernels of peers.cu over the memory of all ranks. Every call is collective, in the same order on all ranks.

    Args:
        memory: this rank's (`memory_bytes`, all zero, 16-byte aligned), which is kept.
        pointers: the address of each rank's memory, as this process sees it.

    Raises:
        RuntimeError: the kernels could not be compiled here.
    """

    def __init__(self, memory: Tensor, pointers: Sequence[int], rank: int) -> None:
        library = load_library("peers")
        if library is None:
            raise RuntimeError("peers.cu was not compiled")
        self._library = library
        self._memory = memory
        self._device = memory.device
        self._calls = torch.zeros(sum(_PLACES.values()), dtype=torch.int32, device=memory.device)
        self._common: dict[str, tuple[Any, ...]] = {}
        first = 0  # place
        for form, places in _PLACES.items():
            offset = first * 2 * len(pointers) * _PLACE_BYTES
            addresses = (ctypes.c_int64 * len(pointers))(*(pointer + offset for pointer in pointers))
            self._common[form] = (addresses, self._calls[first:], rank, len(pointers))
            first += places

    def fits(self, tensor: Tensor, form: str) -> bool:
        """Whether `all_reduce` can take it in this form."""
        aligned = tensor.numel() % 4 == 0 and tensor.data_ptr() % 8 == 0 and tensor.is_contiguous()
        return aligned and tensor.dtype in _TYPES and 0 < tensor.nbytes <= MAX_BYTES[form]

    def all_reduce(self, tensor: Tensor, form: str, residual: Tensor | None = None) -> Tensor:
        """The sum over ranks, in place; with a residual (like tensor) it is added there, with one rounding in all."""
        out = tensor if residual is None else residual
        assert out.is_contiguous() and out.data_ptr() % 8 == 0 and out.shape == tensor.shape
        options = _TYPES.index(tensor.dtype), int(residual is not None), int(form == "lines")
        self._call("peers_all_reduce", form, tensor, out, tensor.numel() // 4, *options)
        return out

    def fits_rows(self, rows: int) -> bool:
        """Whether `best_index` can take so many."""
        return 0 < 8 * rows <= MAX_BYTES["cells"]

    def best_index(self, values: Tensor, indices: Tensor) -> Tensor:
        """values float32, indices int64, [rows] -> the index of the rank with the largest value, int64 [rows]."""
        assert values.is_contiguous() and indices.is_contiguous()
        out = torch.empty_like(indices)
        self._call("peers_best_index", "cells", values, indices, out, values.numel())
        return out

    def add_copied(self, own: Tensor, received: Tensor, arrived: Tensor, number: int, residual: Tensor) -> Tensor:
        """residual += the sum over ranks of what copy engines bring, once they have; with one rounding in all.

        own: this rank's part; received: [ranks, at least own's numbers], the others'; arrived: int32 [ranks], `number` where a
        rank's part is complete. own and residual are alike, contiguous, and a multiple of 8 numbers.
        """
        assert own.shape == residual.shape and own.numel() % 8 == 0
        assert own.is_contiguous() and residual.is_contiguous() and aligned(own, received, residual)
        _, _, rank, ranks = self._common["cells"]
        launch(
            self._library.peers_add_copied, self._device,
            rank, ranks, own, received, arrived, number, ctypes.c_int64(received.stride(0) // 8), residual,
            own.numel() // 8, _TYPES.index(own.dtype), int(launch_options(1)["PDL"] > 0),
        )  # fmt: skip
        return residual

    def _call(self, name: str, form: str, *arguments: object) -> None:
        # Larger sums come before a norm, whose successor then reads its first weights while the ranks wait for each other.
        dependent = (2 if form == "lines" else 1) if launch_options(1)["PDL"] > 0 else 0
        if not launch(getattr(self._library, name), self._device, *self._common[form], *arguments, dependent):
            raise RuntimeError(f"{name}: no kernel for this shape")
