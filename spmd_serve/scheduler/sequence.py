"""One request's state while the scheduler has it."""

from __future__ import annotations

from array import array
from dataclasses import InitVar, dataclass, field
from enum import Enum

from spmd_serve.types import NewRow, Request, SamplingParams


class SequenceStatus(Enum):
    """Where a sequence is in its life. WAITING -> PREFILL -> DECODE -> LAST -> FINISHED, and back to WAITING by preemption."""

    WAITING = 1  # in the queue: holds no row and no pages
    PREFILL = 2  # has a row; tokens that are known are not all planned
    DECODE = 3  # each step plans one token
    LAST = 4  # all tokens that it may have are planned; ends with the commit of the last one at the latest
    FINISHED = 5


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """A request, its tokens, and its hold on a row and pages. Only the scheduler mutates it.

    Attributes:
        order: (priority, arrival number); lower runs first and is preempted last.
        limit: most tokens that `tokens` may reach.
        switch_at: with more tokens than this it needs other rotary frequencies, and is computed anew.
        stop_ids: token ids that end it, once more than `min_length` tokens are there.
        use_cache: whether it takes pages from the prefix cache and leaves its own there.
        synchronous: its next step must wait for the commit of the last one (a grammar advances on the CPU).
        tokens: prompt and all committed output, int32.
        size_order: (priority, tokens when it came into the queue, arrival number); lower passes others there.
        slot, pages: its row and page table while it runs.
        planned: leading positions whose KV is computed or on its way.
        bound: decoding goes on without a thought while planned < bound.
        prefill_end: how many tokens were known when it got its row; beyond that it decodes.
        committed_chunk: end of the last chunk that was committed.
        num_shared: leading pages that are in the prefix cache.
        blocked_at: (available pages, version of the prefix cache) when it last found too few pages.
        cached_tokens: prompt tokens that its first prefill found in the cache; None before that.
        started: whether its first token was put out.
        logprobs_end: prompt positions below this have had their logprobs put out.
        rope_offset: where its first position stands in the rotary tables.
    """

    request: InitVar[Request]
    order: tuple[int, int]
    deadline: float | None
    limit: int
    switch_at: int
    stop_ids: frozenset[int]
    use_cache: bool
    synchronous: bool
    uid: int = field(init=False)
    params: SamplingParams = field(init=False)
    salt: bytes = field(init=False)
    tokens: array[int] = field(init=False)
    num_prompt: int = field(init=False)
    size_order: tuple[int, int, int] = field(init=False)
    min_length: int = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    planned: int = 0
    bound: int = 0
    prefill_end: int = 0
    committed_chunk: int = 0
    num_shared: int = 0
    blocked_at: tuple[int, int] = (-1, -1)
    cached_tokens: int | None = None
    started: bool = False
    logprobs_end: int = 0
    rope_offset: int = 0

    def __post_init__(self, request: Request) -> None:
        self.uid = request.uid
        self.params = request.params
        self.salt = request.cache_salt.encode()
        self.tokens = request.prompt_ids()
        self.num_prompt = len(self.tokens)
        self.size_order = (self.order[0], self.num_prompt, self.order[1])
        self.min_length = self.num_prompt + self.params.min_tokens

    def requeue(self) -> None:
        """It waits again, and all that it has said is to be computed anew."""
        self.status = SequenceStatus.WAITING
        self.size_order = (self.order[0], len(self.tokens), self.order[1])

    def become_long(self) -> None:
        """Take the rotary frequencies of sequences with more than `switch_at` tokens. Before it gets a row: K and V differ."""
        self.rope_offset, self.switch_at = self.switch_at, self.limit
        self.salt = b"\xff" + self.salt  # no text's UTF-8 begins so

    def __lt__(self, other: Sequence) -> bool:
        """Order of service: for bisect in the scheduler's sorted lists."""
        return self.order < other.order

    def new_row(self) -> NewRow:
        """What the engine must know when the sequence has got a row and pages."""
        return NewRow(
            self.slot,
            self.uid,
            self.params,
            self.tokens,
            self.prefill_end,
            self.num_prompt,
            self.planned,
            self.rope_offset,
        )

    @property
    def left_order(self) -> tuple[int, int, int]:
        """size_order by the tokens that its prefill has left to plan."""
        return (self.order[0], self.prefill_end - self.planned, self.order[1])

    @property
    def num_computed(self) -> int:
        """Leading positions whose KV is computed and committed, and whose tokens are therefore known."""
        if self.committed_chunk < self.prefill_end:
            return self.committed_chunk
        return len(self.tokens) - 1  # the last token's own KV comes with the next step
