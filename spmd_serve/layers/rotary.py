"""Rotary position embedding: the tables for every rope_type of Hugging Face's configs, and the rotation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")  # those that `_frequencies` knows


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding. `kind` is Hugging Face's rope_type, one of ROPE_KINDS."""

    theta: float = 10000.0
    kind: str = "default"
    rotary_dim: int | None = None  # None: the whole head
    params: dict[str, Any] = field(default_factory=dict)  # the scaling dict as in config.json
    original_max_position: int | None = None

    def short_context(self, max_len: int) -> int:
        """Up to how many tokens a sequence has frequencies of its own; 0: one set serves all, up to `max_len` tokens."""
        original = self.original_max_position
        if self.kind not in ("dynamic", "longrope") or original is None or max_len <= original:
            return 0
        same = self.kind == "longrope" and self.params["short_factor"] == self.params["long_factor"]
        return 0 if same else original


def rope_table(rope: RopeConfig, head_dim: int, max_len: int, short_context: int, device: torch.device) -> Tensor:
    """cos and sin of every position, attention scaling included. float32 [short_context + max_len, 2, rotary_dim / 2].

    First the positions of sequences of up to `short_context` tokens, then those of longer ones.

    The frequency scalings follow transformers' modeling_rope_utils.
    """
    dim = rope.rotary_dim or head_dim
    parts = []
    for length in filter(None, (short_context, max_len)):
        inv_freq, scaling = _frequencies(rope, dim, length)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * inv_freq.double()[None, :]
        parts.append(torch.stack((angles.cos(), angles.sin()), dim=1).mul_(scaling))
    return torch.cat(parts).to(device=device, dtype=torch.float32)


def check_rope(rope: RopeConfig, head_dim: int) -> None:
    """Whether the head has pairs to rotate, and the scaling all numbers that it needs.

    Raises:
        LookupError, TypeError, ValueError: it has not.
    """
    dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    if dim % 2 or dim < 2:
        raise ValueError(f"{dim} dimensions of a head are to be rotated, which is no even number of 2 or more")
    _frequencies(rope, dim, 1)


def _frequencies(rope: RopeConfig, dim: int, max_len: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] and the factor on cos and sin."""
    p = rope.params
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / float(p["factor"]), 1.0
    if rope.kind == "dynamic":
        base_len = rope.original_max_position or max_len
        if max_len <= base_len:
            return plain, 1.0
        theta = rope.theta * ((p["factor"] * max_len / base_len) - (p["factor"] - 1)) ** (dim / (dim - 2))
        return 1.0 / theta**exponents, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, dim)
    assert rope.kind == "longrope", f"rope_type {rope.kind} is not in ROPE_KINDS"
    return _longrope(rope, plain, max_len)


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    p, old_len = rope.params, rope.original_max_position
    assert old_len is not None, "llama3 needs original_max_position_embeddings"
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    wavelength = 2 * math.pi / plain
    smooth = (old_len / wavelength - low) / (high - low)
    mixed = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > old_len / low, plain / factor, plain)
    medium = ~(wavelength < old_len / high) & ~(wavelength > old_len / low)
    return torch.where(medium, mixed, scaled)


def _yarn(rope: RopeConfig, plain: Tensor, dim: int) -> tuple[Tensor, float]:
    p = rope.params
    factor = float(p["factor"])
    old_len = rope.original_max_position
    assert old_len is not None, "yarn needs original_max_position_embeddings"

    def correction(rotations: float) -> float:
        return dim * math.log(old_len / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    def mscale(scale: float, m: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * m * math.log(scale) + 1.0

    low: float = correction(p.get("beta_fast") or 32)
    high: float = correction(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    keep = 1 - ramp
    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        if p.get("mscale") and p.get("mscale_all_dim"):
            attention_factor = mscale(factor, p["mscale"]) / mscale(factor, p["mscale_all_dim"])
        else:
            attention_factor = mscale(factor)
        # vLLM reads it and transformers does not: DeepSeek-R1-0528-Qwen3-8B undoes the factor above by it.
        attention_factor *= p.get("attn_factor") or 1.0
    return plain / factor * (1 - keep) + plain * keep, float(attention_factor)


def _longrope(rope: RopeConfig, plain: Tensor, max_len: int) -> tuple[Tensor, float]:
    p = rope.params
    old_len = rope.original_max_position or max_len
    for name in ("long_factor", "short_factor"):
        if len(p[name]) != len(plain):
            raise ValueError(f"{name} has {len(p[name])} numbers where the heads need {len(plain)}")
    long = max_len > old_len
    ext = torch.tensor(p["long_factor"] if long else p["short_factor"], dtype=torch.float32)
    factor = p.get("factor") or max_len / old_len
    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(old_len)) if factor > 1 else 1.0
    return plain / ext, float(attention_factor)


def rope_factors(table: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The step's factors for `rotate`: cos [tokens, 1, d] and signed sin [tokens, 1, d], d = rotary_dim."""
    cos, sin = table[positions].unbind(dim=1)
    return torch.cat((cos, cos), dim=-1).to(dtype)[:, None], torch.cat((-sin, sin), dim=-1).to(dtype)[:, None]


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate the first d features of each head (half-split pairs). x: [tokens, heads, head_dim] -> same."""
    d = cos.shape[-1]
    part = x if d == x.shape[-1] else x[..., :d]
    rotated = torch.addcmul(part * cos, part.roll(d // 2, dims=-1), signed_sin)  # rolled: the halves are swapped
    return rotated if d == x.shape[-1] else torch.cat((rotated, x[..., d:]), dim=-1)
