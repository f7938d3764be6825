"""Sums and choices over the GPUs of one host for small tensors, by peers.cu: each rank writes into the others' memory."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_serve.kernels.gpu.build import load_library
from spmd_serve.kernels.gpu.launch import launch_options

MAX_RANKS = 8
_THREADS = 256
_CELL = 16  # bytes of memory for 8 bytes of a tensor
_TYPES = (torch.bfloat16, torch.float16)


def memory_bytes(ranks: int, max_bytes: int) -> int:
    """How much memory each rank needs for tensors of up to max_bytes: two calls' cells from every rank."""
    return max_bytes // 8 * 2 * ranks * _CELL


class Peers:
    """The kernels of peers.cu over the memory of all ranks. Every call is collective, in the same order on all ranks.

    Args:
        memory: this rank's (`memory_bytes`, all zero, 16-byte aligned), which is kept.
        pointers: the address of each rank's memory, as this process sees it.
        max_bytes: of a tensor; a multiple of 2048.

    Raises:
        RuntimeError: the kernels could not be compiled here.
    """

    def __init__(self, memory: Tensor, pointers: Sequence[int], rank: int, max_bytes: int) -> None:
        library = load_library("peers")
        if library is None:
            raise RuntimeError("peers.cu was not compiled")
        device = memory.device
        self._library = library
        self._memory = memory
        self._calls = torch.zeros(max_bytes // 8 // _THREADS, dtype=torch.int32, device=device)
        self._device = device
        self._max_bytes = max_bytes
        addresses = (ctypes.c_int64 * len(pointers))(*pointers)
        self._common = (addresses, ctypes.c_void_p(self._calls.data_ptr()), rank, len(pointers))

    def fits(self, tensor: Tensor) -> bool:
        """Whether `all_reduce` can take it."""
        aligned = tensor.numel() % 4 == 0 and tensor.data_ptr() % 8 == 0 and tensor.is_contiguous()
        return aligned and tensor.dtype in _TYPES and 0 < tensor.nbytes <= self._max_bytes

    def all_reduce(self, tensor: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum over ranks, in place; with a residual (like tensor) it is added there, with one rounding in all."""
        out = tensor if residual is None else residual
        assert out.is_contiguous() and out.data_ptr() % 8 == 0 and out.shape == tensor.shape
        pointers = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(out.data_ptr())
        options = tensor.numel() // 4, _TYPES.index(tensor.dtype), int(residual is not None)
        self._call("peers_all_reduce", *pointers, *options)
        return out

    def fits_rows(self, rows: int) -> bool:
        """Whether `best_index` can take so many."""
        return 0 < 8 * rows <= self._max_bytes

    def best_index(self, values: Tensor, indices: Tensor) -> Tensor:
        """values float32, indices int64, [rows] -> the index of the rank with the largest value, int64 [rows]."""
        assert values.is_contiguous() and indices.is_contiguous()
        out = torch.empty_like(indices)
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (values, indices, out))
        self._call("peers_best_index", *pointers, values.numel())
        return out

    def _call(self, name: str, *arguments: object) -> None:
        dependent = int(launch_options(1)["PDL"] > 0)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = getattr(self._library, name)(*self._common, *arguments, dependent, self._device.index, stream)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")
