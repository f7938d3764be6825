"""From a request's body to what shall be generated. Runs on the tokenizer threads; whatever is wrong raises here."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spmd_serve.config import Config
from spmd_serve.errors import RequestError
from spmd_serve.frontend.chat import ChatTemplate, template_message
from spmd_serve.frontend.detokenizer import StopStrings
from spmd_serve.frontend.grammar import GrammarCompiler
from spmd_serve.frontend.parsing import parse_body
from spmd_serve.frontend.schemas import (
    ChatBody,
    ChatFields,
    CompletionBody,
    DetokenizeBody,
    Generate,
    TokenizeBody,
)
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.types import MAX_SEED, ModelInfo, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions without max_tokens
# Characters of /tokenize: more would hold a tokenizer thread for seconds. Ids of /detokenize: each may be 100 characters.
MAX_TOKENIZED = 2**20
MAX_PROMPT_LOGPROBS = 2**20  # log-probabilities of prompt tokens in one answer: each costs some 10 us and 100 bytes
MAX_LOGPROBS = 2**23  # the same of generated tokens, held until the answer is whole or its client has read them
MAX_ECHOED = 2**26  # characters of prompts in one answer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its ids (int32), the text to echo, and how many tokens it may get.

    `offsets`: where in `echo_text` each token begins, in characters; only when log-probabilities are echoed.
    """

    ids: array[int]
    echo_text: str
    max_tokens: int
    offsets: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What one HTTP request wants generated and how it wants to see it.

    Attributes:
        params: of every choice, but for max_tokens (the prompt's) and the seed (its own).
        logprobs, prompt_logprobs: what the answer shows; `params` may ask the engine for more (best_of, echo).
        timeout: seconds from submission.
    """

    chat: bool
    model: str
    prompts: list[Prompt]
    params: SamplingParams
    n: int
    best_of: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None
    stops: StopStrings | None
    include_stop: bool
    skip_special: bool
    timeout: float | None
    priority: int
    cache_salt: str
    user: str

    def choice_params(self, prompt: Prompt, number: int) -> SamplingParams:
        """Parameters of a prompt's choice `number`: n choices of one seed are n different seeds, the first its own."""
        return replace(
            self.params,
            max_tokens=prompt.max_tokens,
            seed=(self.params.seed + number) & MAX_SEED,
        )


class Planner:
    """Makes plans; its methods may be called from several threads."""

    def __init__(
        self,
        config: Config,
        info: ModelInfo,
        tokenizer: TextTokenizer,
        template: ChatTemplate,
        grammars: GrammarCompiler,
    ) -> None:
        self._server = config.server
        self._has_priorities = config.scheduler.schedule == "priority"
        self._capacity = config.scheduler.max_queue + config.scheduler.max_num_seqs
        self._default_timeout = config.scheduler.request_timeout
        self._info = info
        self._max_logprobs = min(self._server.max_logprobs, info.vocab_size)  # there are no more
        self._tokenizer = tokenizer
        self._template = template
        self._grammars = grammars

    # ---- bodies

    def completion(self, data: bytes) -> RequestPlan:
        """The plan of a /v1/completions body."""
        body = parse_body(data, CompletionBody)
        self.check_model(body.model)
        self._check_bound("n", body.n, self._server.max_n)
        self._check_bound("logprobs", body.logprobs, self._max_logprobs)
        echo = bool(body.echo)
        best_of = body.best_of or body.n or 1
        self._check_bound("best_of", best_of, self._server.max_n)
        if best_of < (body.n or 1):
            raise RequestError(f"best_of ({best_of}) must not be less than n ({body.n})", param="best_of")
        if body.stream and best_of > (body.n or 1):
            raise RequestError("best_of larger than n cannot be streamed", param="best_of")
        add_special = body.add_special_tokens is not False
        given = self._split_prompts(body.prompt)
        wanted = _first(body.max_tokens, DEFAULT_COMPLETION_TOKENS)
        prompts = [self._prompt(p, "prompt", wanted, add_special) for p in given]
        if echo:
            prompts = [self._echoed(p, text, body) for p, text in zip(prompts, given, strict=True)]
        of_prompt = [top for top in (body.prompt_logprobs, body.logprobs if echo else None) if top is not None]
        params = self._params(
            body,
            logprobs=body.logprobs if best_of == (body.n or 1) else body.logprobs or 0,
            prompt_logprobs=max(of_prompt, default=None),
            max_tokens=wanted,
        )
        return self._plan(body, prompts, params, best_of=best_of, echo=echo, logprobs=body.logprobs, chat=False)

    def chat(self, data: bytes) -> RequestPlan:
        """The plan of a /v1/chat/completions body."""
        body = parse_body(data, ChatBody)
        self.check_model(body.model)
        self._check_bound("n", body.n, self._server.max_n)
        self._check_bound("top_logprobs", body.top_logprobs, self._max_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            raise RequestError("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
        wanted = _first(body.max_completion_tokens, body.max_tokens, self._info.lengths.max_model_len)
        ids = self.chat_ids(body)
        prompts = [self._prompt(ids, "messages", wanted, False)]
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = self._params(body, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs, max_tokens=wanted)
        return self._plan(body, prompts, params, best_of=body.n or 1, echo=False, logprobs=logprobs, chat=True)

    def tokenize(self, data: bytes) -> dict[str, Any]:
        """Answer of a /tokenize body."""
        body = parse_body(data, TokenizeBody)
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if body.prompt is not None:
            for name in ChatFields.model_fields:
                if getattr(body, name) is not None:
                    raise RequestError(f"{name} is for messages; a prompt is taken as it is", param=name)
            if len(body.prompt) > MAX_TOKENIZED:
                raise RequestError(
                    f"the prompt has {len(body.prompt)} characters; at most {MAX_TOKENIZED} are tokenized in one request, split it",
                    param="prompt",
                )
            ids = self._tokenizer.encode(body.prompt, body.add_special_tokens is not False)
        else:
            ids = self.chat_ids(body)
        answer = {"count": len(ids), "max_model_len": self._info.lengths.max_model_len, "tokens": ids.tolist()}
        if body.return_token_strs:
            answer["token_strs"] = [self._tokenizer.token_name(i) for i in ids]
        return answer

    def detokenize(self, data: bytes) -> dict[str, Any]:
        """Answer of a /detokenize body."""
        body = parse_body(data, DetokenizeBody)
        self.check_model(body.model)
        if len(body.tokens) > MAX_TOKENIZED:
            raise RequestError(
                f"there are {len(body.tokens)} tokens; at most {MAX_TOKENIZED} are made text in one request, split them",
                param="tokens",
            )
        self._check_ids("tokens", body.tokens)
        return {"prompt": self._tokenizer.decode(body.tokens, bool(body.skip_special_tokens))}

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not the one served."""
        if name is not None and name != self._info.name:
            raise RequestError(
                f"the model '{name[:200]}' does not exist here; this server has '{self._info.name}'",
                param="model",
                status=404,
                code="model_not_found",
            )

    # ---- prompts

    def chat_ids(self, body: ChatBody | TokenizeBody) -> array[int]:
        """Ids of a chat. The template writes the special tokens, so the tokenizer adds none unless it is told to."""
        final = bool(body.continue_final_message)
        generation = body.add_generation_prompt if body.add_generation_prompt is not None else not final
        if final and generation:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        assert body.messages is not None
        text = self._template.render(
            [template_message(m, i) for i, m in enumerate(body.messages)],
            add_generation_prompt=generation,
            continue_final_message=final,
            extra=body.chat_template_kwargs or {},
        )
        self._check_text_length(text, "messages", 1)
        ids = self._tokenizer.encode(text, bool(body.add_special_tokens), "messages")
        if len(ids) > 1 and ids[0] == ids[1] == self._tokenizer.bos_id:
            return ids[1:]  # both the template and the tokenizer wrote BOS
        return ids

    def _split_prompts(self, prompt: Any) -> list[str | list[int]]:
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        self._check_bound("prompt", len(prompt), self._server.max_prompts, what="number of prompts")
        return list(prompt)

    def _prompt(self, prompt: str | list[int] | array[int], field: str, wanted: int, add_special: bool) -> Prompt:
        if isinstance(prompt, str):
            self._check_text_length(prompt, field, wanted)
            ids = self._tokenizer.encode(prompt, add_special, field)
        elif isinstance(prompt, list):
            self._check_ids(field, prompt)
            ids = array("i", prompt)
        else:
            ids = prompt
        self._check_ids(field, ids)  # a tokenizer may have tokens that the model has no embedding for
        if not ids:
            raise RequestError("the prompt is empty; give at least one token", param=field)
        if len(ids) > self._info.lengths.longest_prompt(wanted):
            raise self._too_long(f"{len(ids)}", field, wanted)
        return Prompt(ids, "", min(wanted, self._info.lengths.longest - len(ids)))

    def _echoed(self, prompt: Prompt, given: str | list[int], body: CompletionBody) -> Prompt:
        """`prompt` with its text: as it was given, or, of ids, as the tokenizer writes them."""
        if isinstance(given, str):
            text, skip_special = given, False
        else:
            skip_special = body.skip_special_tokens is not False
            text = self._tokenizer.decode(given, skip_special)
        offsets = [] if body.logprobs is None else self._tokenizer.offsets(prompt.ids, text, skip_special)
        return replace(prompt, echo_text=text, offsets=offsets)

    def _check_text_length(self, text: str, field: str, wanted: int) -> None:
        """Refuse a text that must be too long before it costs seconds of tokenizing."""
        least = self._tokenizer.least_tokens(text)
        if least > self._info.lengths.longest_prompt(wanted):
            raise self._too_long(f"at least {least}", field, wanted)

    def _too_long(self, length: str, field: str, wanted: int) -> RequestError:
        """`wanted`: tokens of the answer.

        Clients know by OpenAI's words, or by its code, that they have to shorten the prompt.
        """
        lengths = self._info.lengths
        limit = f"this model's maximum context length is {lengths.longest} tokens"
        if lengths.pool < lengths.max_model_len:
            limit += " here, which is what this server's KV pool holds (see --kv-memory, --num-pages)"
        share = ", of which at least one is for the answer" if wanted else ""
        return RequestError(
            f"the prompt has {length} tokens, but {limit}{share}; shorten the prompt",
            param=field,
            code="context_length_exceeded",
        )

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self._info.vocab_size:
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise RequestError(
                f"{field} has the token id {bad}; ids go from 0 to {self._info.vocab_size - 1}", param=field
            )

    def _check_bound(self, field: str, value: int | None, most: int, what: str | None = None) -> None:
        if value is not None and value > most:
            raise RequestError(f"{what or field} is {value}; at most {most} is allowed", param=field)

    # ---- parameters

    def _params(
        self, body: Generate, *, logprobs: int | None, prompt_logprobs: int | None, max_tokens: int
    ) -> SamplingParams:
        self._check_bound("prompt_logprobs", body.prompt_logprobs, self._max_logprobs)
        if (body.min_tokens or 0) > max_tokens:
            raise RequestError(
                f"min_tokens ({body.min_tokens}) is larger than max_tokens ({max_tokens})", param="min_tokens"
            )
        biases: Mapping[int, float] = body.logit_bias or {}
        self._check_ids("logit_bias", list(biases))
        self._check_ids("stop_token_ids", body.stop_token_ids or [])
        defaults = self._info.generation_defaults
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=float(_first(body.temperature, defaults.get("temperature"), 1.0)),
            top_k=max(0, int(_first(body.top_k, defaults.get("top_k"), 0))),
            top_p=float(_first(body.top_p, defaults.get("top_p"), 1.0)),
            min_p=float(_first(body.min_p, defaults.get("min_p"), 0.0)),
            seed=_first(body.seed, secrets.randbits(63)) & MAX_SEED,  # of a negative one the same 63 bits each time
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            min_tokens=body.min_tokens or 0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=float(_first(body.repetition_penalty, defaults.get("repetition_penalty"), 1.0)),
            logit_bias=tuple(sorted(biases.items())),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=self._grammars.compile(body),
        )

    def _plan(
        self,
        body: Generate,
        prompts: list[Prompt],
        params: SamplingParams,
        *,
        best_of: int,
        echo: bool,
        logprobs: int | None,
        chat: bool,
    ) -> RequestPlan:
        if best_of * len(prompts) > self._capacity:
            raise RequestError(
                f"this asks for {best_of * len(prompts)} sequences; this server queues at most {self._capacity}",
                param="n",
            )
        self._check_prompt_logprobs(body, prompts, params.prompt_logprobs, best_of)
        self._check_logprobs(prompts, params.logprobs, best_of, "top_logprobs" if chat else "logprobs")
        echoed = best_of * sum(len(p.echo_text) for p in prompts)
        if echoed > MAX_ECHOED:
            raise RequestError(
                f"echo asks for {echoed} characters (choices x prompts); at most {MAX_ECHOED} are answered",
                param="echo",
            )
        options = body.stream_options
        if options is not None and (options.include_usage or options.continuous_usage_stats) and not body.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        if body.priority and not self._has_priorities:
            raise RequestError("priority is for servers started with --schedule priority", param="priority")
        timeouts = [t for t in (body.timeout, self._default_timeout) if t is not None]
        return RequestPlan(
            chat=chat,
            model=self._info.name,
            prompts=prompts,
            params=params,
            n=body.n or 1,
            best_of=best_of,
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            echo=echo,
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
            stops=StopStrings(body.stop) if body.stop else None,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special=body.skip_special_tokens is not False,
            timeout=min(timeouts, default=None),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            user=body.user or "",
        )

    def _check_logprobs(self, prompts: list[Prompt], top: int | None, best_of: int, field: str) -> None:
        if top is None:
            return
        count = best_of * sum(p.max_tokens for p in prompts) * (top + 1)
        if count > MAX_LOGPROBS:
            raise RequestError(
                f"{field} asks for up to {count} log-probabilities (choices x max_tokens x top ones); at most {MAX_LOGPROBS} "
                "are answered, lower max_tokens",
                param=field,
            )

    def _check_prompt_logprobs(self, body: Generate, prompts: list[Prompt], top: int | None, best_of: int) -> None:
        if top is None:
            return
        count = best_of * sum(len(p.ids) for p in prompts) * (top + 1)
        if count > MAX_PROMPT_LOGPROBS:
            field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
            raise RequestError(
                f"{field} asks for {count} log-probabilities of prompt tokens (choices x tokens x top ones); at most "
                f"{MAX_PROMPT_LOGPROBS} are answered",
                param=field,
            )


def _first(*values: Any) -> Any:
    """The first value that is not None."""
    return next(v for v in values if v is not None)
