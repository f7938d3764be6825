"""Plain data that all sides share. No torch, no behaviour beyond trivial accessors.

Everything here is small, picklable and encodable by msgspec: it crosses the control channel (StepInput), the sockets
inside rank 0 (Request, Abort, StepOutput) or the border between scheduler and engine (ScheduledBatch, StepTokens).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

GREEDY_BELOW = 1e-5  # temperatures under it would overflow logits / T
NOT_A_TOKEN = 2**31 - 1  # what a row draws whose logits are not all numbers: some are NaN, or the best is infinite
# What sampling parameters may be at most, over HTTP as in Python.
MAX_TEMPERATURE = 100
MAX_PENALTY = 2  # presence and frequency, in either direction
MAX_REPETITION_PENALTY = 100
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it: by 1e-40 they would be infinite
MAX_BIAS = 100  # in either direction
MAX_SEED = 2**63 - 1


class FinishReason(StrEnum):
    """Why a request ended. Exactly one is sent for every accepted request."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ServicePhase(IntEnum):
    """What rank 0 wants the whole job to do; carried in StepInput. It only ever grows."""

    RUN = 0
    DRAIN = 1  # accept nothing new, let running requests finish
    STOP = 2  # end what is left with an error and leave the loop


def _is_int(value: object) -> bool:
    """The engine counts and indexes with it: 2.5 or True would fail there, in the midst of a step."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: int | None, most: int) -> bool:
    return value is None or (_is_int(value) and 0 <= value <= most)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. All values are validated by the frontend, or by `problem`; `seed` is always concrete.

    A sampled token is a pure function of (logits, these, seed, position). A field that changes logits must make `is_filtered` or
    `needs_extras` true: rows without either are drawn by temperature alone.
    """

    max_tokens: int  # new tokens, already clamped to the context
    temperature: float = 1.0  # 0 is greedy; what is under GREEDY_BELOW becomes 0
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # 0 <= seed <= MAX_SEED
    stop_token_ids: tuple[int, ...] = ()  # beside the model's EOS ids
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # top-n logprobs of each output token; 0 means the chosen token's alone
    prompt_logprobs: int | None = None  # the same for prompt tokens
    grammar: str | None = None  # llguidance grammar (serialised), validated on rank 0

    def __post_init__(self) -> None:
        if 0 < self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def is_filtered(self) -> bool:
        """Whether top-k, top-p or min-p may keep tokens from being drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def needs_extras(self) -> bool:
        """Whether a row has state or results of its own: penalties, bias, min_tokens, a grammar, log-probabilities."""
        return bool(
            self.min_tokens
            or self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.logprobs is not None
            or self.prompt_logprobs is not None
            or self.grammar is not None
        )

    def stop_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end the sequence once there are min_tokens; `eos_token_ids` are the model's."""
        return frozenset(self.stop_token_ids) if self.ignore_eos else eos_token_ids.union(self.stop_token_ids)

    def problem(self, vocab_size: int) -> str:
        """What is wrong with the values, with the field's name; empty if nothing is. frontend/schemas.py says the same of HTTP."""
        ids, any_id = range(vocab_size), f"ids from 0 to {vocab_size - 1}"
        top = f"an integer from 0 to {vocab_size}"
        penalties = f"from -{MAX_PENALTY} to {MAX_PENALTY}"
        bounds = {
            "max_tokens": (_is_int(self.max_tokens) and self.max_tokens >= 0, "an integer, 0 or more"),
            "temperature": (0 <= self.temperature <= MAX_TEMPERATURE, f"from 0 to {MAX_TEMPERATURE}"),
            "top_k": (_is_int(self.top_k) and self.top_k >= 0, "an integer, 0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "seed": (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED, "an integer from 0 to 2**63 - 1"),
            "min_tokens": (
                _is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens,
                "an integer from 0 to max_tokens",
            ),
            "presence_penalty": (abs(self.presence_penalty) <= MAX_PENALTY, penalties),
            "frequency_penalty": (abs(self.frequency_penalty) <= MAX_PENALTY, penalties),
            "repetition_penalty": (
                MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
                f"from {MIN_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY}",
            ),
            "logprobs": (_is_count(self.logprobs, vocab_size), top),
            "prompt_logprobs": (_is_count(self.prompt_logprobs, vocab_size), top),
            "grammar": (self.grammar is None or isinstance(self.grammar, str), "a text"),
            "stop_token_ids": (all(_is_int(i) and i in ids for i in self.stop_token_ids), any_id),
            "logit_bias": (
                all(_is_int(i) and i in ids and abs(bias) <= MAX_BIAS for i, bias in self.logit_bias),
                f"{any_id} with biases from -{MAX_BIAS} to {MAX_BIAS}",
            ),
        }
        return next((f"{name} must be {what}" for name, (right, what) in bounds.items() if not right), "")


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `n` choices are n Requests.

    Attributes:
        uid: unique over the job's life; the frontend's index is in the bits from 40 up, a counter below.
        prompt: token ids as little-endian int32 bytes.
        deadline: rank 0's time.monotonic() in seconds after which the request ends with an error; None is never.
        priority: lower runs first (only with --schedule priority).
        cache_salt: requests with different salts never share prefix-cache pages.
    """

    uid: int
    prompt: bytes
    params: SamplingParams
    deadline: float | None = None
    priority: int = 0
    cache_salt: str = ""

    def prompt_ids(self) -> array[int]:
        """The prompt as an int32 array."""
        ids = array("i")
        ids.frombytes(self.prompt)
        return ids


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request early. `reason` STOP: the frontend saw a stop string; ABORT: the client left."""

    uid: int
    reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True, slots=True)
class StepDigest:
    """Rolling CRCs of what was decided up to and including `step`; see scheduler/digest.py."""

    step: int
    rows: int
    pages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """All that may influence a scheduling decision, made on rank 0 and broadcast to every rank.

    Attributes:
        step: the step number that this input opens; while it travels, the one at which it set out.
        now: rank 0's time.monotonic() in seconds.
        free_steps: how many of the following steps run without an exchange (pure decode, no arrivals looked at).
        digest: rank 0's digest of an earlier step, or None.
    """

    step: int
    now: float
    arrivals: tuple[Request, ...] = ()
    aborts: tuple[Abort, ...] = ()
    phase: ServicePhase = ServicePhase.RUN
    free_steps: int = 0
    digest: StepDigest | None = None


# ---- scheduler -> engine ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence that got a row ("slot") of the engine's row table in this step (first admission or after preemption).

    Attributes:
        slot: row index, 0 <= slot < max_num_seqs.
        tokens: all known tokens (prompt and output so far). Owned by the scheduler, which appends to it later:
            the engine reads `tokens[:num_tokens]` while handling this batch and keeps no reference.
        num_tokens: how many of `tokens` are known now.
        num_prompt: how many of them are prompt.
        num_cached: leading tokens whose KV is already in the row's pages (prefix hit).
        rope_offset: where its first position stands in the rotary tables.
    """

    slot: int
    uid: int
    params: SamplingParams
    tokens: array[int]
    num_tokens: int
    num_prompt: int
    num_cached: int
    rope_offset: int = 0


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens of one row to compute in this step: positions start .. start+len(tokens)-1.

    `samples` is True when this chunk reaches the last known token, so that a new token is sampled from its last row.
    """

    slot: int
    start: int
    tokens: array[int]
    samples: bool


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work, decided alike on every rank. The engine applies new_rows, then page_writes, then computes.

    The sampled rows, in order: every row of `decode_slots`, then every chunk with `samples`.

    Attributes:
        decode_slots: rows that compute one token each: their latest sampled token, at the row's current length. With
            overlap that token may still be on the device only.
        page_writes: (slot, first logical page index, page ids) to put into the page table before computing.
    """

    step: int
    decode_slots: list[int]
    chunks: list[PrefillChunk] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    page_writes: list[tuple[int, int, list[int]]] = field(default_factory=list)

    @property
    def num_sampled(self) -> int:
        """Tokens that the step samples."""
        return len(self.decode_slots) + sum(1 for c in self.chunks if c.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decode_slots) + sum(len(c.tokens) for c in self.chunks)


# ---- engine -> scheduler ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the chosen (or prompt) token, and of the top n (ids and values, best first)."""

    logprob: float
    rank: int
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step sampled: `tokens[i]` belongs to the batch's i-th sampled row. It may be NOT_A_TOKEN.

    Attributes:
        logprobs: sampled-row index -> logprobs, for the rows that asked.
        prompt_logprobs: chunk index -> logprobs of the tokens at positions start+1 .. start+len (those that the prompt
            still has), for the rows that asked.
        grammar_ends: sampled-row index -> how a row's grammar ended with this token: "" is complete, else what went wrong.
    """

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    grammar_ends: dict[int, str] = field(default_factory=dict)


# ---- rank 0: step loop -> frontend --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finish:
    """The one terminal output of a request. `message` and `code` are set when reason is ERROR."""

    uid: int
    reason: FinishReason
    message: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class StepStats:
    """Gauges and counters of the scheduler and the loop at the end of a step, for /metrics. Times in seconds.

    All that the frontend knows of the engine's state. Scheduler.stats fills it in, and StepLoop the times.

    Attributes:
        preempted_total: times that a running sequence was put back to wait.
        pages_free, pages_cached: see scheduler/page_pool.py; the others of `pages_total` are used.
        prompt_tokens_total, cached_tokens_total: of sequences whose first token is out; those found in the prefix cache.
        step_time: without the exchange; 0 when nothing was computed.
        exchange_time: of this step's exchange; 0 when it had none.
        rank_exchange_times: the last exchange of each rank, as its last beat told. A rank that waits long in it is early:
            the slowest rank has the shortest time.
    """

    step: int = 0
    running: int = 0
    waiting: int = 0
    preempted_total: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generation_tokens_total: int = 0
    step_time: float = 0.0
    exchange_time: float = 0.0
    rank_exchange_times: tuple[float, ...] = ()


@dataclass(slots=True)
class StepOutput:
    """What one step produced, in columns (a row object per token would cost more than scheduling it).

    Attributes:
        uids, tokens: one row for each produced token, in commit order.
        started: (uid, cached prompt tokens) when a request's first token is in this output.
        logprobs: row index -> logprobs.
        prompt_logprobs: (uid, first position, logprobs of consecutive prompt tokens); may come over several steps.
        finished: terminal outputs; a request's last token, if it produced one now, is among the rows of this output.
    """

    step: int
    uids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    started: list[tuple[int, int]] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = field(default_factory=list)
    finished: list[Finish] = field(default_factory=list)
    stats: StepStats | None = None


class ServiceState(IntEnum):
    """What /health tells. It only ever grows."""

    STARTING = 0
    READY = 1
    DRAINING = 2
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tokens requests may have: the frontend refuses by it before a request waits, the scheduler in any case.

    Attributes:
        max_model_len: context length in tokens.
        pool: tokens that the KV pool holds.
    """

    max_model_len: int
    pool: int

    @property
    def longest(self) -> int:
        """Of a prompt with its answer. (The last token's KV is never needed, but one number for the pool is what people expect.)"""
        return min(self.max_model_len, self.pool)

    def longest_prompt(self, max_tokens: int) -> int:
        """Of a prompt alone; if there is to be an answer, it has room for a token."""
        return self.longest - (max_tokens > 0)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the frontend must know of the model that is served.

    Attributes:
        name: the name in the API.
        folder: local folder with the tokenizer files and the chat template.
        lengths: of requests; the pool's is far too large where it is sized by memory, which is known once the weights are loaded.
        generation_defaults: temperature, top_k, top_p... from the model's generation_config.json.
        created: Unix time of the start.
    """

    name: str
    folder: str
    lengths: Lengths
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float] = field(default_factory=dict)
    created: int = 0
