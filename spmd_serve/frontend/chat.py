"""Chat messages to a prompt, with the model's Jinja template, the way transformers renders it."""

from __future__ import annotations

import json
import secrets
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spmd_serve.errors import ModelError, RequestError
from spmd_serve.frontend.schemas import Message
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.tokenizer_files import read_json

# Of a request; as variables of a template they would have no effect, or another one.
OWN_FIELDS = {"messages", "add_generation_prompt", "continue_final_message", "chat_template"}
AFTER_TAG = "  "  # white space that shows whether a template trims contents


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any) -> str:
    """JSON without HTML escapes, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def find_template(folder: Path, file: str | None) -> str | None:
    """The template's source: `file`, else the folder's chat_template.jinja, else the one in tokenizer_config.json.

    Multimodal models may have it in chat_template.json alone.
    """
    path = Path(file) if file is not None else folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8-sig")  # a BOM would be part of each prompt
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(
                f"the chat template {path} is not readable UTF-8 ({error}); give another with --chat-template"
            ) from None
    if file is not None:
        raise ModelError(f"--chat-template {file} is not a file")
    found = (read_json(folder / name).get("chat_template") for name in ("tokenizer_config.json", "chat_template.json"))
    value = next((template for template in found if template), None)
    if isinstance(value, list):  # several named templates
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[0].get("template") if named else None
    return value if isinstance(value, str) else None


class ChatTemplate:
    """A compiled chat template.

    Raises:
        ModelError: the template is not valid Jinja.
    """

    def __init__(self, source: str | None, tokenizer: TextTokenizer) -> None:
        # Some templates ask `tools is not none`, which is true of what is not there at all.
        self._variables: dict[str, Any] = {"tools": None, "documents": None} | tokenizer.special_tokens
        try:
            self._template = None if source is None else _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template is not valid: {error}; give another with --chat-template") from None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        extra: dict[str, Any],
    ) -> str:
        """The prompt's text. `extra` are the request's chat_template_kwargs.

        Raises:
            RequestError: the model has no template, `extra` has what the request has fields for, or the template refuses the
                messages.
        """
        if self._template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or start the server with --chat-template",
                param="messages",
            )
        taken = sorted(OWN_FIELDS & extra.keys())
        if taken:
            raise RequestError(
                f"chat_template_kwargs has {' and '.join(taken)}; use the request's own field",
                param="chat_template_kwargs",
            )
        tag, final = "", messages[-1]["content"]
        if continue_final_message:
            # Where the final message ends is found by what no template and no client writes.
            tag = secrets.token_hex(16)
            messages = [*messages[:-1], messages[-1] | {"content": final + tag + AFTER_TAG}]
        variables = self._variables | extra
        try:
            text = self._template.render(**variables, messages=messages, add_generation_prompt=add_generation_prompt)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from None
        except (TypeError, ValueError, AttributeError, RecursionError, ArithmeticError, LookupError) as error:
            raise RequestError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}", param="messages"
            ) from None
        return _cut_at(tag, text, final) if tag else text


def _cut_at(tag: str, text: str, final: str) -> str:
    """The rendered text up to the tag after `final`, the message that the model shall continue."""
    end = text.rfind(tag)
    if end < 0:
        raise RequestError(
            "continue_final_message: the chat template changes the final message, so that it cannot be continued",
            param="continue_final_message",
        )
    trims = not text.startswith(AFTER_TAG, end + len(tag))
    if trims and final.strip():
        end -= len(final) - len(final.rstrip())
    return text[:end]


def template_message(message: Message, index: int) -> dict[str, Any]:
    """A message as chat templates want it: arguments of tool calls as objects, no content as "" ."""
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": message.content or ""}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        calls = []
        for number, call in enumerate(message.tool_calls):
            try:
                arguments = orjson.loads(call.function.arguments.strip() or "{}")
            except orjson.JSONDecodeError:
                raise RequestError(
                    "arguments of a tool call must be JSON",
                    param=f"messages[{index}].tool_calls[{number}].function.arguments",
                ) from None
            if arguments is None:  # as some models write that there are none; templates go through the names in it
                arguments = {}
            function = {"name": call.function.name, "arguments": arguments}
            calls.append({"id": call.id, "type": "function", "function": function})
        result["tool_calls"] = calls
    return result
