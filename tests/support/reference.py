"""What the model says by itself: transformers in float32, and this project's noise on top of its logits for seeded draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from spmd_serve.config import ModelOptions
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.kernels.gumbel import gumbel_noise, row_key, uniforms
from spmd_serve.models.resolve import resolve_model

_SHORT = 64  # tokens


@dataclass(frozen=True)
class Case:
    """A request: the fields are the API's. Temperature 0 is greedy."""

    prompt: str | tuple[tuple[str, str], ...]  # text, or a chat of (role, content)
    max_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat, as the API takes it."""
        assert not isinstance(self.prompt, str)
        return [{"role": role, "content": content} for role, content in self.prompt]


@dataclass(frozen=True)
class Answer:
    """What a request must get."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class Reference:
    """The served model in transformers, from the folder that the server reads too."""

    def __init__(self, model: str = ModelOptions().model) -> None:
        self.folder: Path = resolve_model(ModelOptions(model=model), RankInfo())
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def _model(self) -> Any:
        # The tests' servers compute on the same cores, and threads that wait for each other there take ten times as long.
        torch.set_num_threads(1)
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def prompt_ids(self, case: Case) -> list[int]:
        """Token ids of the prompt, by transformers' tokenizer and chat template."""
        if isinstance(case.prompt, str):
            ids: list[int] = self.tokenizer(case.prompt).input_ids
        else:
            text = self.tokenizer.apply_chat_template(case.messages, tokenize=False, add_generation_prompt=True)
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def answers(self, cases: Sequence[Case]) -> list[Answer]:
        """Short prompts in one batch (padded on the left, and so masked), which costs little more than one; long ones alone."""
        prompts = [self.prompt_ids(case) for case in cases]
        short = [i for i, prompt in enumerate(prompts) if len(prompt) <= _SHORT]
        batches = [short] if short else []
        batches += [[i] for i, prompt in enumerate(prompts) if len(prompt) > _SHORT]
        found: dict[int, Answer] = {}
        for batch in batches:
            outputs = self._generate([cases[i] for i in batch], [prompts[i] for i in batch])
            for i, output in zip(batch, outputs, strict=True):
                found[i] = self._answer(cases[i], prompts[i], output)
        return [found[i] for i in range(len(cases))]

    def _generate(self, cases: list[Case], prompts: list[list[int]]) -> list[list[int]]:
        """At least the tokens of each case's output; what follows an EOS is of no account."""
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        out = self._model.generate(
            torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding]),
            max_new_tokens=max(case.max_tokens for case in cases),
            do_sample=False,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([_Draw(cases, padding)]),
        )
        return [row[width:].tolist() for row in out]

    def _answer(self, case: Case, prompt: list[int], output: list[int]) -> Answer:
        eos = self._model.generation_config.eos_token_id
        eos_ids = {eos} if isinstance(eos, int) else set(eos)
        output = output[: case.max_tokens]
        ends = [i for i, token in enumerate(output) if token in eos_ids]
        text = self.tokenizer.decode(output[: ends[0]] if ends else output, skip_special_tokens=True)
        count = ends[0] + 1 if ends else len(output)
        return Answer(text, "stop" if ends else "length", len(prompt), count)

    def logprobs(self, ids: list[int]) -> Tensor:
        """Log-probabilities of what follows each position: float32 [len(ids), vocabulary]."""
        with torch.inference_mode():
            logits: Tensor = self._model(torch.tensor([ids])).logits[0]
        return logits.log_softmax(-1)


class Answers:
    """The reference's answers, each computed once; `prepare` computes many for little more than the price of one."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._known: dict[Case, Answer] = {}

    def prepare(self, cases: Iterable[Case]) -> None:
        """Compute what is not known yet, in one batch."""
        missing = [case for case in dict.fromkeys(cases) if case not in self._known]
        if missing:
            self._known.update(zip(missing, self._reference.answers(missing), strict=True))

    def __getitem__(self, case: Case) -> Answer:
        self.prepare([case])
        return self._known[case]


class _Draw(LogitsProcessor):  # type: ignore[misc]
    """Makes transformers' argmax a seeded draw: filters of its own, then this project's counter-based noise."""

    def __init__(self, cases: list[Case], padding: list[int]) -> None:
        self._cases = cases
        self._padding = padding

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for i, (case, padding) in enumerate(zip(self._cases, self._padding, strict=True)):
            if case.temperature == 0:
                continue
            row = scores[i : i + 1] / case.temperature
            if case.top_k:
                row = TopKLogitsWarper(case.top_k)(input_ids, row)
            if case.top_p < 1:
                row = TopPLogitsWarper(case.top_p)(input_ids, row)
            position = input_ids.shape[1] - padding
            noise = gumbel_noise(uniforms(row_key(case.seed, position), 0, row.shape[1]))
            scores[i] = row[0] + torch.from_numpy(noise)
        return scores
