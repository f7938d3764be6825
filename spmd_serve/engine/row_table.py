"""State of the running sequences that the steps read and advance on the device: one row ("slot") per sequence.

The scheduler decides which slot a sequence has and which pages stand in its row; this table only holds it. A pure decode
step needs nothing from the host but the slots: the last token, the length and the page ids are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from spmd_serve.kernels.filters import Filters
from spmd_serve.types import NewRow

_DRAWN_DEPTH = 4  # steps whose tokens stand in `drawn`: more than the two that are in flight at most


class RowTable:
    """`max_rows` slots and one more, the padding row, which padded rows of a captured graph read and write.

    Device tensors, all [max_rows + 1, ...]:
        last_token int64: the token that the row's next decode step consumes.
        length int64: tokens of the row whose K and V are computed (or will be, by the steps launched so far).
        rope_offset int64: where the row's first position stands in the rotary tables.
        page_table int32 [., max_pages].
        seed int64; filters, which hold the temperature.
    Host side: `lengths` and `pages` mirror what was launched. drawn int64 [_DRAWN_DEPTH, max_rows + 1] in pinned memory: the
    token that a decode step drew for a slot stands in the row of the length that it reached, written by the step itself.
    """

    def __init__(self, max_rows: int, max_pages: int, device: torch.device) -> None:
        rows = max_rows + 1
        self.padding_slot = max_rows
        self.max_pages = max_pages
        self.device = device
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        self.rope_offset = torch.zeros(rows, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        self.filters = Filters(
            temperature=torch.zeros(rows, dtype=torch.float32, device=device),
            top_k=torch.zeros(rows, dtype=torch.int32, device=device),
            top_p=torch.ones(rows, dtype=torch.float32, device=device),
            min_p=torch.zeros(rows, dtype=torch.float32, device=device),
        )
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.drawn = torch.zeros(_DRAWN_DEPTH, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.lengths: list[int] = [0] * rows
        self.pages: list[list[int]] = [[] for _ in range(rows)]

    def start_rows(self, new_rows: Sequence[NewRow]) -> None:
        """Reset the slots of newly admitted sequences."""
        if not new_rows:
            return
        for row in new_rows:
            self.lengths[row.slot] = row.num_cached
            self.pages[row.slot] = []
        ints = np.array(
            [[r.slot, r.num_cached, r.rope_offset, r.params.seed, min(r.params.top_k, 2**31 - 1)] for r in new_rows],
            dtype=np.int64,
        )
        floats = np.array([[r.params.temperature, r.params.top_p, r.params.min_p] for r in new_rows], dtype=np.float32)
        slots, lengths, offsets, seeds, top_k = upload(ints.T, self.device).unbind()
        self.length.index_copy_(0, slots, lengths)
        self.rope_offset.index_copy_(0, slots, offsets)
        self.seed.index_copy_(0, slots, seeds)
        self.filters.top_k.index_copy_(0, slots, top_k.int())
        tables = self.filters.temperature, self.filters.top_p, self.filters.min_p
        for table, values in zip(tables, upload(floats.T, self.device), strict=True):
            table.index_copy_(0, slots, values)

    def write_pages(self, page_writes: Sequence[tuple[int, int, list[int]]]) -> list[int]:
        """Put page ids into the rows: (slot, first logical page, pages). A page may be replaced by one of equal content.

        Returns the rows' new last pages, which their tokens do not fill at once.
        """
        if not page_writes:
            return []
        last: list[int] = []
        where: list[int] = []
        what: list[int] = []
        for slot, first, pages in page_writes:
            assert first <= len(self.pages[slot]), "a row's pages have no gaps"
            if first == len(self.pages[slot]):
                last.append(pages[-1])
            self.pages[slot][first : first + len(pages)] = pages
            base = slot * self.max_pages + first
            where += range(base, base + len(pages))
            what += pages
        indices, values = upload(np.array([where, what], dtype=np.int64), self.device).unbind()
        self.page_table.view(-1).index_copy_(0, indices, values.int())
        return last

    def advance(self, slots: torch.Tensor, lengths: torch.Tensor, chunk_ends: torch.Tensor | None = None) -> None:
        """Set the rows' lengths after a step: of decoded `slots`, and [2, n] slots and lengths of prefilled rows."""
        if slots.shape[0]:
            self.length.index_copy_(0, slots, lengths)
        if chunk_ends is not None:
            self.length.index_copy_(0, chunk_ends[0], chunk_ends[1])

    def drawn_tokens(self, slots: Sequence[int]) -> Callable[[], list[int]]:
        """Of the decode step of `slots` that was launched last: a function that waits for it and returns its tokens.

        It must be called before two more steps are launched.
        """
        width = self.drawn.shape[1]
        at = [self.lengths[slot] % _DRAWN_DEPTH * width + slot for slot in slots]
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def read() -> list[int]:
            done.synchronize()
            tokens: list[int] = self.drawn.numpy().reshape(-1)[at].tolist()
            return tokens

        return read


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array as a device tensor. On a GPU the copy is asynchronous from pinned memory that torch keeps alive."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_list(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Host integers as an int64 device tensor; see `upload`."""
    return upload(np.array(values, dtype=np.int64), device)
