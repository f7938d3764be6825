"""The work that offline benchmarks do and that the roofline is computed for: how many tokens go in and come out."""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass

ENGINE_OPTIONS = "Options that are not listed go to the engine (python -m spmd_serve --help)."  # of a benchmark's help
MAX_TOKEN_ID = 10_000  # prompts are random ids below it, which every vocabulary has


@dataclass(frozen=True)
class Workload:
    """Requests that are submitted at once: `lengths` holds (prompt tokens, output tokens) of each."""

    name: str
    lengths: tuple[tuple[int, int], ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt for prompt, _ in self.lengths)

    @property
    def output_tokens(self) -> int:
        return sum(output for _, output in self.lengths)

    def prompts(self, seed: int) -> list[list[int]]:
        """Random token ids. Another seed gives prompts that share no prefix with these."""
        rng = random.Random(seed)
        return [[rng.randrange(MAX_TOKEN_ID) for _ in range(prompt)] for prompt, _ in self.lengths]


def parse_count(text: str, least: int = 1) -> int:
    """'8' -> 8, of what there must be at least so many."""
    count = int(text) if text.isdecimal() else -1
    if count < least:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of {least} or more")
    return count


def parse_rate(text: str, or_zero: bool = False) -> float:
    """'3.35' -> 3.35"""
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 <= rate < math.inf or (rate == 0 and not or_zero):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number {'of 0 or more' if or_zero else 'above 0'}")
    return rate


def parse_counts(text: str) -> list[int]:
    """'1,8' -> [1, 8]"""
    return [parse_count(part) for part in text.split(",")]


def parse_range(text: str) -> tuple[int, int]:
    """'100,1024' -> (100, 1024), both inclusive; '128' -> (128, 128)."""
    low, _, high = text.partition(",")
    try:
        found = int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is neither N nor LOW,HIGH") from None
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"'{text}' must be 1 or more, the lower bound first")
    return found


def make_workload(
    name: str, count: int, prompt_tokens: tuple[int, int], output_tokens: tuple[int, int], seed: int = 0
) -> Workload:
    """`count` requests whose lengths are drawn evenly from inclusive ranges."""
    rng = random.Random(seed)
    return Workload(name, tuple((rng.randint(*prompt_tokens), rng.randint(*output_tokens)) for _ in range(count)))


def decode(batch_size: int, prompt_tokens: int = 128, output_tokens: int = 512) -> Workload:
    """`batch_size` equal requests, most of whose steps decode."""
    lengths = ((prompt_tokens, output_tokens),) * batch_size
    return Workload(f"decode bs={batch_size}", lengths)


def offline_256() -> Workload:
    """256 requests of 100 to 1024 prompt and output tokens: the lengths that other engines' offline benchmark draws.

    There, the prompts' token ids come from the same generator, so they are drawn here too.
    """
    rng = random.Random(0)
    prompts = [len([rng.randint(0, MAX_TOKEN_ID) for _ in range(rng.randint(100, 1024))]) for _ in range(256)]
    return Workload("offline-256", tuple((prompt, rng.randint(100, 1024)) for prompt in prompts))
