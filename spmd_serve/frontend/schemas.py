"""The bodies of requests: which fields exist, their types and bounds. Anything else is refused, never ignored.

Fields marked "extension" are not OpenAI's; they have the names and meaning that vLLM gives them. A JSON null is the same
as leaving the field out, whatever the field. OpenAI fields that are known and refused stand in `refused_fields` of
each body, with the reason that the client gets, and `HARMLESS` has the values that ask for what is done anyway; the
README's capability table is made from these classes.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from spmd_serve.frontend.values import MAX_TOKEN_ID, LogitBias, Prompt, Stop, TokenId, wrong
from spmd_serve.types import MAX_PENALTY, MAX_REPETITION_PENALTY, MAX_SEED, MAX_TEMPERATURE, MIN_REPETITION_PENALTY

MAX_STOP_TOKENS = 256
EXTENSION: dict[str, Any] = {"x-extension": True}

# Values with which a client asks for nothing but what this server does, of fields that a body does not have: refused ones
# and, as some clients of vLLM send all defaults, vLLM's.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "best_of": (1,),
    "cache_control": ({"type": "ephemeral"},),  # prefixes are kept anyway
    "documents": ([],),
    "early_stopping": (False,),  # of a beam search, as is length_penalty
    "function_call": ("none", "auto"),  # there are no functions to choose from
    "functions": ([],),
    "guided_decoding_backend": ("auto", "guidance"),
    "include_obfuscation": (False,),
    "length_penalty": (1, 1.0),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (False, True),  # there are no calls
    "provider_specific_fields": ({},),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),  # where the tokenizer has them
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "type": ("text",),  # of a message
    "use_beam_search": (False,),
}


def _extension(**bounds: Any) -> Any:
    return Field(None, json_schema_extra=EXTENSION, **bounds)


# ---- parts --------------------------------------------------------------------------------------------------------


class Body(BaseModel):
    """Strict: a number in quotes is not a number, and an unknown field is an error.

    Of all that is wrong one thing is told, so a long list has fail_fast: for 8 MiB of wrong items pydantic would hold the
    interpreter for ten seconds, and with it the step loop.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    refused_fields: ClassVar[dict[str, str]] = {}
    # What client libraries add to an answer and send back with it; it says again what other fields say.
    repeating_fields: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, value: Any) -> Any:
        """Nulls and harmless values of what is no field, and what repeats others. And unknown fields but for the first."""
        if not isinstance(value, dict):
            return value
        given = {k: v for k, v in value.items() if v is not None and k not in cls.repeating_fields}
        fields = _names(cls)
        asking = dict.fromkeys(k for k, v in given.items() if k not in fields and not _is_harmless(k, v))
        for name, reason in cls.refused_fields.items():
            if name in asking:
                raise PydanticCustomError("refused", "{text}", {"text": f"is not supported: {reason}", "name": name})
        first = next(iter(asking), None)
        return {k: v for k, v in given.items() if k in fields or k == first}


@cache
def _names(body: type[Body]) -> frozenset[str]:
    """Fields as they are written in JSON."""
    return frozenset(field.alias or name for name, field in body.model_fields.items())


def _is_harmless(name: str, value: Any) -> bool:
    """Types are compared too, because in Python 0 == False."""
    values = HARMLESS.get(name)
    if values is None:
        return False
    if isinstance(value, dict):
        value = {k: v for k, v in value.items() if v is not None}
    return any(type(value) is type(harmless) and value == harmless for harmless in values)


class StreamOptions(Body):
    """When usage is sent in a stream."""

    refused_fields = {"include_obfuscation": "streams are not padded"}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = _extension()


class JsonSchemaFormat(Body):
    """OpenAI's wrapper of a JSON schema."""

    name: str = Field(max_length=256)
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """`json_schema` is needed with the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's form; exactly one field."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=1024)
    grammar: str | None = None
    json_object: bool | None = None


# ---- what completions and chat share ------------------------------------------------------------------------------


class Generate(Body):
    """Sampling, limits and shape of the answer."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop = None
    presence_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-MAX_PENALTY, le=MAX_PENALTY)
    logit_bias: LogitBias = None
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    user: str | None = Field(None, max_length=4096)
    response_format: ResponseFormat | None = None

    top_k: int | None = _extension(ge=-1, le=MAX_TOKEN_ID)
    min_p: float | None = _extension(ge=0, le=1)
    repetition_penalty: float | None = _extension(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    min_tokens: int | None = _extension(ge=0)
    stop_token_ids: list[TokenId] | None = _extension(max_length=MAX_STOP_TOKENS)
    ignore_eos: bool | None = _extension()
    include_stop_str_in_output: bool | None = _extension()
    skip_special_tokens: bool | None = _extension()
    add_special_tokens: bool | None = _extension()
    prompt_logprobs: int | None = _extension(ge=0)
    structured_outputs: StructuredOutputs | None = _extension()
    guided_json: dict[str, Any] | str | None = _extension()
    guided_regex: str | None = _extension()
    guided_choice: list[str] | None = _extension(min_length=1, max_length=1024)
    guided_grammar: str | None = _extension()
    priority: int | None = _extension(ge=-(2**31), lt=2**31)
    cache_salt: str | None = _extension(max_length=256)
    timeout: float | None = _extension(gt=0, le=86400)


class CompletionBody(Generate):
    """POST /v1/completions."""

    refused_fields = {"suffix": "this server does not fill in the middle"}

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0)  # 0 scores the prompt: echo and logprobs
    best_of: int | None = Field(None, ge=1)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)


_NO_TOOLS = "this server does not call tools; tool messages in the history are allowed"
_NO_STORE = "this server stores nothing"
_TEXT_ONLY = "this server reads and writes text only"


class ToolCallFunction(Body):
    """A call that the assistant made: `arguments` is JSON in a string; an empty one and null are no arguments."""

    repeating_fields = frozenset({"parsed_arguments"})  # OpenAI's clients

    name: str
    arguments: str


class ToolCall(Body):
    """One tool call in the history."""

    repeating_fields = frozenset({"index"})  # its place in the list; streams have it

    id: str
    type: Literal["function"] = "function"
    function: ToolCallFunction


def _check_content(value: Any, message: ValidationInfo) -> Any:
    """Text, or a list of text parts, which are joined by line breaks.

    A part may repeat the message's role: OpenAI's agents for JavaScript put all fields of an answer into its part.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("must be text or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise wrong(f"part {index} has the type '{str(kind)[:40]}'; {_TEXT_ONLY}")
        text = part.get("text")
        repeated = {"type": kind, "text": text, "role": message.data.get("role")}
        others = {k: v for k, v in part.items() if v is not None and not _is_harmless(k, v)}
        unknown = sorted(k for k, v in others.items() if k not in repeated or v != repeated[k])
        if not isinstance(text, str) or unknown:
            raise wrong(f"part {index} must have a text" + (f" and no '{unknown[0][:40]}'" if unknown else ""))
        texts.append(text)
    return "\n".join(texts)


_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
Content = Annotated[
    Any,
    BeforeValidator(_check_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}, {"type": "null"}]}),
]


class Message(Body):
    """One message of a chat."""

    refused_fields = {
        "annotations": _TEXT_ONLY,
        "audio": _TEXT_ONLY,
        "cache_control": "prefixes are kept while there is room",
        "function_call": "use tool_calls",
        "provider_specific_fields": "this server has none",
        "refusal": "refusals are not modelled",
        "type": _TEXT_ONLY,
    }
    repeating_fields = frozenset({"parsed"})  # the content, as OpenAI's clients have read it

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = Field(None, max_length=256)
    tool_calls: list[ToolCall] | None = Field(None, max_length=128)
    tool_call_id: str | None = Field(None, max_length=256)

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("refused", "{text}", {"text": "is missing", "name": "content"})
        return self


Messages = Annotated[list[Message], Field(min_length=1, max_length=8192, fail_fast=True)]


class ChatFields(Body):
    """How messages become a prompt; /tokenize takes these too."""

    add_generation_prompt: bool | None = _extension()
    continue_final_message: bool | None = _extension()
    chat_template_kwargs: dict[str, Any] | None = _extension()


class ChatBody(Generate, ChatFields):
    """POST /v1/chat/completions."""

    refused_fields = {
        "tools": _NO_TOOLS,
        "tool_choice": _NO_TOOLS,
        "parallel_tool_calls": _NO_TOOLS,
        "functions": _NO_TOOLS,
        "function_call": _NO_TOOLS,
        "audio": _TEXT_ONLY,
        "modalities": _TEXT_ONLY,
        "prediction": "predicted outputs are not used",
        "web_search_options": "this server does not search the web",
        "reasoning_effort": "set it in chat_template_kwargs, if the model's template knows it",
        "verbosity": "set it in chat_template_kwargs, if the model's template knows it",
        "store": _NO_STORE,
        "metadata": _NO_STORE,
        "service_tier": "there is one tier; see priority",
        "prompt_cache_key": "prefixes are found by their tokens; see cache_salt",
        "prompt_cache_retention": "prefixes are kept while there is room",
        "safety_identifier": "use user",
        "moderation": "this server does not moderate",
        "documents": "put them into messages or chat_template_kwargs",
        "chat_template": "templates come from the server's operator (--chat-template)",
    }

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)


class TokenizeBody(ChatFields):
    """POST /tokenize: `prompt`, or `messages` with the fields of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId] = Field(fail_fast=True)
    skip_special_tokens: bool | None = None
