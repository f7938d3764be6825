"""Programmatic dependent launch: the next kernel starts while this one still runs, and waits where it needs its result.

The rule that makes it safe: every kernel waits for its predecessor (`wait_for_inputs`) in every program, and only then
lets its successor start. So when a kernel runs its code before the wait, all kernels up to the last but one have
finished; the predecessor alone may still be running. Before the wait a kernel may read constants (weights, tables) and
nothing else.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


@functools.cache
def _pdl() -> bool:
    return not INTERPRETED and torch.cuda.get_device_capability()[0] >= 9


def launch_options() -> dict[str, Any]:
    """Keyword arguments for every launch: the constexpr PDL, and the launch attribute that goes with it."""
    return {"PDL": True, "launch_pdl": True} if _pdl() else {"PDL": False}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Before the first access to anything that an earlier kernel wrote or may still read."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
