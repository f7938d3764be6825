"""What only some rows need: penalties, logit bias, min_tokens, grammars, prompt logprobs. Other rows cost nothing here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_serve.engine.grammar import Grammars, GrammarState
from spmd_serve.types import NewRow, SamplingParams


@dataclass
class RowExtras:
    """Mutable state of one row whose params need them. Tensors cover this rank's vocabulary rows.

    `generated` counts sampled tokens, those of launched steps included; `prompt` is kept for prompt logprobs only.
    """

    params: SamplingParams
    vocab: range
    generated: int
    counts: Tensor | None = None  # int32 [shard], of output tokens
    in_prompt: Tensor | None = None  # bool [shard]
    bias: tuple[Tensor, Tensor] | None = None  # int64 [n], float32 [n]
    stop_ids: Tensor | None = None  # int64 [n], hidden until min_tokens are there
    grammar: GrammarState | None = None
    early_stops: tuple[int, ...] = ()  # with a grammar, instead of stop_ids: those of the whole vocabulary
    prompt: list[int] | None = None

    @classmethod
    def create(
        cls, row: NewRow, vocab: range, eos_token_ids: tuple[int, ...], device: torch.device, grammars: Grammars
    ) -> RowExtras:
        """The extras of a row that begins, for this rank's rows `vocab` of the vocabulary."""
        p = row.params
        tokens = row.tokens[: row.num_tokens].tolist()
        prompt, output = tokens[: row.num_prompt], tokens[row.num_prompt :]
        extras = cls(params=p, vocab=vocab, generated=len(output))
        if p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0:
            extras.counts = _count(output, vocab, device)
            extras.in_prompt = _count(prompt, vocab, device) > 0
        mine = [(t - vocab.start, b) for t, b in p.logit_bias if t in vocab]
        if mine:
            ids, values = zip(*mine, strict=True)
            extras.bias = torch.tensor(ids, device=device), torch.tensor(values, dtype=torch.float32, device=device)
        if p.grammar is not None:
            extras.grammar = grammars.start(p.grammar, output)
            extras.early_stops = (*p.stop_token_ids, *eos_token_ids, *extras.grammar.eos_token_ids)
        elif p.min_tokens:
            stops = [t - vocab.start for t in sorted(p.stop_ids(frozenset(eos_token_ids))) if t in vocab]
            extras.stop_ids = torch.tensor(stops, dtype=torch.int64, device=device)
        if p.prompt_logprobs is not None:
            extras.prompt = prompt
        return extras

    def process_(self, logits: Tensor) -> None:
        """Change this row's logits, float32 [shard], in place."""
        p = self.params
        if self.counts is not None and self.in_prompt is not None:
            if p.repetition_penalty != 1.0:
                seen = self.in_prompt | (self.counts > 0)
                penalised = torch.where(logits > 0, logits / p.repetition_penalty, logits * p.repetition_penalty)
                logits.copy_(torch.where(seen, penalised, logits))
            logits -= p.frequency_penalty * self.counts + p.presence_penalty * (self.counts > 0)
        if self.bias is not None:
            logits.index_add_(0, *self.bias)
        if self.stop_ids is not None and self.generated < p.min_tokens:
            logits.index_fill_(0, self.stop_ids, float("-inf"))
        if self.grammar is not None:
            allowed = self.grammar.allowed(self.vocab, logits.device, self._hidden())
            logits.masked_fill_(~allowed, float("-inf"))

    def _hidden(self) -> tuple[int, ...]:
        """Ids that a grammar's row draws only when its grammar allows nothing else: a complete grammar ends the answer."""
        if self.generated < self.params.min_tokens:
            return self.early_stops
        if self.params.ignore_eos and self.grammar is not None:
            return self.grammar.eos_token_ids
        return ()

    def note_sampled(self, token: Tensor) -> None:
        """Account for a token just drawn; `token` is a 0-d int64 device tensor, so that nothing waits for the device."""
        self.generated += 1
        if self.counts is not None and len(self.vocab):
            local = token - self.vocab.start
            mine = (local >= 0) & (local < len(self.vocab))
            self.counts.index_add_(0, local.clamp(0, len(self.vocab) - 1)[None], mine.int()[None])


def _count(tokens: list[int], vocab: range, device: torch.device) -> Tensor:
    local = [t - vocab.start for t in tokens if t in vocab]
    return torch.bincount(torch.tensor(local, dtype=torch.int64), minlength=len(vocab)).to(torch.int32).to(device)
