"""How a step's prefill tokens are dealt to prompts, so that neither the oldest nor the shortest waits for long."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from spmd_serve.scheduler.sequence import Sequence
from spmd_serve.scheduler.waiting_queue import WaitingQueue


def deal_prefill(
    budget: int,
    share: float,
    prefilling: list[Sequence],
    waiting: WaitingQueue,
    admit: Callable[[Sequence, Sequence | None], bool],
) -> list[tuple[Sequence, int]]:
    """Deal `budget` tokens to prompts, admitting those that wait while there are tokens, rows and pages.

    `share` of them go in order of service. The rest goes to the others, the shortest first, so that a short prompt passes
    a long one; the oldest goes on all the same, and everyone is the oldest some day. What nobody else wants goes back to
    the one that was cut.

    Args:
        prefilling: sequences that have a row and whose prompts are not planned to the end.
        admit: moves a sequence from `waiting` to a row; False if it must go on waiting. Then those behind it may pass, the
            shortest first, until one of them must wait as well: the second argument is the one that they pass.

    Returns:
        Sequences and their numbers of tokens, each at least 1; a sequence occurs once.
    """
    parts: list[tuple[Sequence, int]] = []
    rows = prefilling[:]
    held_up: Sequence | None = None
    left = max(1, int(share * budget)) if budget else 0
    reserve = budget - left
    cut = 0
    for in_order in (True, False):
        rows.sort(key=attrgetter("order" if in_order else "left_order"), reverse=True)  # the next one is the last
        may_admit = True
        while left > 0:
            head = None
            if may_admit:
                head = waiting.first if in_order else waiting.shortest(but=held_up)
            if head is not None and not (rows and _goes_first(rows[-1], head, in_order)):
                may_admit = admit(head, held_up)
                if not may_admit:
                    held_up = held_up or head
                    continue
                sequence = head
            elif rows:
                sequence = rows.pop()
            else:
                break
            size = min(sequence.prefill_end - sequence.planned, left)
            parts.append((sequence, size))
            left -= size
        if in_order:
            left += reserve
            cut = len(parts) - 1
    if left > 0 and parts:
        sequence, size = parts[cut]
        parts[cut] = (sequence, min(sequence.prefill_end - sequence.planned, size + left))
    return parts


def _goes_first(running: Sequence, waiting: Sequence, in_order: bool) -> bool:
    return running < waiting if in_order else running.left_order < waiting.size_order
