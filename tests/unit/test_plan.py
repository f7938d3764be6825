"""From bodies to plans: every field has its place, every wrong value is refused under its name."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from pydantic import ValidationError
from support.fake_service import CONTEXT, EOS, MODEL, VOCAB, bundled_tokenizer, fake_info, model_folder

from spmd_serve.config import Config, SchedulerOptions, ServerOptions
from spmd_serve.errors import RequestError
from spmd_serve.frontend.chat import ChatTemplate, find_template
from spmd_serve.frontend.grammar import GrammarCompiler
from spmd_serve.frontend.plan import MAX_TOKENIZED, Planner, RequestPlan
from spmd_serve.frontend.schemas import (
    HARMLESS,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
)
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.types import Lengths, SamplingParams

HELLO = [{"role": "user", "content": "hello"}]


def make_planner(config: Config | None = None, template: str | None = None, **info: Any) -> Planner:
    tokenizer = bundled_tokenizer()
    source = template or find_template(model_folder(), None)
    served = fake_info(**info)
    return Planner(
        config or Config(), served, tokenizer, ChatTemplate(source, tokenizer), GrammarCompiler(tokenizer, served)
    )


@pytest.fixture(scope="module")
def planner() -> Planner:
    return make_planner()


def completion(planner: Planner, **fields: Any) -> RequestPlan:
    return planner.completion(json.dumps({"prompt": "hello"} | fields).encode())


def chat(planner: Planner, **fields: Any) -> RequestPlan:
    return planner.chat(json.dumps({"messages": HELLO} | fields).encode())


# ---- what is right ------------------------------------------------------------------------------------------------


def test_defaults(planner: Planner) -> None:
    plan = completion(planner)
    assert plan.params == SamplingParams(16, seed=plan.params.seed)
    assert (plan.n, plan.best_of, plan.stream, plan.echo, plan.timeout) == (1, 1, False, False, None)
    assert plan.prompts[0].ids.tolist() == [28120]
    assert 0 <= plan.params.seed < 2**63
    assert completion(planner).params.seed != plan.params.seed
    plan = chat(planner)
    assert plan.prompts[0].max_tokens == CONTEXT - len(plan.prompts[0].ids)
    assert plan.chat


def test_every_sampling_field_reaches_the_engine(planner: Planner) -> None:
    fields = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": 2**63 - 1,
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "min_tokens": 4,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "logprobs": 3,
        "prompt_logprobs": 2,
    }
    params = completion(planner, **fields, logit_bias={"7": -100, "8": 1.5}).params
    for name, value in fields.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value), name
    assert params.logit_bias == ((7, -100.0), (8, 1.5))
    plan = chat(planner, logprobs=True, top_logprobs=4, max_completion_tokens=8, cache_salt="s", timeout=2.5)
    assert plan.params.logprobs == 4
    assert plan.prompts[0].max_tokens == 8
    assert (plan.priority, plan.cache_salt, plan.timeout) == (0, "s", 2.5)
    assert chat(planner, logprobs=True).params.logprobs == 0
    assert chat(planner, logprobs=False).params.logprobs is None


def test_priority_counts_where_the_server_goes_by_it(planner: Planner) -> None:
    by_priority = make_planner(Config(scheduler=SchedulerOptions(schedule="priority")))
    assert chat(by_priority, priority=-3).priority == -3
    error = refused(completion, planner, "priority", {"priority": -3})
    assert "--schedule priority" in error.message
    assert completion(planner, priority=0).priority == 0


def test_any_64_bit_seed_has_a_place_in_the_engines_range(planner: Planner) -> None:
    def seed(value: int) -> int:
        return completion(planner, seed=value).params.seed

    assert [seed(i) for i in (0, 5, 2**63 - 1)] == [0, 5, 2**63 - 1]
    assert [seed(i) for i in (-1, -2, -(2**63))] == [2**63 - 1, 2**63 - 2, 0]


def test_a_prompt_can_be_scored_without_an_answer(planner: Planner) -> None:
    """max_tokens 0 is not the default, and leaves the whole context to the prompt."""
    plan = completion(planner, max_tokens=0, echo=True, logprobs=1)
    assert (plan.prompts[0].max_tokens, plan.choice_params(plan.prompts[0], 0).max_tokens) == (0, 0)
    assert completion(planner, max_tokens=0, prompt=[5] * CONTEXT).prompts[0].max_tokens == 0
    error = refused(completion, planner, "prompt", {"max_tokens": 0, "prompt": [5] * (CONTEXT + 1)})
    assert "for the answer" not in error.message
    refused(completion, planner, "min_tokens", {"max_tokens": 0, "min_tokens": 1})


@pytest.mark.parametrize(
    "fields",
    [
        {"stream_options": {}},
        {"stream_options": {"include_usage": False}},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"unknown": None},
        {"response_format": {"type": "text", "unknown": None}},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_accepted(planner: Planner, fields: dict[str, Any]) -> None:
    for make in (completion, chat):
        assert make(planner, **fields, seed=1).params == make(planner, seed=1).params


def test_harmless_values_are_accepted_wherever_they_stand(planner: Planner) -> None:
    """Also of fields that only the other endpoint knows, and of vLLM's, whose defaults SillyTavern and others send."""
    for name, values in HARMLESS.items():
        for value in values:
            for make in (completion, chat):
                assert make(planner, **{name: value}, seed=1).params == make(planner, seed=1).params
    assert completion(planner, suffix="").prompts == completion(planner).prompts
    assert chat(planner, top_logprobs=0).params.logprobs is None


def test_an_answer_of_the_client_is_a_message(planner: Planner) -> None:
    """What the official client's model_dump() gives, with fields of its own that are null."""
    answer = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None, "parsed": None}
    part = {"type": "text", "text": "hello", "cache_control": None}
    plan = chat(planner, messages=[*HELLO, answer, {"role": "user", "content": [part], "unknown": None}])
    plain = chat(planner, messages=[*HELLO, {"role": "assistant", "content": "hi"}, *HELLO])
    assert plan.prompts == plain.prompts
    refused(chat, planner, "messages[0].annotations", {"messages": [answer | {"annotations": [{"type": "x"}]}]})


def test_what_client_libraries_add_to_messages(planner: Planner) -> None:
    """Another reading of the content, their own bookkeeping, and marks for what is done anyway."""
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "1", "type": "function", "function": function}
    plain: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": '{"a": 1}'},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "assistant", "content": "hi"},
    ]
    mark = {"cache_control": {"type": "ephemeral"}}
    added = [
        {"role": "user", "content": [{"type": "text", "text": "hello"} | mark]},  # OpenRouter's and Anthropic's
        plain[1]
        | {"parsed": {"a": 1}, "provider_specific_fields": {"refusal": None}},  # the openai client's, litellm's
        {
            "role": "assistant",
            "tool_calls": [call | {"index": 0, "function": function | {"parsed_arguments": {"a": 1}}}],
        },
        plain[3] | mark | {"type": "text"},  # lm-eval's
        plain[4]
        | {"content": [{"type": "text", "text": "hi", "role": "assistant", "refusal": None, "annotations": []}]},
    ]
    assert chat(planner, messages=added).prompts == chat(planner, messages=plain).prompts
    for name, value in {"cache_control": {"type": "x"}, "provider_specific_fields": {"a": 1}, "type": "image"}.items():
        refused(chat, planner, f"messages[0].{name}", {"messages": [plain[1] | {name: value}]})
    part = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    error = refused(chat, planner, "messages[0].content", {"messages": [{"role": "user", "content": [part]}]})
    assert "cache_control" in error.message
    part = {"type": "text", "text": "hello", "role": "system"}
    assert (
        "'role'"
        in refused(chat, planner, "messages[0].content", {"messages": [plain[0] | {"content": [part]}]}).message
    )


def test_prompt_logprobs_are_bounded(planner: Planner) -> None:
    prompt = [5] * 5000
    completion(planner, prompt=prompt, prompt_logprobs=20, n=9)
    completion(planner, prompt=prompt, logprobs=20, n=128)
    refused(completion, planner, "prompt_logprobs", {"prompt": prompt, "prompt_logprobs": 20, "n": 10})
    refused(completion, planner, "prompt_logprobs", {"prompt": [prompt] * 10, "prompt_logprobs": 20})
    refused(completion, planner, "logprobs", {"prompt": prompt, "echo": True, "logprobs": 20, "n": 10})
    refused(chat, planner, "prompt_logprobs", {"prompt_logprobs": 20, "n": 128, "messages": HELLO * 100})


def test_logprobs_of_generated_tokens_are_bounded(planner: Planner) -> None:
    """128 choices of 8,000 tokens would be 22 million of them: gigabytes of memory."""
    many = {"logprobs": 20, "n": 128}
    completion(planner, **many, max_tokens=3000)
    chat(planner, logprobs=True, top_logprobs=20, n=40)
    refused(completion, planner, "logprobs", many | {"max_tokens": 4000})
    refused(completion, planner, "logprobs", many | {"prompt": ["a", "b"], "max_tokens": 2000})
    refused(chat, planner, "top_logprobs", {"logprobs": True, "top_logprobs": 20, "n": 128, "messages": HELLO})


def test_echoed_prompts_are_bounded(planner: Planner) -> None:
    prompt = [5] * 8000 + [max(range(VOCAB), key=lambda i: len(bundled_tokenizer().token_bytes(i)))] * 100
    completion(planner, prompt=prompt, echo=True, n=128)
    longest = [prompt[-1]] * 8000
    refused(completion, planner, "echo", {"prompt": [longest] * 2, "echo": True, "n": 128})
    completion(planner, prompt=[longest] * 2, n=128)


def test_null_is_the_same_as_absent(planner: Planner) -> None:
    for schema, make in ((CompletionBody, completion), (ChatBody, chat)):
        names = set(schema.model_fields) | set(schema.refused_fields)
        nulls = dict.fromkeys(names - {"prompt", "messages", "seed"})
        plan, plain = make(planner, **nulls, seed=1), make(planner, seed=1)
        assert (plan.params, plan.n, plan.stream) == (plain.params, plain.n, plain.stream)


def test_choices_have_seeds_of_their_own(planner: Planner) -> None:
    plan = completion(planner, n=3, seed=2**63 - 2)
    assert [plan.choice_params(plan.prompts[0], i).seed for i in range(3)] == [2**63 - 2, 2**63 - 1, 0]


def test_prompts_in_all_their_forms(planner: Planner) -> None:
    def ids(prompt: Any) -> list[list[int]]:
        return [p.ids.tolist() for p in completion(planner, prompt=prompt).prompts]

    assert ids("hello") == ids(["hello"]) == ids([28120]) == ids([[28120]]) == [[28120]]
    assert ids(["hello", "hello"]) == ids([[28120], [28120]]) == [[28120], [28120]]


def test_generation_defaults_of_the_model_hold_until_the_request_says_otherwise() -> None:
    planner = make_planner(
        generation_defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}
    )
    params = completion(planner).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (
        0.6,
        20,
        0.95,
        0.1,
        1.1,
    )
    params = completion(planner, temperature=0, top_k=-1, top_p=1).params
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 0, 1.0)
    assert completion(planner, temperature=1e-9).params.temperature == 0.0


def test_length_is_clamped_to_context_and_pool(planner: Planner) -> None:
    assert completion(planner, prompt=[5] * 8000, max_tokens=1000).prompts[0].max_tokens == 192
    assert completion(planner, prompt=[5] * 8191).prompts[0].max_tokens == 1
    small = make_planner(lengths=Lengths(CONTEXT, 64))
    assert completion(small, prompt=[5] * 40, max_tokens=60).prompts[0].max_tokens == 24
    assert completion(small, prompt=[5] * 63, max_tokens=9).prompts[0].max_tokens == 1
    assert completion(small, prompt=[5] * 64, max_tokens=0).prompts[0].max_tokens == 0


def test_echo_and_best_of(planner: Planner) -> None:
    plan = completion(planner, prompt="hello", echo=True, logprobs=2)
    assert plan.prompts[0].echo_text == "hello"
    assert (plan.params.logprobs, plan.params.prompt_logprobs, plan.prompt_logprobs) == (2, 2, None)
    plan = completion(planner, prompt="hello", echo=True, logprobs=2, prompt_logprobs=1)
    assert (plan.params.logprobs, plan.params.prompt_logprobs, plan.logprobs, plan.prompt_logprobs) == (2, 2, 2, 1)
    assert completion(planner, prompt=[28120, EOS], echo=True).prompts[0].echo_text == "hello"
    plan = completion(planner, n=2, best_of=4)
    assert (plan.n, plan.best_of, plan.params.logprobs, plan.logprobs) == (2, 4, 0, None)


def test_the_shorter_timeout_holds() -> None:
    planner = make_planner(Config(scheduler=SchedulerOptions(request_timeout=5.0)))
    assert completion(planner).timeout == 5
    assert completion(planner, timeout=2).timeout == 2
    assert completion(planner, timeout=60).timeout == 5


def test_one_bos_in_a_chat(tmp_path: Any) -> None:
    """The template writes BOS; a tokenizer that would add another is not asked to, and if it is, one is dropped."""
    from tokenizers import Tokenizer, processors

    folder = tmp_path
    bos = "<|im_start|>"
    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}))
    text_tokenizer = TextTokenizer(folder, VOCAB)
    info = fake_info()
    template = ChatTemplate("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", text_tokenizer)
    planner = Planner(Config(), info, text_tokenizer, template, GrammarCompiler(text_tokenizer, info))
    for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        assert chat(planner, **fields).prompts[0].ids.tolist() == [1, 28120], fields
    assert completion(planner).prompts[0].ids.tolist() == [1, 28120]  # raw completions: the tokenizer's default
    assert completion(planner, add_special_tokens=False).prompts[0].ids.tolist() == [28120]


def test_a_text_that_the_tokenizer_has_no_tokens_for_is_the_clients_error(tmp_path: Any) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.Unigram([("a", -1.0)], unk_id=None)).save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path, VOCAB)
    info = fake_info()
    template = ChatTemplate("{{ messages[0].content }}", tokenizer)
    planner = Planner(Config(), info, tokenizer, template, GrammarCompiler(tokenizer, info))
    assert completion(planner, prompt="aa").prompts[0].ids.tolist() == [0, 0]
    for ask, param in (
        (lambda: completion(planner), "prompt"),
        (lambda: chat(planner), "messages"),
        (lambda: planner.tokenize(b'{"prompt": "hello"}'), "prompt"),
    ):
        with pytest.raises(RequestError, match=r"tokenizer cannot encode the text: .*unknown token") as caught:
            ask()
        assert (caught.value.param, caught.value.status) == (param, 400)


def test_tokens_that_the_model_has_no_embedding_for_are_refused() -> None:
    """A tokenizer may have more of them than the model: such an id would end the job."""
    small = make_planner(vocab_size=28120)  # "hello" is the first id beyond
    for make, param in ((completion, "prompt"), (chat, "messages")):
        with pytest.raises(RequestError, match=r"the token id \d+; ids go from 0 to 28119") as caught:
            make(small)
        assert caught.value.param == param
    assert completion(make_planner(vocab_size=28121)).prompts[0].ids.tolist() == [28120]


def test_messages_as_templates_want_them() -> None:
    planner = make_planner(template="{{ messages | tojson }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    bare = {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}}
    null = {"id": "3", "type": "function", "function": {"name": "g", "arguments": "null"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, bare, null]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "user", "content": "thanks", "name": "Ann"},
    ]
    tokenizer = bundled_tokenizer()
    text = tokenizer.decode(chat(planner, messages=messages).prompts[0].ids, skip_special_tokens=False)
    expected_call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}
    expected_bare = {"id": "2", "type": "function", "function": {"name": "g", "arguments": {}}}
    assert json.loads(text) == [
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [expected_call, expected_bare, expected_bare | {"id": "3"}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "user", "content": "thanks", "name": "Ann"},
    ]


def test_detokenize_is_bounded(planner: Planner) -> None:
    """8 MiB of ids can be hundreds of MiB of text, held until its client has read it."""
    with pytest.raises(RequestError, match="split them") as caught:
        planner.detokenize(b'{"tokens":[' + b"5," * MAX_TOKENIZED + b"5]}")
    assert caught.value.param == "tokens"


def test_tokenize_and_detokenize(planner: Planner) -> None:
    answer = planner.tokenize(b'{"prompt": "hello hello", "return_token_strs": true}')
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 2
    assert answer["max_model_len"] == CONTEXT
    assert planner.detokenize(json.dumps({"tokens": answer["tokens"]}).encode()) == {"prompt": "hello hello"}
    chatted = planner.tokenize(json.dumps({"messages": HELLO}).encode())["tokens"]
    assert array("i", chatted) == chat(planner).prompts[0].ids


# ---- what is wrong ------------------------------------------------------------------------------------------------

COMMON = [
    ("model", {"model": "nothing"}),
    ("model", {"model": 5}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": True}),
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": 1e9}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.5}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": -0.1}),
    ("n", {"n": 0}),
    ("n", {"n": 5_000_000}),
    ("seed", {"seed": 10**20}),
    ("seed", {"seed": -(2**63) - 1}),
    ("seed", {"seed": 2**63}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.foo", {"stream": True, "stream_options": {"foo": 1}}),
    ("stream_options.include_obfuscation", {"stream": True, "stream_options": {"include_obfuscation": True}}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["a", 5]}),
    ("stop", {"stop": ["x"] * 17}),
    ("stop", {"stop": "x" * 1025}),
    ("stop", {"stop": {}}),
    ("stop_token_ids[1]", {"stop_token_ids": [1, -1]}),
    ("stop_token_ids", {"stop_token_ids": [VOCAB]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 257}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -3}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": 1e-40}),
    ("min_tokens", {"min_tokens": 11, "max_tokens": 10}),
    ("min_tokens", {"min_tokens": -1}),
    ("logit_bias", {"logit_bias": {"x": 1}}),
    ("logit_bias", {"logit_bias": {"5": 101}}),
    ("logit_bias", {"logit_bias": {"5": "1"}}),
    ("logit_bias", {"logit_bias": {str(VOCAB): 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": [1]}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": -1}),
    ("priority", {"priority": 2**31}),
    ("priority", {"priority": 1}),
    ("guided_json", {"guided_json": 5}),
    ("structured_outputs.json", {"structured_outputs": {"json": [1]}}),
    ("str", {"str": 1}),
    ("timeout", {"timeout": 0}),
    ("timeout", {"timeout": -5}),
    ("cache_salt", {"cache_salt": "s" * 257}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    ("response_format", {"response_format": {"type": "json_schema"}}),
    *(
        ("response_format.json_schema", {"response_format": {"type": kind, "json_schema": {"name": "a", "schema": {}}}})
        for kind in ("text", "json_object")
    ),
    ("response_format", {"response_format": "json"}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("unknown", {"unknown": 1}),
    ("use_beam_search", {"use_beam_search": True}),
    ("length_penalty", {"length_penalty": 0.5}),
    ("spaces_between_special_tokens", {"spaces_between_special_tokens": False}),
]
COMPLETION_ONLY = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": [""]}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": {"a": 1}}),
    ("prompt", {"prompt": [1, "a"]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": [1.0]}),
    ("prompt", {"prompt": [VOCAB]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [2**40]}),
    ("prompt", {"prompt": [10**30]}),
    ("prompt", {"prompt": ["a"] * 1025}),
    ("prompt", {"prompt": [5] * CONTEXT}),
    ("prompt", {"prompt": "word " * (CONTEXT + 1)}),
    ("logprobs", {"logprobs": 10**6}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": True}),
    ("best_of", {"best_of": 1, "n": 2}),
    ("best_of", {"best_of": 129}),
    ("best_of", {"best_of": 2, "stream": True}),
    ("n", {"n": 128, "prompt": ["a"] * 100}),
    ("suffix", {"suffix": "x"}),
    ("suffix", {"suffix": []}),
    ("tools", {"tools": [{}]}),
]
CHAT_ONLY = [
    ("messages", {"messages": []}),
    ("messages", {"messages": "hello"}),
    ("messages[0].role", {"messages": [{"role": "king", "content": "x"}]}),
    ("messages[0].role", {"messages": [{"content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": ["a"]}]}),
    ("messages[0].foo", {"messages": [{"role": "user", "content": "x", "foo": 1}]}),
    ("messages[0].audio", {"messages": [{"role": "user", "content": "x", "audio": {}}]}),
    ("messages[0].tool_calls[0].id", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}),
    (
        "messages[0].tool_calls[0].function.arguments",
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}]},
    ),
    ("messages", {"messages": [{"role": "user", "content": "word " * CONTEXT}]}),
    ("chat_template_kwargs", {"messages": HELLO, "chat_template_kwargs": {"messages": 5}}),
    ("max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_tokens", {"max_tokens": 0}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("service_tier", {"service_tier": "priority"}),
    ("store", {"store": True}),
    ("store", {"store": 0}),
    ("logprobs", {"logprobs": 5}),
    ("top_logprobs", {"top_logprobs": 5}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 10**6}),
    ("continue_final_message", {"continue_final_message": True, "add_generation_prompt": True}),
    ("best_of", {"best_of": 2}),
    ("echo", {"echo": True}),
    *[(name, {name: 1}) for name in ChatBody.refused_fields],
]


def refused(make: Any, planner: Planner, param: str, fields: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(planner, **fields)
    error: RequestError = caught.value
    assert error.param == param
    assert error.status == (404 if fields.get("model") == "nothing" else 400)
    assert len(error.message) < 1500
    return error


def name_case(case: tuple[str, dict[str, Any]]) -> str:
    return json.dumps(case[1])[:60]


@pytest.mark.parametrize("case", COMMON + COMPLETION_ONLY, ids=name_case)
def test_wrong_completions(planner: Planner, case: tuple[str, dict[str, Any]]) -> None:
    refused(completion, planner, *case)


@pytest.mark.parametrize("case", COMMON + CHAT_ONLY, ids=name_case)
def test_wrong_chats(planner: Planner, case: tuple[str, dict[str, Any]]) -> None:
    refused(chat, planner, *case)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": -Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
    ],
)
def test_what_is_not_json_or_not_an_object(planner: Planner, data: bytes) -> None:
    for make in (planner.completion, planner.chat, planner.tokenize, planner.detokenize):
        with pytest.raises(RequestError) as caught:
            make(data)
        assert caught.value.status == 400


def test_a_byte_order_mark_before_the_body_is_passed_over(planner: Planner) -> None:
    assert list(planner.completion(b'\xef\xbb\xbf{"prompt": [5]}').prompts[0].ids) == [5]
    with pytest.raises(RequestError):
        planner.completion(b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": [5]}')


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "-NaN", "1e999", "True", "None", "undefined", "08", ".5", "+1", "'x'", ""]
)
def test_a_value_that_json_has_not_is_refused_under_its_name(planner: Planner, value: str) -> None:
    for body, name in (
        ('{"prompt": "NaN", "top_p": %s}', "top_p"),
        ('{"top_p" :\n%s, "a": 1}', "top_p"),
        ('{"\u00e9": %s}', "?"),
    ):
        with pytest.raises(RequestError, match="no JSON") as caught:
            planner.completion((body % value).encode())
        assert caught.value.param == name
    for body in ('{"top_p"%s}', "[%s", '{"prompt": "\\"top_p\\":%s'):
        with pytest.raises(RequestError) as caught:
            planner.completion((body % value).encode())
        assert caught.value.param is None


def test_too_long_a_prompt_states_both_lengths(planner: Planner) -> None:
    error = refused(completion, planner, "prompt", {"prompt": [5] * 9000})
    assert "9000 tokens" in error.message and "8192 tokens" in error.message
    assert "maximum context length" in error.message and error.code == "context_length_exceeded", (
        "what clients look for"
    )
    small = make_planner(lengths=Lengths(CONTEXT, 64))
    error = refused(completion, small, "prompt", {"prompt": [5] * 100})
    assert "100 tokens" in error.message and "64 tokens" in error.message and "--num-pages" in error.message
    error = refused(completion, planner, "prompt", {"prompt": "x" * 5_000_000})
    assert "at least" in error.message and "8192 tokens" in error.message


def test_limits_are_options() -> None:
    planner = make_planner(Config(server=ServerOptions(max_logprobs=2, max_n=3, max_prompts=4)))
    completion(planner, logprobs=2, n=3)
    completion(planner, prompt=["a"] * 4)
    refused(completion, planner, "logprobs", {"logprobs": 3})
    all_of_them = make_planner(Config(server=ServerOptions(max_logprobs=2 * VOCAB)))
    completion(all_of_them, logprobs=VOCAB, max_tokens=1)
    refused(completion, all_of_them, "logprobs", {"logprobs": VOCAB + 1, "max_tokens": 1})
    refused(completion, all_of_them, "prompt_logprobs", {"prompt_logprobs": VOCAB + 1, "max_tokens": 1})
    refused(chat, all_of_them, "top_logprobs", {"logprobs": True, "top_logprobs": VOCAB + 1, "max_tokens": 1})
    refused(completion, planner, "best_of", {"best_of": 4})
    refused(chat, planner, "n", {"n": 4})
    refused(completion, planner, "prompt", {"prompt": ["a"] * 5})


def test_wrong_token_bodies(planner: Planner) -> None:
    for make, param, fields in (
        (planner.tokenize, "prompt", {}),
        (planner.tokenize, "prompt", {"prompt": "a", "messages": HELLO}),
        (planner.tokenize, "add_generation_prompt", {"prompt": "a", "add_generation_prompt": True}),
        (planner.tokenize, "chat_template_kwargs", {"prompt": "a", "chat_template_kwargs": {}}),
        (planner.tokenize, "model", {"prompt": "a", "model": "other"}),
        (planner.detokenize, "tokens", {}),
        (planner.detokenize, "tokens[0]", {"tokens": ["a"]}),
        (planner.detokenize, "tokens[0]", {"tokens": [-1]}),
        (planner.detokenize, "tokens", {"tokens": [VOCAB]}),
        (planner.detokenize, "foo", {"tokens": [], "foo": 1}),
    ):
        with pytest.raises(RequestError) as caught:
            make(json.dumps(fields).encode())
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (DetokenizeBody, {"tokens": ["a"] * 1000}),
        (ChatBody, {"messages": [{"role": "user", "content": "a", "foo": 1}] * 1000}),
        (CompletionBody, {"prompt": "a"} | {f"foo{i}": 1 for i in range(1000)}),
        (ChatBody, {"messages": [{"role": "user", "content": "a"} | {f"foo{i}": 1 for i in range(1000)}]}),
    ],
)
def test_of_many_wrong_things_one_is_looked_at(schema: type[Body], body: dict[str, Any]) -> None:
    """All of a large body's would keep the interpreter, and with it the steps of all requests, for ten seconds."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    assert caught.value.error_count() == 1


def test_the_served_name_is_accepted(planner: Planner) -> None:
    assert completion(planner, model=MODEL).model == MODEL
