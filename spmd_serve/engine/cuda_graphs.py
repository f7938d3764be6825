"""Decode steps as CUDA graphs: one pair for each batch size, sharing memory.

The first graph goes from the rows' state to the logits, the second samples and advances the rows. Steps with rows that
need more (penalties, filters, grammars) use the first alone. A batch runs in the next larger size; its padding rows are
the row table's padding slot, which writes no K and V.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from spmd_serve.engine.row_table import upload_list

logger = logging.getLogger(__name__)


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes to capture: every size where a row costs most, then steps that waste at most an eighth."""
    sizes = [*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 257, 16)]
    sizes += range(288, 513, 32)
    sizes += range(576, 65537, 64)
    return [n for n in sizes if n < largest] + [largest]


class DecodeGraphs:
    """Captured decode steps.

    Args:
        forward: slots int64 [n] -> logits [n, vocabulary rows of this rank]. Reads the row table.
        sample: (logits, slots) -> tokens int64 [n]. Advances the row table.
        padding_slot: the slot that padding rows use.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        sample: Callable[[Tensor, Tensor], Tensor],
        sizes: list[int],
        padding_slot: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._sample = sample
        self._sizes = sizes
        self._padding_slot = padding_slot
        self._device = device
        self._slots = torch.full((sizes[-1],), padding_slot, dtype=torch.int64, device=device)
        self._uploaded: list[int] = []  # what stands in `_slots`, without the padding
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self, progress: bool) -> None:
        """Capture all sizes, the largest first so that the smaller ones fit into its memory. Collective."""
        started = last = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(self._sizes)):
            slots = self._slots[:size]
            self._sample(self._forward(slots), slots)  # kernels compile and libraries allocate outside of the capture
            torch.cuda.synchronize()
            forward, sample = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(forward, pool=pool):
                logits = self._forward(slots)
            with torch.cuda.graph(sample, pool=pool):
                tokens = self._sample(logits, slots)
            self._graphs[size] = forward, logits, sample, tokens
            if progress and time.perf_counter() - last > 2.0:
                last = time.perf_counter()
                logger.info("capturing CUDA graphs: %d of %d", done + 1, len(self._sizes))
        if progress:
            took = time.perf_counter() - started
            logger.info("captured %d CUDA graphs in %.1f s, up to %d rows", len(self._sizes), took, self._sizes[-1])

    def run(self, slots: list[int]) -> Tensor:
        """Replay the step of these rows. Returns the tokens, int64 [len(slots)].

        The result is overwritten by the next step of the same size: copy it on the same stream.
        """
        size = self._upload(slots)
        forward, _, sample, tokens = self._graphs[size]
        forward.replay()
        sample.replay()
        return tokens[: len(slots)]

    def run_forward(self, slots: list[int]) -> tuple[Tensor, Tensor]:
        """The step's first half: (slots int64 [n], logits [n, vocabulary rows of this rank]), for own sampling."""
        size = self._upload(slots)
        forward, logits, _, _ = self._graphs[size]
        forward.replay()
        return self._slots[: len(slots)], logits[: len(slots)]

    def _upload(self, slots: list[int]) -> int:
        """Put the slots in place and return the size of the graph to run."""
        if slots is not self._uploaded and slots != self._uploaded:
            padded = slots + [self._padding_slot] * (len(self._slots) - len(slots))
            self._slots.copy_(upload_list(padded, self._device), non_blocking=True)
        self._uploaded = slots
        return self._sizes[bisect.bisect_left(self._sizes, len(slots))]

    def release(self) -> None:
        """Drop the graphs: NCCL does not close a communicator while a graph refers to it."""
        for forward, _, sample, _ in self._graphs.values():
            forward.reset()
            sample.reset()
        self._graphs.clear()

    def fits(self, count: int) -> bool:
        """Whether a step of `count` rows was captured."""
        return 0 < count <= self._sizes[-1]
