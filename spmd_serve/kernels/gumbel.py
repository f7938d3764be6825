"""Sampling by the Gumbel-max trick with counter-based noise, in one pass over the logits.

    token = argmax_v  logit[v] / temperature + G(seed, position, v)

is an exact draw from softmax(logit / temperature) when the G are independent standard Gumbel numbers (Gumbel 1954;
Maddison, Tarlow & Minka 2014). Here G is a pure function of its three arguments, so that a token depends on nothing
else: not on its row, the batch, the rank that holds vocabulary index v, or the device. No softmax, no sort, no stream
of random numbers.

The function, in integers exactly alike on the CPU and the GPU:
    key  = splitmix64(splitmix64(seed) ^ position)               64 bits a row (Steele, Lea & Flood 2014)
    hash = two multiply-xorshift rounds over v, keyed by both halves of the key (after C. Wellons, "hash prospector")
    u    = (top 31 bits of hash + 1/2) / 2**31 in (0, 1);  E = -log1p(-u) is exponential;  G = -log(E)
Taking E from 1 - u keeps 31 bits of resolution where it matters: at the small E that win.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Shared with the Triton kernel. As signed numbers, because torch's integers are signed and wrap.
GOLDEN64 = 0x9E3779B97F4A7C15 - (1 << 64)
MIX64_A = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX64_B = 0x94D049BB133111EB - (1 << 64)
GOLDEN32 = 0x9E3779B1 - (1 << 32)
MIX32_A = 0x21F0AAAD
MIX32_B = 0xD35A2D97 - (1 << 32)
LARGEST_BELOW_ONE = 1.0 - 2.0**-24

# Elements of noise that the CPU makes at a time: the scratch (three arrays of 4 bytes) stays in a core's L2.
_CPU_BLOCK = 1 << 16


def gumbel_argmax(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, vocab_offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Each row's best noisy logit and its vocabulary index; the lowest index wins ties.

    Args:
        logits: [B, V], any float dtype; finite or -inf (a filtered token). V may be 0 (a rank that owns no rows).
        temperature: [B] float32; 0 is greedy (the plain argmax, no noise).
        seeds, positions: [B] int64; position is that of the token being sampled.
        vocab_offset: vocabulary index of logits[:, 0], when V is one rank's shard.

    Returns:
        values [B] float32: logit / temperature + G, or the logit itself in a greedy row; -inf where V is 0.
        indices [B] int64: in the whole vocabulary. The best pair over shards is the best over the vocabulary.
    """
    return gumbel_argmax_torch(logits, temperature, seeds, positions, vocab_offset)


def gumbel_argmax_torch(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, vocab_offset: int = 0
) -> tuple[Tensor, Tensor]:
    """`gumbel_argmax` in plain torch: the CPU path and the reference of the GPU kernel. Synchronises on a GPU."""
    rows, vocab = logits.shape
    if vocab == 0:
        values = torch.full((rows,), -torch.inf, dtype=torch.float32, device=logits.device)
        return values, torch.full((rows,), vocab_offset, dtype=torch.int64, device=logits.device)
    best, index = logits.max(dim=-1)
    best = best.float()
    noisy = torch.nonzero(temperature > 0).flatten()
    if noisy.numel():
        keys = row_keys(seeds[noisy], positions[noisy])
        inverse = 1.0 / temperature[noisy]
        for i, row in enumerate(noisy.tolist()):  # a row at a time: its scratch stays in cache
            for start in range(0, vocab, _CPU_BLOCK):
                block = logits[row, start : start + _CPU_BLOCK]
                score = gumbel_noise(keys[i], vocab_offset + start, block.shape[0])
                score += block.float() * inverse[i]
                value, where = score.max(dim=-1)
                if start == 0 or value > best[row]:
                    best[row], index[row] = value, where + start
    return best, index + vocab_offset


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The 64-bit noise key of each row: int64 [B] from int64 [B], [B]."""
    return _splitmix64(_splitmix64(seeds) ^ positions)


def gumbel_noise(key: Tensor, start: int, count: int) -> Tensor:
    """Standard Gumbel noise of vocabulary indices start .. start+count-1: [count] float32. `key`: int64 scalar."""
    u = noise_bits(key, start, count).float()
    u += 0.5
    u *= 2.0**-31
    u.clamp_(max=LARGEST_BELOW_ONE)
    return u.neg_().log1p_().neg_().log_().neg_()


def noise_bits(key: Tensor, start: int, count: int) -> Tensor:
    """The 31 random bits behind the noise: [count] int32, not negative."""
    low, high = key.reshape(1).view(torch.int32).unbind()  # little-endian, as every platform that torch supports
    x = torch.arange(start, start + count, dtype=torch.int32, device=key.device)
    shifted = torch.empty_like(x)
    x.mul_(GOLDEN32).add_(low)
    _xor_shift(x, 16, shifted)
    x.mul_(MIX32_A)
    _xor_shift(x, 15, shifted)
    x.bitwise_xor_(high).mul_(MIX32_B)
    _xor_shift(x, 15, shifted)
    return x.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)


def _xor_shift(x: Tensor, by: int, scratch: Tensor) -> None:
    """x ^= x >> by (logical, int32), in place."""
    torch.bitwise_right_shift(x, by, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - by)) - 1))


def _splitmix64(x: Tensor) -> Tensor:
    x = x + GOLDEN64
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MIX64_A
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MIX64_B
    return x ^ ((x >> 31) & ((1 << 33) - 1))
