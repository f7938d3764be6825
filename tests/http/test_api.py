"""Every field through the official client, whole and streamed, over a dummy engine that repeats the prompt."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.fake_service import EOS, MODEL, FakeService, bundled_tokenizer, fake_info

from spmd_serve.bench.dummy_core import fake_logprobs
from spmd_serve.config import CacheOptions, Config, SchedulerOptions
from spmd_serve.frontend.logprobs import make_prompt_json
from spmd_serve.frontend.schemas import EXTENSION, ChatBody, CompletionBody

TEXT = "The quick brown fox 👩‍👩‍👧 日本語 jumps over the lazy dog."
COUNT = len(bundled_tokenizer().encode(TEXT))


def complete(service: FakeService, prompt: Any = TEXT, **fields: Any) -> Any:
    """A whole completion; extension fields may be among `fields`."""
    return _call(service.client.completions.create, {"prompt": prompt, "max_tokens": 500} | fields)


def chat(service: FakeService, content: Any = TEXT, **fields: Any) -> Any:
    messages = fields.pop("messages", [{"role": "user", "content": content}])
    return _call(service.client.chat.completions.create, {"messages": messages} | fields)


def _call(create: Any, fields: dict[str, Any]) -> Any:
    known = (CompletionBody.model_fields | ChatBody.model_fields).items()
    extensions = {name for name, field in known if field.json_schema_extra == EXTENSION}
    extensions = extensions - {"timeout"} | {"timeout_"}  # the client has a timeout of its own
    extra = {name.rstrip("_"): fields.pop(name) for name in list(fields) if name in extensions}
    return create(model=MODEL, extra_body=extra, **fields)


def joined(stream: Any) -> tuple[str, str | None, Any, int]:
    """(text, finish_reason, usage, number of events with a choice) of a stream of one choice."""
    text, finish, usage, events = "", None, None, 0
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            events += 1
            piece = choice.text if hasattr(choice, "text") else choice.delta.content or ""
            assert piece or choice.finish_reason, "an empty delta"
            assert "\ufffd" not in piece or choice.finish_reason
            text += piece
            assert finish is None, "something came after the end"
            finish = choice.finish_reason
    return text, finish, usage, events


# ---- whole and streamed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text", "finish", "tokens"),
    [
        ({}, TEXT, "stop", COUNT + 1),
        ({"max_tokens": COUNT}, TEXT, "length", COUNT),
        ({"max_tokens": COUNT + 1}, TEXT, "stop", COUNT + 1),
        ({"stop": "brown"}, "The quick ", "stop", 3),
        ({"stop": ["lazy", "own f"]}, "The quick br", "stop", 4),
        ({"stop": "own f", "include_stop_str_in_output": True}, "The quick brown f", "stop", 4),
        ({"stop": "he q"}, "T", "stop", 2),
        ({"stop": "Th"}, "", "stop", 1),
        ({"stop": "never said"}, TEXT, "stop", COUNT + 1),
        ({"stop": "dog.!"}, TEXT, "stop", COUNT + 1),
        ({"stop": "The", "min_tokens": 2, "max_tokens": 3}, "The quick brown", "length", 3),
        ({"stop": "he quick", "min_tokens": 1}, "T", "stop", 2),
        ({"stop": ["he q", "quick b"], "min_tokens": 2}, "The ", "stop", 3),
        ({"stop_token_ids": [bundled_tokenizer().encode(TEXT)[2]]}, "The quick", "stop", 3),
        (
            {"stop_token_ids": [bundled_tokenizer().encode(TEXT)[2]], "include_stop_str_in_output": True},
            "The quick brown",
            "stop",
            3,
        ),
        ({"include_stop_str_in_output": True}, TEXT, "stop", COUNT + 1),
        (
            {"include_stop_str_in_output": True, "skip_special_tokens": False},
            TEXT + "<|im_end|>",
            "stop",
            COUNT + 1,
        ),
        ({"ignore_eos": True, "max_tokens": COUNT + 2}, TEXT + "The", "length", COUNT + 2),
        (
            {"ignore_eos": True, "max_tokens": COUNT + 1, "skip_special_tokens": False},
            TEXT + "<|im_end|>",
            "length",
            COUNT + 1,
        ),
    ],
)
def test_text_end_and_usage(service: FakeService, fields: dict[str, Any], text: str, finish: str, tokens: int) -> None:
    """The same, whole and streamed, in completions and chat."""
    whole = complete(service, **fields)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, finish)
    assert whole.usage.completion_tokens == tokens
    assert whole.usage.prompt_tokens == COUNT
    assert whole.usage.total_tokens == COUNT + tokens
    stream = complete(service, **fields, stream=True, stream_options={"include_usage": True})
    assert joined(stream)[:3] == (text, finish, whole.usage)
    whole = chat(service, **fields)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (text, finish)
    assert whole.choices[0].message.role == "assistant"
    stream = chat(service, **fields, stream=True, stream_options={"include_usage": True})
    assert joined(stream)[:3] == (text, finish, whole.usage)


@pytest.mark.parametrize("cut", range(1, 26))
def test_split_characters_cut_anywhere(service: FakeService, cut: int) -> None:
    text = "👩‍👩‍👧 é 日本語"
    ids = bundled_tokenizer().encode(text).tolist()
    whole = complete(service, text, max_tokens=cut).choices[0].text
    streamed = joined(complete(service, text, max_tokens=cut, stream=True))[0]
    assert whole == streamed == bundled_tokenizer().decode(ids[:cut])
    assert "\ufffd" not in whole.rstrip("\ufffd")
    assert text.startswith(whole.rstrip("\ufffd"))


def test_what_changes_answers_has_a_fingerprint_of_its_own(start: Any) -> None:
    caches = (CacheOptions(), CacheOptions(num_pages=9), CacheOptions(kv_dtype="fp8"))
    plain, smaller, fp8 = (complete(start(Config(cache=cache)), max_tokens=1).system_fingerprint for cache in caches)
    assert plain == smaller != fp8


def test_shapes(service: FakeService) -> None:
    answer = complete(service, max_tokens=1)
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    assert answer.id.startswith("cmpl-") and answer.system_fingerprint.startswith("fp_")
    assert answer.created > 1_700_000_000
    assert answer.choices[0].logprobs is None
    chunks = list(complete(service, max_tokens=3, stream=True))
    assert {c.id for c in chunks} == {chunks[0].id} and chunks[0].id != answer.id
    assert {c.object for c in chunks} == {"text_completion"}
    assert {c.system_fingerprint for c in chunks} == {answer.system_fingerprint}
    answer = chat(service, max_tokens=1)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    chunks = list(chat(service, max_tokens=3, stream=True))
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert [c.choices[0].delta.role for c in chunks] == ["assistant"] + [None] * (len(chunks) - 1)


def test_usage_in_streams(service: FakeService) -> None:
    assert all(c.usage is None and c.choices for c in complete(service, stream=True))
    chunks = list(complete(service, stream=True, stream_options={"include_usage": True}))
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == COUNT + 1
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(service, stream=True, stream_options=options))
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts) and counts[-1] == COUNT + 1 and len(set(counts[:-1])) == len(counts) - 1


def test_raw_events(service: FakeService) -> None:
    body = {"prompt": TEXT, "stream": True, "max_tokens": 3, "model": MODEL}
    response = service.http.post("/v1/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith('data: {"id":"cmpl-') for event in events[:-2])


# ---- several choices and prompts ----------------------------------------------------------------------------------


def test_several_choices_and_prompts(service: FakeService) -> None:
    prompts = ["one two", "three four five"]
    counts = [len(bundled_tokenizer().encode(p)) for p in prompts]
    answer = complete(service, prompts, n=2)
    assert [c.text for c in answer.choices] == [prompts[0]] * 2 + [prompts[1]] * 2
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == sum(counts)
    assert answer.usage.completion_tokens == 2 * sum(counts) + 4
    texts = dict.fromkeys(range(4), "")
    for chunk in complete(service, prompts, n=2, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [c.text for c in answer.choices]
    assert chunk.usage == answer.usage
    answer = chat(service, "hi there", n=3, seed=1)
    assert [c.message.content for c in answer.choices] == ["hi there"] * 3
    roles = [c.choices[0].delta.role for c in chat(service, "hi there", n=3, stream=True)]
    assert roles.count("assistant") == 3


def test_choices_of_one_seed_differ_and_come_again(service: FakeService) -> None:
    def seeds(**fields: Any) -> list[int]:
        service.core.seen.clear()
        complete(service, n=3, max_tokens=1, **fields)
        return [r.params.seed for r in service.core.seen]

    assert seeds(seed=42) == seeds(seed=42) == [42, 43, 44]
    assert len(set(seeds() + seeds())) == 6


def test_token_ids_as_prompts(service: FakeService) -> None:
    ids = bundled_tokenizer().encode(TEXT).tolist()
    assert complete(service, ids).choices[0].text == TEXT
    assert [c.text for c in complete(service, [ids, [28120]]).choices] == [TEXT, "hello"]


def test_best_of_shows_the_likeliest(start: Any) -> None:
    """Token 7k is likelier than 7k+6 for the dummy engine; the seed chooses which one a choice says."""
    service = start(script=lambda request: itertools.repeat(700 + request.params.seed % 7, 4))
    name = bundled_tokenizer().token_name
    answer = complete(service, seed=4, best_of=3, n=1)  # seeds 4, 5, 6: tokens 704, 705, 706
    assert answer.choices[0].text == name(704) * 4
    assert answer.usage.completion_tokens == 12
    assert answer.choices[0].logprobs is None
    answer = complete(service, seed=5, best_of=3, n=2, logprobs=0)  # 705, 706, 700
    assert [c.text for c in answer.choices] == [name(700) * 4, name(705) * 4]
    assert [c.index for c in answer.choices] == [0, 1]


# ---- log-probabilities --------------------------------------------------------------------------------------------


def expected(ids: list[int], top: int) -> tuple[list[float], list[dict[str, float]]]:
    name = bundled_tokenizer().token_name
    values = [fake_logprobs(i, max(top, 1), 49152) for i in ids]
    tops = [{name(i): v for i, v in zip(x.top_ids, x.top_logprobs, strict=True)} for x in values]
    return [x.logprob for x in values], tops


@pytest.mark.parametrize("top", [0, 2])
def test_completion_logprobs(service: FakeService, top: int) -> None:
    ids = [*bundled_tokenizer().encode(TEXT).tolist(), EOS]
    own, tops = expected(ids, top)
    whole = complete(service, logprobs=top).choices[0].logprobs
    assert whole.token_logprobs == own
    assert whole.top_logprobs == tops
    assert whole.tokens == [bundled_tokenizer().token_name(i) for i in ids]
    text = bundled_tokenizer().stream()
    assert whole.text_offset == [0, *itertools.accumulate(len(text.step(i)) for i in ids)][:-1]
    assert TEXT[whole.text_offset[2] :].startswith(whole.tokens[2])
    pieces = [c.choices[0].logprobs for c in complete(service, logprobs=top, stream=True)]
    for name in ("token_logprobs", "top_logprobs", "tokens", "text_offset"):
        assert [x for p in pieces for x in getattr(p, name)] == getattr(whole, name), name


@pytest.mark.parametrize("top", [None, 0, 3])
def test_chat_logprobs(service: FakeService, top: int | None) -> None:
    ids = [*bundled_tokenizer().encode(TEXT).tolist(), EOS]
    fields = {"logprobs": True} | ({} if top is None else {"top_logprobs": top})
    whole = chat(service, **fields).choices[0].logprobs.content
    assert [x.logprob for x in whole] == expected(ids, 0)[0]
    assert b"".join(bytes(x.bytes) for x in whole[:-1]).decode() == TEXT
    assert all(len(x.top_logprobs) == (top or 0) for x in whole)
    if top:
        assert whole[0].top_logprobs[0].token == whole[0].token
    streamed = [x for c in chat(service, **fields, stream=True) for x in c.choices[0].logprobs.content]
    assert streamed == whole


def test_echo(service: FakeService) -> None:
    prompt = "one two three"
    ids = bundled_tokenizer().encode(prompt).tolist()
    answer = complete(service, prompt, echo=True)
    assert answer.choices[0].text == prompt * 2
    assert joined(complete(service, prompt, echo=True, stream=True))[0] == prompt * 2
    assert complete(service, ids, echo=True).choices[0].text == prompt * 2
    own, tops = expected([*ids, *ids[:1]], 1)
    first = complete(service, prompt, echo=True, logprobs=1, max_tokens=1, temperature=0)
    assert first.choices[0].logprobs.token_logprobs == [None, *own[1:]]
    assert first.choices[0].logprobs.top_logprobs == [None, *tops[1:]]
    assert "".join(first.choices[0].logprobs.tokens) == prompt + "one"
    again = complete(service, prompt, echo=True, logprobs=1, max_tokens=1, temperature=0)
    assert again.choices[0].logprobs == first.choices[0].logprobs
    (chunk,) = complete(service, prompt, echo=True, logprobs=1, max_tokens=1, stream=True)
    assert chunk.choices[0].logprobs == first.choices[0].logprobs


def test_offsets_of_an_echo_with_special_tokens(service: FakeService) -> None:
    """Each token stands at its offset in the text, those that follow the prompt too."""
    prompt = "<|im_start|>user\nhi<|im_end|>\n"
    for streamed in (False, True):
        answer = complete(service, prompt, echo=True, logprobs=0, max_tokens=3, stream=streamed)
        choices = [c.choices[0] for c in answer] if streamed else answer.choices
        text = "".join(c.text for c in choices)
        offsets = [o for c in choices for o in c.logprobs.text_offset]
        assert offsets == [0, 12, 16, 17, 19, 29, 30, 30, 34]  # <|im_start|> is not shown in the answer
        assert text == prompt + "user\n"
        names = [name for c in choices for name in c.logprobs.tokens]
        assert all(text.startswith(n, o) for n, o in list(zip(names, offsets, strict=True))[:6])
    ids = bundled_tokenizer().encode(prompt).tolist()
    logprobs = complete(service, ids, echo=True, logprobs=0, max_tokens=0).choices[0].logprobs
    assert logprobs.text_offset == [0, 0, 4, 5, 7, 7]


def test_scoring_a_prompt(service: FakeService) -> None:
    """max_tokens 0: the prompt's log-probabilities and no answer."""
    ids = bundled_tokenizer().encode("one two three").tolist()
    own, tops = expected(ids, 1)
    for prompt in ("one two three", ids):
        answer = complete(service, prompt, echo=True, logprobs=1, max_tokens=0, n=2)
        for choice in answer.choices:
            assert (choice.text, choice.finish_reason) == ("one two three", "length")
            assert choice.logprobs.token_logprobs == [None, *own[1:]]
            assert choice.logprobs.top_logprobs == [None, *tops[1:]]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)
        fields = {"echo": True, "logprobs": 1, "max_tokens": 0, "n": 2, "stream_options": {"include_usage": True}}
        *chunks, last = complete(service, prompt, **fields, stream=True)
        assert sorted(chunks, key=lambda c: c.choices[0].index)[0].choices[0] == answer.choices[0]
        assert len(chunks) == 2 and last.usage == answer.usage
    answer = complete(service, ids, max_tokens=0, stop="x")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
    assert joined(complete(service, ids, max_tokens=0, stream=True))[:2] == ("", "length")


def test_the_prompts_logprobs_are_made_once_and_not_in_the_event_loop(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for module in ("answers", "responses"):

        def spy(choice: Any, tokenizer: Any) -> None:
            if choice.prompt_json is None:
                made.append(threading.current_thread().name)
            make_prompt_json(choice, tokenizer)

        monkeypatch.setattr(f"spmd_serve.frontend.{module}.make_prompt_json", spy)
    prompts = ["one two three", "four five"]
    fields = {"echo": True, "logprobs": 2, "prompt_logprobs": 1, "n": 3, "max_tokens": 2}
    whole = complete(service, prompts, **fields)
    first: dict[int, Any] = {}
    for chunk in complete(service, prompts, **fields, stream=True):
        first.setdefault(chunk.choices[0].index, chunk.choices[0])
    assert len(first) == len(whole.choices) == 6
    for index, choice in enumerate(whole.choices):
        assert first[index].prompt_logprobs == choice.prompt_logprobs
        assert [len(top) for top in choice.logprobs.top_logprobs if top] == [2] * (len(choice.logprobs.tokens) - 1)
        assert [len(entry) for entry in choice.prompt_logprobs if entry] == [1] * (len(choice.prompt_logprobs) - 1)
    assert len(made) == 4, "once for each prompt, whole and streamed"
    assert all(name.startswith("tokenizer") for name in made), made


def test_an_answer_of_the_client_goes_back_as_a_message(service: FakeService) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = chat(service, messages=messages)
    messages.append(answer.choices[0].message.model_dump())
    messages.append({"role": "user", "content": "and on"})
    assert chat(service, messages=messages).choices[0].message.content == "and on"


def test_prompt_logprobs(service: FakeService) -> None:
    ids = bundled_tokenizer().encode("one two three").tolist()
    answer = complete(service, ids, prompt_logprobs=2, n=2, max_tokens=1)
    for choice in answer.choices:
        assert choice.prompt_logprobs[0] is None
        assert len(choice.prompt_logprobs) == len(ids)
        for token, entry in zip(ids[1:], choice.prompt_logprobs[1:], strict=True):
            assert set(entry) == {str(token), str(token + 1)}
            assert entry[str(token)]["rank"] == 1
            assert entry[str(token)]["decoded_token"] == bundled_tokenizer().token_name(token)
    answer = chat(service, prompt_logprobs=0, max_tokens=1)
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    chunks = list(complete(service, ids, prompt_logprobs=0, max_tokens=3, stream=True))
    assert len(chunks[0].choices[0].prompt_logprobs) == len(ids)
    assert not any(hasattr(c.choices[0], "prompt_logprobs") for c in chunks[1:])


# ---- what goes to the engine --------------------------------------------------------------------------------------


def test_parameters_reach_the_engine(start: Any) -> None:
    service = start(Config(scheduler=SchedulerOptions(schedule="priority")))
    fields = {
        "temperature": 0.5, "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": -1, "seed": 5, "logit_bias": {"9": 3},
        "top_k": 4, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 1, "stop_token_ids": [9], "ignore_eos": True,
        "priority": 7, "cache_salt": "salt", "timeout_": 100, "guided_regex": "a+", "user": "somebody",
    }  # fmt: skip
    complete(service, **fields, max_tokens=2)
    chat(service, **fields, max_completion_tokens=2)
    for request in service.core.seen:
        params = request.params
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.5, 4, 0.25)
        assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.5)
        assert (params.seed, params.max_tokens, params.min_tokens) == (5, 2, 1)
        assert (params.stop_token_ids, params.ignore_eos, params.logit_bias) == ((9,), True, ((9, 3.0),))
        assert params.grammar is not None
        assert (request.priority, request.cache_salt) == (7, "salt")
        assert request.deadline is not None
    assert len(service.core.seen) == 2


def test_stop_strings_stop_the_engine_too(service: FakeService) -> None:
    service.core.aborted.clear()
    complete(service, stop="brown", ignore_eos=True, max_tokens=8000)
    reasons = [reason for _, reason in service.core.aborted]
    assert reasons in ([], ["stop"])  # [] while the message is on its way
    assert service.core.busy <= 1


def test_chat_forms(service: FakeService) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(service, parts).choices[0].message.content == "one\ntwo"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "result"},
    ]
    assert chat(service, messages=messages).choices[0].message.content == "result"
    service.core.seen.clear()
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "so far"}]
    chat(service, messages=messages, continue_final_message=True, max_tokens=1)
    chat(service, messages=messages, add_generation_prompt=False, max_tokens=1)
    prompts = [bundled_tokenizer().decode(r.prompt_ids(), False) for r in service.core.seen]
    assert prompts[0].endswith("so far")
    assert prompts[1].endswith("so far<|im_end|>\n")


# ---- other endpoints ----------------------------------------------------------------------------------------------


def test_models(service: FakeService) -> None:
    (model,) = service.client.models.list().data
    assert (model.id, model.object, model.created) == (MODEL, "model", fake_info().created)
    assert service.client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError) as caught:
        service.client.models.retrieve("other/model")
    assert caught.value.body["code"] == "model_not_found"


def test_what_would_take_seconds_to_tokenize_is_refused(service: FakeService) -> None:
    response = service.http.post("/tokenize", json={"prompt": "a " * 600_000})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert "at most 1048576" in response.json()["error"]["message"]


def test_tokenize_round_trip(service: FakeService) -> None:
    answer = service.http.post("/tokenize", json={"prompt": TEXT}).json()
    assert answer["count"] == COUNT == len(answer["tokens"])
    back = service.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": TEXT}


def test_small_endpoints(service: FakeService) -> None:
    for path in ("/health", "/ready"):
        assert service.http.get(path).json()["status"] == "ready"
    assert service.http.get("/version").json()["version"]
    metrics = service.http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    response = service.http.get("/nothing/here")
    assert response.status_code == 404 and response.json()["error"]["type"] == "invalid_request_error"
    response = service.http.get("/v1/completions")
    assert response.status_code == 405 and "allow" in response.headers and "error" in response.json()


def test_async_client_with_many_streams(service: FakeService) -> None:
    """128 streams and as many whole requests at once: everyone gets their own text."""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="x", max_retries=0, timeout=120) as client:

            async def whole(i: int) -> None:
                answer = await client.completions.create(
                    model=MODEL, prompt=f"number {i} " * (1 + i % 5), max_tokens=99
                )
                assert answer.choices[0].text == f"number {i} " * (1 + i % 5)

            async def stream(i: int) -> None:
                text = ""
                messages = [{"role": "user", "content": f"número {i} 😀"}]
                async for chunk in await client.chat.completions.create(model=MODEL, messages=messages, stream=True):
                    text += chunk.choices[0].delta.content or ""
                assert text == f"número {i} 😀"

            await asyncio.gather(*(f(i) for i in range(128) for f in (whole, stream)))

    asyncio.run(run())


def test_a_token_leaves_at_once(start: Any) -> None:
    """No timer stands between a token and its bytes: the quickest of some tokens takes less than 5 ms."""
    published: dict[int, float] = {}

    def script(request: Any) -> Iterator[int]:
        for i in range(30):
            published[i] = time.perf_counter()
            yield 300 + i

    service = start(script=script, step_interval=0.02)
    options = {"include_usage": True, "continuous_usage_stats": True}
    delays = [
        time.perf_counter() - published[chunk.usage.completion_tokens - 1]
        for chunk in complete(service, stream=True, stream_options=options)
        if chunk.choices
    ]
    assert len(delays) > 10
    assert min(delays) < 0.005
