"""What clients do to a server of two ranks with the bundled model, right and wrong: one server, used up in the end."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from support.ask import MODEL, ask, create, to_answer
from support.reference import Answers, Case, Reference
from support.server import Server, wait_until

CONTEXT = 8192
VOCAB = 49152
ENDLESS: dict[str, Any] = {"model": MODEL, "max_tokens": 4000, "temperature": 0, "extra_body": {"ignore_eos": True}}


CAPITAL = Case("The capital of France is", 5)
STREAMED = (Case("Once upon a time", 12), Case((("user", "Count to five."),), 12))
SHORT = Case("Water boils at a temperature of", 4)
DRAINED = Case("Once upon a time there was a fox who", 60)


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], answers: Answers) -> Server:
    return start_server(
        *("--dtype", "float32", "--max-batch-tokens", "128", "--threads", "1"),
        ranks=2,
        meanwhile=lambda: answers.prepare([CAPITAL, *STREAMED, SHORT, DRAINED]),
    )


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


def serves(client: openai.OpenAI, answers: Answers) -> bool:
    """The next request is answered, and rightly."""
    return ask(client, CAPITAL) == answers[CAPITAL]


# ---- prompts and usage --------------------------------------------------------------------------------------------


def test_a_chat_has_the_special_tokens_of_its_template_once(
    server: Server, client: openai.OpenAI, reference: Reference
) -> None:
    """The template writes BOS (<|im_start|>) itself; raw completions follow the tokenizer, which adds none."""
    chat = Case((("user", "Hello there"),), 1)
    messages = {"messages": chat.messages, "add_generation_prompt": True}
    ids = server.http.post("/tokenize", json=messages).json()["tokens"]
    assert ids == reference.prompt_ids(chat)
    bos = reference.tokenizer.bos_token_id
    assert ids[0] == bos and ids[1] != bos
    assert create(client, chat).usage.prompt_tokens == len(ids)
    text = Case("Hello there", 1)
    assert create(client, text).usage.prompt_tokens == len(reference.prompt_ids(text))


@pytest.mark.parametrize("case", STREAMED, ids=["text", "chat"])
def test_a_stream_has_the_text_and_the_usage_of_the_whole_answer(
    client: openai.OpenAI, answers: Answers, case: Case
) -> None:
    chunks = list(create(client, case, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert last.choices == []
    assert all(part.usage is None for part in parts)
    choices = [part.choices[0] for part in parts]
    texts = [(c.text if hasattr(c, "text") else c.delta.content) or "" for c in choices]
    wanted = answers[case]
    assert "".join(texts) == wanted.text
    assert [c.finish_reason for c in choices if c.finish_reason] == [wanted.finish_reason]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (wanted.prompt_tokens, wanted.completion_tokens)
    assert last.usage.total_tokens == wanted.prompt_tokens + wanted.completion_tokens
    assert ask(client, case) == wanted


def test_a_prompt_of_exactly_some_pages_twice(server: Server, client: openai.OpenAI) -> None:
    """Full hit: all pages of the prompt are cached, and still its last token must be computed."""
    words = " ".join(f"word{i}" for i in range(100))
    prompt = server.http.post("/tokenize", json={"prompt": words}).json()["tokens"][:64]
    made = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0, logprobs=0)
        for _ in range(3)
    ]
    cached = [m.usage.prompt_tokens_details.cached_tokens for m in made]
    assert cached == [0, 48, 48]  # all but the page that the last token is in
    assert len({m.choices[0].text for m in made}) == 1
    values = [m.choices[0].logprobs.token_logprobs for m in made]
    assert values[1] == pytest.approx(values[0], abs=1e-3)


# ---- log-probabilities --------------------------------------------------------------------------------------------


def echoed(client: openai.OpenAI, prompts: list[list[int]]) -> list[Any]:
    """The request of lm-eval's `local-completions` for log-likelihoods."""
    response = client.completions.create(
        model=MODEL, prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    )
    return [choice.logprobs for choice in sorted(response.choices, key=lambda choice: choice.index)]


def test_echoed_logprobs_are_those_of_transformers_also_after_a_prefix_hit(
    client: openai.OpenAI, reference: Reference
) -> None:
    """One per prompt token, the same numbers each time, whatever of the prompt is cached by then."""
    texts = [
        "The sun rises in the east and sets in the west. " * 4,
        "Zwölf Boxkämpfer jagen Viktor quer über den Deich.",
    ]
    prompts = [reference.prompt_ids(Case(text)) for text in texts]
    first = echoed(client, prompts)
    plain = client.completions.create(model=MODEL, prompt=prompts[0], max_tokens=1)
    again = client.completions.create(model=MODEL, prompt=prompts[0], max_tokens=1)
    assert plain.usage.prompt_tokens == again.usage.prompt_tokens == len(prompts[0])
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert [f.token_logprobs for f in echoed(client, prompts)] == [f.token_logprobs for f in first]
    for ids, found in zip(prompts, first, strict=True):
        expected = reference.logprobs(ids)
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        values = found.token_logprobs[1 : len(ids)]
        assert values == pytest.approx([float(expected[i, t]) for i, t in enumerate(ids[1:])], abs=1e-3)
        best = [max(top.values()) for top in found.top_logprobs[1 : len(ids)]]
        assert best == pytest.approx(expected[:-1].amax(-1).tolist(), abs=1e-3)
        assert len(found.token_logprobs) == len(ids) + 1  # and the one that was generated


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context(client: openai.OpenAI, answers: Answers, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[7] * 9000, stream=stream)
    assert "9000" in caught.value.message and str(CONTEXT) in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a " * 9000}], stream=stream)
    assert str(CONTEXT) in caught.value.message
    assert serves(client, answers)


BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/chat/completions", "top_logprobs", {"logprobs": True, "top_logprobs": 10**6}),
    ("/v1/completions", "n", {"n": 5_000_000}),
    ("/v1/completions", "prompt", {"prompt": [VOCAB]}),
    ("/v1/completions", "prompt", {"prompt": [-1]}),
    ("/v1/completions", "seed", {"seed": 10**20}),
    ("/v1/completions", "temperature", {"temperature": -1}),
    ("/v1/completions", "logit_bias", {"logit_bias": {str(VOCAB): 1}}),
    ("/v1/completions", "stop_token_ids", {"stop_token_ids": [VOCAB]}),
]


def test_bad_values(server: Server, client: openai.OpenAI, answers: Answers) -> None:
    """400 with the field's name, 413 for the body; the next request is served."""
    for path, field, fields in BAD:
        valid = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        response = server.http.post(path, json={**valid, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field), (field, response.text)
    for content in (b'{"prompt": "x", "temperature": NaN}', b"{"):
        assert server.http.post("/v1/completions", content=content).status_code == 400
    huge = server.http.post("/v1/completions", json={"prompt": "x" * 10_000_000})
    assert huge.status_code == 413
    assert serves(client, answers)


# ---- clients that leave -------------------------------------------------------------------------------------------


def leave_stream(server: Server) -> None:
    """Close a stream after its first chunk."""
    with server.client().completions.create(prompt="One", stream=True, **ENDLESS) as stream:
        next(iter(stream))
        assert server.metrics()["requests_running"] == 1


def leave_unread(server: Server) -> None:
    """Close the connection of a request that is not streamed while it runs."""
    body = json.dumps({"model": MODEL, "prompt": "One", "max_tokens": 4000, "ignore_eos": True}).encode()
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=10) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        wait_until("it runs", lambda: server.metrics()["requests_running"] == 1, 10)


@pytest.mark.parametrize("leave", [leave_stream, leave_unread])
def test_a_client_that_leaves_frees_its_work_within_a_second(server: Server, leave: Callable[[Server], None]) -> None:
    """The best of three: the machine, too, may pause for a second."""
    took = []
    for _ in range(3):
        leave(server)
        took.append(server.wait_idle())
        if took[-1] < 1:
            break
    assert min(took) < 1, took


def test_metrics_after_everything_was_aborted(server: Server, client: openai.OpenAI, answers: Answers) -> None:
    """Gauges are back at 0 and the abort counter has counted each sequence."""
    name = 'requests_total{outcome="abort"}'
    before = server.metrics()[name]
    with ExitStack() as streams:
        for i in range(8):
            stream = client.completions.create(prompt=f"Story {i}", stream=True, **ENDLESS)
            next(iter(streams.enter_context(stream)))
        assert server.metrics()["requests_running"] == 8
    server.wait_idle()
    values = server.metrics()
    assert values[name] - before == 8
    assert values["kv_usage_ratio"] == 0
    assert serves(client, answers)


# ---- scheduling ---------------------------------------------------------------------------------------------------


def test_a_short_prompt_does_not_wait_for_a_long_one(server: Server, client: openai.OpenAI, answers: Answers) -> None:
    """Head of line: the whole answer to a short prompt comes before the first token of 4,000 tokens sent earlier."""
    long_prompt = [1000 + i % 30_000 for i in range(4000)]

    async def race() -> tuple[Any, bool]:
        async with server.async_client() as clients:
            long = clients.completions.create(model=MODEL, prompt=long_prompt, max_tokens=1)
            long_answer = asyncio.ensure_future(long)
            while server.metrics()["requests_running"] == 0:
                await asyncio.sleep(0.01)
            answer = await create(clients, SHORT)
            was_first = long_answer.done()
            long_answer.cancel()
            return answer, was_first

    answer, long_one_was_first = asyncio.run(race())
    assert to_answer(answer) == answers[SHORT]
    assert not long_one_was_first
    server.wait_idle()


# ---- structured output --------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "water"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


def test_json_at_temperature_1_is_always_valid(client: openai.OpenAI) -> None:
    """12 draws of a schema, all valid; and of any JSON object, all that come to an end."""
    question: Any = [{"role": "user", "content": "Describe a person as JSON with name, age and likes."}]
    schema: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    made = client.chat.completions.create(
        model=MODEL, messages=question, response_format=schema, temperature=1, n=12, seed=1, max_tokens=120
    )
    for choice in made.choices:
        person = json.loads(choice.message.content or "")
        assert choice.finish_reason == "stop"
        assert set(person) == set(PERSON["properties"])
        assert len(person["name"]) <= 20 and type(person["age"]) is int and 0 <= person["age"] <= 150
        assert len(person["likes"]) <= 3 and set(person["likes"]) <= {"tea", "coffee", "water"}
    assert len({choice.message.content for choice in made.choices}) > 6
    question = [{"role": "user", "content": 'Write a JSON object with the one key "name", and a name.'}]
    made = client.chat.completions.create(
        model=MODEL,
        messages=question,
        response_format={"type": "json_object"},
        temperature=1,
        n=5,
        seed=3,
        max_tokens=40,
    )
    ended = [choice.message.content or "" for choice in made.choices if choice.finish_reason == "stop"]
    assert ended and all(isinstance(json.loads(text), dict) for text in ended)
    assert all((choice.message.content or "").startswith("{") for choice in made.choices)


def test_a_complete_grammar_ends_the_answer(client: openai.OpenAI) -> None:
    """Whatever min_tokens and ignore_eos say: after it nothing but EOS is allowed."""
    for extra in ({"min_tokens": 20}, {"ignore_eos": True}):
        made = client.completions.create(
            model=MODEL, prompt="Tea or coffee?", max_tokens=30, extra_body={"guided_choice": ["tea", "coffee"]} | extra
        )
        assert made.choices[0].text in ("tea", "coffee")
        assert made.choices[0].finish_reason == "stop"


def test_schemas_with_many_optional_properties(client: openai.OpenAI, answers: Answers) -> None:
    """What is too large is refused, quickly; what is accepted is written to its end."""

    def ask_for(properties: int) -> Any:
        schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(properties)}}
        body: Any = {"guided_json": schema, "min_tokens": 4}
        return client.completions.create(
            model=MODEL, prompt="Some JSON:", temperature=1, seed=3, max_tokens=24, n=5, extra_body=body
        )

    began = time.monotonic()
    with pytest.raises(openai.BadRequestError, match="too large a JSON schema"):
        ask_for(2000)
    assert time.monotonic() - began < 10
    made = ask_for(600)
    assert all(choice.text.startswith("{") for choice in made.choices)
    ended = [choice.text for choice in made.choices if choice.finish_reason == "stop"]
    assert all(isinstance(json.loads(text), dict) for text in ended)
    assert serves(client, answers)


# ---- idle, and the end --------------------------------------------------------------------------------------------


def test_an_idle_server_costs_nothing(server: Server) -> None:
    """Under 5% of a core for each rank."""
    server.wait_idle()
    span = 4.0
    before = server.cpu_seconds()
    time.sleep(span)
    shares = [(after - was) / span for after, was in zip(server.cpu_seconds(), before, strict=True)]
    assert len(shares) == 2 and max(shares) < 0.05, shares


def test_sigterm_to_torchrun_mid_stream(server: Server, client: openai.OpenAI, answers: Answers) -> None:
    """The stream goes on to its end, new requests are sent away, all ranks end cleanly. The module's last test."""
    parts = []
    with create(client, DRAINED, stream=True) as stream:
        chunks = iter(stream)
        parts.append(next(chunks))
        server.begin_stop(rank=None)
        wait_until("it drains", lambda: server.http.get("/health").status_code == 503, 5, 0.01)
        refused = server.http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        parts += chunks
    assert "".join(part.choices[0].text for part in parts if part.choices) == answers[DRAINED].text
    assert parts[-1].choices[0].finish_reason == answers[DRAINED].finish_reason
    server.stop()
