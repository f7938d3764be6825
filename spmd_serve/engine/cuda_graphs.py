"""Decode steps as CUDA graphs: two for each batch size, sharing memory.

One is the whole step, from the rows' state to the next one. The other ends with the logits, for steps with rows that
need more before they are sampled (penalties, filters, grammars). A batch runs in the next larger size; its padding rows
are the row table's padding slot, which writes no K and V.
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
        forward: slots int64 [n] -> logits [n, vocabulary rows of this rank], lengths int64 [n]. Reads the row table.
        sample: (logits, lengths, slots) -> tokens int64 [n]. Advances the row table.
        padding_slot: the slot that padding rows use.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], tuple[Tensor, Tensor]],
        sample: Callable[[Tensor, Tensor, Tensor], Tensor],
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
        self._steps: dict[int, torch.cuda.CUDAGraph] = {}
        self._forwards: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def capture(self, progress: bool) -> None:
        """Capture all sizes, the largest first so that the smaller ones fit into its memory. Collective."""
        started = last = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(self._sizes)):
            slots = self._slots[:size]
            self._sample(*self._forward(slots), slots)  # kernels compile and libraries allocate outside of the capture
            torch.cuda.synchronize()
            step, forward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(step, pool=pool):
                self._sample(*self._forward(slots), slots)
            with torch.cuda.graph(forward, pool=pool):
                logits, lengths = self._forward(slots)
            self._steps[size] = step
            self._forwards[size] = forward, logits, lengths
            if progress and time.perf_counter() - last > 2.0:
                last = time.perf_counter()
                logger.info("capturing CUDA graphs: %d of %d", done + 1, len(self._sizes))
        if progress:
            took = time.perf_counter() - started
            logger.info(
                "captured CUDA graphs of %d batch sizes in %.1f s, up to %d rows",
                len(self._sizes),
                took,
                self._sizes[-1],
            )

    def run(self, slots: list[int]) -> None:
        """Replay the step of these rows."""
        self._steps[self._upload(slots)].replay()

    def run_forward(self, slots: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The step's first part: (logits [n, vocabulary rows of this rank], lengths int64 [n], slots int64 [n]), for `sample`."""
        forward, logits, lengths = self._forwards[self._upload(slots)]
        forward.replay()
        n = len(slots)
        return logits[:n], lengths[:n], self._slots[:n]

    def _upload(self, slots: list[int]) -> int:
        """Put the slots in place and return the size of the graph to run."""
        if slots is not self._uploaded and slots != self._uploaded:
            padded = slots + [self._padding_slot] * (len(self._slots) - len(slots))
            self._slots.copy_(upload_list(padded, self._device), non_blocking=True)
        self._uploaded = slots
        return self._sizes[bisect.bisect_left(self._sizes, len(slots))]

    def release(self) -> None:
        """Drop the graphs: NCCL does not close a communicator while a graph refers to it."""
        for graph in (*self._steps.values(), *(forward for forward, _, _ in self._forwards.values())):
            graph.reset()
        self._steps.clear()
        self._forwards.clear()

    def fits(self, count: int) -> bool:
        """Whether a step of `count` rows was captured."""
        return 0 < count <= self._sizes[-1]
