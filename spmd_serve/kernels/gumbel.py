"""Sampling by the Gumbel-max trick with counter-based noise, in one pass over the logits.

    token = argmax_v  logit[v] / temperature + G(seed, position, v)

is an exact draw from softmax(logit / temperature) when the G are independent standard Gumbel numbers (Gumbel 1954;
Maddison, Tarlow & Minka 2014). Here G is a pure function of its three arguments, so that a token depends on nothing
else: not on its row, the batch, the rank that holds vocabulary index v, or the device. No softmax, no sort, no stream
of random numbers.

The function, up to u bit for bit alike on the CPU and the GPU:
    key  = splitmix64(splitmix64(seed) ^ position)               64 bits a row (Steele, Lea & Flood 2014)
    hash = two multiply-xorshift rounds over v, keyed by both halves of the key (after C. Wellons, "hash prospector")
    u    = (top 31 bits of hash + 1/2) / 2**31 in (0, 1);  E = -log1p(-u) is exponential;  G = -log(E)
Taking E from 1 - u keeps 31 bits of resolution where it matters: at the small E that win.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spmd_serve.types import NOT_A_TOKEN

# Shared with the Triton kernel.
GOLDEN64 = 0x9E3779B97F4A7C15
MIX64_A = 0xBF58476D1CE4E5B9
MIX64_B = 0x94D049BB133111EB
GOLDEN32 = 0x9E3779B1
MIX32_A = 0x21F0AAAD
MIX32_B = 0xD35A2D97
LARGEST_BELOW_ONE = 1.0 - 2.0**-24

Floats = npt.NDArray[np.float32]

_CPU_BLOCK = 1 << 15  # vocabulary entries at a time, so that the scratch arrays stay in a core's L2
_LN2 = float(np.log(2.0))


def gumbel_argmax(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    vocab_offset: int = 0,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each row's best noisy logit and its vocabulary index; the lowest index wins ties.

    Args:
        logits: [B, V], any float dtype; -inf is a filtered token. V may be 0 (a rank that owns no rows).
        temperature: [B] float32; 0 is greedy (the plain argmax, no noise).
        seeds, positions: [B] int64; position is that of the token being sampled.
        vocab_offset: vocabulary index of logits[:, 0], when V is one rank's shard.
        slots: [B] int64: temperature and seeds are tables, and these are the rows' places in them.

    Returns:
        values [B] float32: logit / temperature + G, or the logit itself in a greedy row; -inf where V is 0.
        indices [B] int64: in the whole vocabulary. The best pair over shards is the best over the vocabulary.
        A row with NaN or +inf in it has the value +inf and the index NOT_A_TOKEN, a pair that no other shard's beats.
    """
    if logits.is_cuda:
        from spmd_serve.kernels.gpu import gumbel as gpu

        return gpu.gumbel_argmax(logits, temperature, seeds, positions, vocab_offset, slots)
    if slots is not None:
        temperature, seeds = temperature[slots], seeds[slots]
    return gumbel_argmax_cpu(logits, temperature, seeds, positions, vocab_offset)


def gumbel_argmax_cpu(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, vocab_offset: int = 0
) -> tuple[Tensor, Tensor]:
    """`gumbel_argmax` on the CPU, and the reference of the GPU kernel.

    numpy and not torch: unsigned arithmetic that wraps, and no thread pool to wake for some tens of microseconds.
    """
    rows, vocab = logits.shape
    values = np.full(rows, -np.inf, dtype=np.float32)
    indices = np.zeros(rows, dtype=np.int64)
    if vocab:
        scores: Floats = logits.float().numpy()
        draws = zip(temperature.tolist(), seeds.tolist(), positions.tolist(), strict=True)
        for row, (t, seed, position) in enumerate(draws):
            if t > 0:
                inverse = np.float32(1.0) / np.float32(t)
                values[row], indices[row] = _best_noisy(scores[row], inverse, row_key(seed, position), vocab_offset)
            else:
                indices[row] = best = int(scores[row].argmax())  # the first NaN, if there is one
                values[row] = scores[row, best]
    broken = ~(values < np.inf)
    values[broken] = np.inf
    return torch.from_numpy(values), torch.from_numpy(np.where(broken, NOT_A_TOKEN, indices + vocab_offset))


def row_key(seed: int, position: int) -> int:
    """The 64-bit noise key of a row."""
    return _splitmix64(_splitmix64(seed) ^ position)


def gumbel_noise(u: Floats) -> Floats:
    """Standard Gumbel numbers from the uniforms of `uniforms`."""
    return np.negative(np.log(np.negative(np.log1p(np.negative(u)))))


def uniforms(key: int, start: int, count: int) -> Floats:
    """The uniform numbers in (0, 1) behind the noise of vocabulary indices start .. start+count-1: [count] float32."""
    x = np.arange(start, start + count, dtype=np.uint32)
    shifted = np.empty_like(x)
    x *= np.uint32(GOLDEN32)
    x += np.uint32(key & 0xFFFFFFFF)
    x ^= np.right_shift(x, 16, out=shifted)
    x *= np.uint32(MIX32_A)
    x ^= np.right_shift(x, 15, out=shifted)
    x ^= np.uint32(key >> 32)
    x *= np.uint32(MIX32_B)
    x ^= np.right_shift(x, 15, out=shifted)
    x >>= 1
    u = x.astype(np.float32)
    u += np.float32(0.5)
    u *= np.float32(2.0**-31)
    return np.minimum(u, np.float32(LARGEST_BELOW_ONE), out=u)


def _best_noisy(logits: Floats, inverse: Any, key: int, vocab_offset: int) -> tuple[Any, int]:
    """Value and local index of the best of logits * inverse + G; the lowest index wins ties.

    Two logarithms for each entry would be most of the cost. E >= u, and a float's bits, read as an integer, are a
    piecewise linear log2 from below: that bounds every score from above for a tenth of the work, and only the few
    entries whose bound reaches the best one's score need the true value. The result is the same, by construction.
    The value is NaN or +inf if a logit is.
    """
    best: Any = -np.inf
    where = 0
    for start in range(0, len(logits), _CPU_BLOCK):
        scaled = logits[start : start + _CPU_BLOCK] * inverse
        u = uniforms(key, vocab_offset + start, len(scaled))
        bound = u.view(np.int32).astype(np.float32)
        bound *= np.float32(-_LN2 * 2.0**-23)
        bound += np.float32(127 * _LN2 + 1e-4)  # the 1e-4 covers all rounding in here
        bound += scaled
        lead = bound.argmax()
        if not bound[lead] < np.inf:
            return bound[lead], 0
        floor = scaled[lead] + gumbel_noise(u[lead : lead + 1])[0]
        few = np.flatnonzero(bound >= max(floor, best))
        if len(few):
            exact = scaled[few] + gumbel_noise(u[few])
            i = int(exact.argmax())
            if exact[i] > best:
                best, where = exact[i], start + int(few[i])
    return best, where


def _splitmix64(x: int) -> int:
    mask = (1 << 64) - 1
    x = (x + GOLDEN64) & mask
    x = ((x ^ (x >> 30)) * MIX64_A) & mask
    x = ((x ^ (x >> 27)) * MIX64_B) & mask
    return x ^ (x >> 31)
