"""Structured output: what is compiled is what the ranks enforce, what is wrong or costly is refused, and how answers end."""

from __future__ import annotations

import json
import shutil
import threading
from array import array
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_service import EOS, VOCAB, bundled_tokenizer, fake_info, model_folder
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from spmd_serve.config import SchedulerOptions
from spmd_serve.engine.grammar import Grammars, GrammarState
from spmd_serve.engine.row_extras import RowExtras
from spmd_serve.errors import OverloadedError, RequestError
from spmd_serve.frontend.grammar import MAX_MULTIPLE, MAX_NESTING, MAX_SOURCE, GrammarCompiler
from spmd_serve.frontend.schemas import CompletionBody
from spmd_serve.frontend.tokenizer import TextTokenizer
from spmd_serve.scheduler.scheduler import Scheduler
from spmd_serve.structured_output import KEPT, Compiled, CompiledGrammars
from spmd_serve.types import FinishReason, NewRow, Request, SamplingParams, StepInput, StepOutput, StepTokens

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(bundled_tokenizer(), fake_info())


@cache
def grammars() -> Grammars:
    """As each rank makes its own."""
    return Grammars(model_folder(), VOCAB, (EOS,))


def compiled(compiler: GrammarCompiler, **fields: Any) -> str | None:
    return compiler.compile(CompletionBody.model_validate({"prompt": "x"} | fields))


def accepts(grammar: str | None, text: str) -> bool:
    """Whether an engine with this grammar can write `text` and end there."""
    assert grammar is not None
    state = grammars().start(grammar, [])
    return write(state, text) == [None] * len(encode(text)) and bool(mask(state)[EOS])


def encode(text: str) -> list[int]:
    return bundled_tokenizer().encode(text).tolist()


def write(state: GrammarState, text: str) -> list[str | None]:
    """What `accept` says to each token of a text."""
    return [state.accept(token) for token in encode(text)]


def mask(state: GrammarState, hidden: tuple[int, ...] = ()) -> torch.Tensor:
    return state.allowed(range(VOCAB), torch.device("cpu"), hidden)


def optional_properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def node(*required: str) -> dict[str, Any]:
    """A linked list; endless if "next" is required."""
    reference = {"$ref": "#/$defs/node"}
    properties = {"name": {"type": "string"}, "next": reference}
    form = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return reference | {"$defs": {"node": form}}


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a":[1,null]}', "[1]"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
                }
            },
            '{"name":"Ann","age":5}',
            '{"name":"Ann"}',
        ),
        ({"structured_outputs": {"json": SCHEMA}}, '{"name":"Ann","age":5}', '{"name":5}'),
        ({"guided_json": json.dumps(SCHEMA)}, '{"name":"Ann","age":5}', '{"name":"Ann","age":500}'),
        ({"guided_json": node("name")}, '{"name":"a","next":{"name":"b"}}', '{"name":"a","next":{}}'),
        ({"guided_regex": "[a-c]+[0-9]{2}"}, "abc12", "abd12"),
        ({"structured_outputs": {"regex": "(yes|no)"}}, "yes", "yesno"),
        ({"guided_choice": ["red", 'bl"ue\n']}, 'bl"ue\n', "green"),
        ({"structured_outputs": {"choice": ["a b"]}}, "a b", "ab"),
        ({"guided_grammar": 'start: "x" num\nnum: /[0-9]+/'}, "x12", "12"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}, "bba", "bb"),
        ({"guided_grammar": '?start: "x" | "y"'}, "y", "z"),
        ({"guided_regex": "a+", "structured_outputs": {"regex": "a+"}}, "aa", "b"),  # as guidance names it twice
        (
            {"guided_grammar": r'root ::= "\u00e9\U0001f600\u0022" [\u00e0-\u00ff\u005d] "\\u00e9"'},
            '\u00e9\U0001f600"]\\u00e9',
            "x",
        ),
        ({"guided_json": {"type": "array", "items": {"type": "null"}, "uniqueItems": False}}, "[null,null]", "[1]"),
        ({"guided_json": {"properties": {"uniqueItems": False}, "type": "object"}}, "{}", '{"uniqueItems":1}'),
        (
            {
                "guided_json": {
                    "type": "object",
                    "propertyNames": {"type": "string"},
                    "additionalProperties": {"type": "string", "format": "password", "maxLength": 3},
                }
            },
            '{"a":"b c"}',
            '{"a":"long"}',
        ),
        (
            {"guided_json": {"properties": {"propertyNames": True, "format": {"const": 1}}}},
            '{"format":1}',
            '{"format":2}',
        ),
        (
            {"guided_json": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}},
            "-9223372036854774000",
            "1.5",
        ),
        ({"guided_json": {"enum": [-(2**53), 2**60, {"id": 5}]}}, "1152921504606846976", "1152921504606846977"),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_every_form(compiler: GrammarCompiler, fields: dict[str, Any], right: str, wrong: str) -> None:
    grammar = compiled(compiler, **fields)
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


def test_no_form(compiler: GrammarCompiler) -> None:
    assert compiled(compiler) is None
    assert compiled(compiler, response_format={"type": "text"}) is None


def test_json_cannot_be_padded_for_ever(compiler: GrammarCompiler) -> None:
    """A model that likes blanks would fill max_tokens with them and never close the object."""
    grammar = compiled(compiler, response_format={"type": "json_object"})
    assert not accepts(grammar, "{" + " " * 200 + "}")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def gbnf_chain(rules: int) -> str:
    """Each rule is the next one; it becomes clear from the last to the first that they are terminals."""
    chain = [f"r{i} ::= ............... r{i + 1}" for i in range(rules)]
    return "\n".join(["root ::= r0", *chain, f'r{rules} ::= "x"'])


def test_a_gbnf_is_refused_before_its_conversion_takes_long(compiler: GrammarCompiler) -> None:
    """Of 60 KB it would take 18 s of the interpreter that all threads share."""
    with pytest.raises(RequestError, match="too large a grammar: it has 1002 rules"):
        compiled(compiler, guided_grammar=gbnf_chain(1000))
    assert compiled(compiler, guided_grammar=gbnf_chain(100))


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("guided_regex", {"guided_regex": "a+", "structured_outputs": {"regex": "b+"}}),
        ("guided_regex", {"guided_regex": "a+", "structured_outputs": {"grammar": "a+"}}),
        ("guided_json", {"guided_json": {"type": "nothing"}}),
        ("guided_json", {"guided_json": "{"}),
        ("guided_json", {"guided_json": "5"}),
        ("guided_json", {"guided_json": "true"}),
        ("guided_json", {"guided_json": {"properties": {"id": {"const": 2**53 + 1}}}}),
        ("guided_json", {"guided_json": {"enum": [1, {"id": [1234567890123456789]}]}}),
        ("guided_grammar", {"guided_grammar": '{"grammars":[{"json_schema":{"type":"integer"}}]}'}),
        ("guided_grammar", {"guided_grammar": 'root ::= "\\ud800"'}),
        ("guided_json", {"guided_json": {"type": "string", "pattern": "(("}}),
        ("guided_json", {"guided_json": {"$ref": "#/nowhere"}}),
        ("guided_json", {"guided_json": nested(MAX_NESTING + 1)}),
        ("guided_json", {"guided_json": nested(400)}),
        ("guided_json", {"guided_json": {"type": "string", "const": "x" * MAX_SOURCE}}),
        ("guided_json", {"guided_json": optional_properties(2000)}),
        ("guided_json", {"guided_json": optional_properties(4000)}),
        ("guided_json", {"guided_json": {"type": "integer", "multipleOf": MAX_MULTIPLE + 1}}),
        ("guided_json", {"guided_json": {"type": "number", "multipleOf": 10**40 + 1}}),
        ("guided_json", {"guided_json": '{"multiple\\u004ff": 999983}'}),
        ("guided_json", {"guided_json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}}),
        ("guided_grammar", {"guided_grammar": 'start: %json {"type": "integer", "multipleOf" : 999983}'}),
        ("guided_grammar", {"guided_grammar": "start: A\nA: /([ab]*a[ab]{13}b)*/ & ~/(.*b[ab]{13}a.*)/"}),
        ("guided_regex", {"guided_regex": "(("}),
        ("guided_choice", {"guided_choice": ["a", ""]}),
        ("guided_grammar", {"guided_grammar": "start: nothing"}),
        ("guided_grammar", {"guided_grammar": ""}),
        ("guided_regex", {"guided_regex": "a", "guided_json": {}}),
        ("guided_regex", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
        (
            "structured_outputs.json",
            {"structured_outputs": {"json": {}, "regex": "a"}, "response_format": {"type": "json_object"}},
        ),
        ("structured_outputs", {"structured_outputs": {"json_object": False}}),
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": 5}}}},
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_is_refused(compiler: GrammarCompiler, param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(compiler, **fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert len(caught.value.message) < 1500


LEAST = -(2**63)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {"const": LEAST}},
        {"guided_json": {"properties": {"a": {"enum": [1, {"b": [LEAST]}]}}}},
        {"guided_json": {"const": LEAST + 500}},
        {"guided_json": {"type": "integer", "minimum": LEAST, "maximum": LEAST}},
        {"guided_json": {"type": "integer", "minimum": -1e30, "maximum": -1e30}},
        {"guided_json": {"allOf": [{"type": "integer", "minimum": -1e30}, {"exclusiveMaximum": LEAST + 600}]}},
        {"guided_grammar": f'start: %json {{"const": {LEAST}}}'},
        {"guided_grammar": 'start: %json {"type": "integer", "minimum": -1e30, "maximum": -1e30}'},
    ],
    ids=str,
)
def test_an_integer_that_ends_the_process_is_refused(compiler: GrammarCompiler, fields: dict[str, Any]) -> None:
    """llguidance recurses without end for the one integer -2**63; no exception tells of it."""
    with pytest.raises(RequestError, match=r"too small|cannot be written exactly"):
        compiled(compiler, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {"$ref": "#"}},
        {"guided_json": node("next")},
        {"guided_grammar": "start: A\nA: /a/ & /b/"},
        {"guided_json": {"enum": []}},
        {"guided_json": {"type": "string", "pattern": "^a$", "minLength": 2}},
        {"guided_json": {"properties": {"a": False}, "type": "object", "required": ["a"]}},
    ],
    ids=str,
)
def test_what_no_text_fits_is_said_to_be_that(compiler: GrammarCompiler, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="that no text fits") as caught:
        compiled(compiler, **fields)
    assert "(" not in caught.value.message.partition(" in itself without end")[0], "llguidance's own expression"


def test_a_message_has_no_expression_of_llguidance(compiler: GrammarCompiler) -> None:
    schema = {"type": "string", "minLength": 3000, "maxLength": 5000, "pattern": "a.*b"}
    with pytest.raises(
        RequestError, match=r"it cannot be told whether there is a text of such a pattern, format and length$"
    ):
        compiled(compiler, guided_json=schema)


def test_what_is_no_gbnf_is_read_as_lark(compiler: GrammarCompiler) -> None:
    """Its message is about the Lark."""
    with pytest.raises(RequestError, match="no start rule found"):
        compiled(compiler, guided_grammar='root: "x"')


def test_a_grammar_that_takes_long_holds_up_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused while it is still being compiled, new ones meanwhile with 503, and known ones are served."""
    compiler = GrammarCompiler(bundled_tokenizer(), fake_info())
    known = compiled(compiler, guided_regex="known")
    began, go_on = threading.Event(), threading.Event()
    really = CompiledGrammars._compile

    def compile_slowly(self: CompiledGrammars, grammar: str) -> Compiled:
        if "slow" in grammar:
            began.set()
            go_on.wait(20)
        return really(self, grammar)

    monkeypatch.setattr(CompiledGrammars, "_compile", compile_slowly)
    monkeypatch.setattr("spmd_serve.frontend.grammar.COMPILE_PATIENCE", 0.2)
    try:
        with pytest.raises(RequestError, match="too complex a regex") as refused:
            compiled(compiler, guided_regex="slow")
        assert (refused.value.status, refused.value.param, began.is_set()) == (400, "guided_regex", True)
        with pytest.raises(OverloadedError):
            compiled(compiler, guided_regex="new")
        assert compiled(compiler, guided_regex="known") == known
    finally:
        go_on.set()
    monkeypatch.setattr("spmd_serve.frontend.grammar.COMPILE_PATIENCE", 20)
    assert compiler._costly is not None
    compiler._costly.result(20)
    assert compiled(compiler, guided_regex="new") is not None


# ---- what both sides share ---------------------------------------------------------------------------------------


def test_frontend_and_ranks_read_one_tokenizer(tmp_path: Path) -> None:
    """Also the tokens that only tokenizer_config.json knows."""
    shutil.copy(model_folder() / "tokenizer.json", tmp_path)
    added = {"49152": {"content": "<|tool|>", "special": True}, "49153": {"content": "mm", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    assert TextTokenizer(tmp_path, VOCAB + 2).token_id("<|tool|>") == 49152
    state = Grammars(tmp_path, VOCAB + 2, (EOS,)).start("start: <|tool|>", [])
    assert torch.nonzero(state.allowed(range(VOCAB + 2), torch.device("cpu"))).flatten().tolist() == [49152]


def test_a_process_that_ends_at_once_waits_for_the_tokenizer() -> None:
    """Its thread calls into the interpreter; a script that was over before ended with a segmentation fault now and then."""
    CompiledGrammars(model_folder(), VOCAB + 7, (EOS,))
    making = [thread for thread in threading.enumerate() if thread.name == "grammar-tokenizer"]
    assert making and not any(thread.daemon for thread in making)


def test_a_grammar_is_compiled_once_and_few_are_kept() -> None:
    compiled = CompiledGrammars(model_folder(), VOCAB, (EOS,))
    first = compiled.compile("start: /a0/")
    for i in range(KEPT):
        assert compiled.compile("start: /a0/") is first
        assert compiled.compile(f"start: /b{i}/") is not first
    for i in range(KEPT):
        compiled.compile(f"start: /c{i}/")
    assert compiled.compile("start: /a0/") is not first, "it has not been used for long"


def test_long_chains_of_definitions_do_not_end_the_process(compiler: GrammarCompiler) -> None:
    """llguidance recurses along them; on a thread's usual stack 1,300 are a segmentation fault."""
    chain = {f"{i}": {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}]} for i in range(1400)}
    schema = {"$ref": "#/$defs/0", "$defs": chain | {"1400": {"type": "null"}}}
    assert accepts(compiled(compiler, guided_json=schema), "null")
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(4400))
    assert accepts(compiled(compiler, guided_grammar=f'start: r0\n{rules}\nr4400: "x"'), "x")


def test_rows_of_one_grammar_do_not_see_each_other(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, guided_json=SCHEMA) or ""
    fresh = mask(grammars().start(grammar, []))
    one, two = grammars().start(grammar, []), grammars().start(grammar, [])
    write(one, '{"name":"Ann",')
    assert torch.equal(mask(two), fresh) and not torch.equal(mask(one), fresh)
    write(two, '{"name":"')
    again = grammars().start(grammar, encode('{"name":"Ann",'))  # as after a preemption
    assert torch.equal(mask(again), mask(one))
    assert torch.equal(mask(grammars().start(grammar, [])), fresh)


def test_as_many_properties_as_are_accepted_work(compiler: GrammarCompiler) -> None:
    """600 alternatives in one place: more than llguidance's own limit of a row."""
    grammar = compiled(compiler, guided_json=optional_properties(600)) or ""
    state = grammars().start(grammar, [])
    assert write(state, '{"p17":5,"p599":7}') == [None] * len(encode('{"p17":5,"p599":7}'))
    assert state.accept(EOS) == ""


def test_an_ambiguous_grammar_ends_before_its_masks_hold_up_the_step() -> None:
    """A mask costs the square of the items in a row: 0.2 s where this ends, 1.6 s with four times as many."""
    state = grammars().start('start: (("a"{1,30000}){1,30000}){1,30000}', [])
    (token,) = encode("a")
    ends = [end for end in (state.accept(token) for _ in range(80)) if end is not None]
    assert ends and "max is 5000" in ends[0]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_regex": r"<\|im_end\|>"}, "<|im_end|>"),
        ({"guided_json": {"const": "<|im_start|>user"}}, '"<|im_start|>user"'),
        ({"guided_choice": ["<think>", "<think>a</think> <call>"]}, "<think>a</think> <call>"),
        ({"guided_grammar": 'start: "a <mask>b"'}, "a <mask>b"),
        ({"guided_regex": "cafe\u0301 \u212b"}, "cafe\u0301 \u212b"),
    ],
    ids=ascii,
)
def test_text_that_a_tokenizer_changes_is_text(tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    """Forced text leaves one way to go on: not the token of that name, and not other characters (NFC)."""
    own = json.loads((model_folder() / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(own | {"normalizer": {"type": "NFC"}}))
    added = {
        "49152": {"content": "<think>", "special": False, "normalized": False},
        "49153": {"content": "<call>", "special": False, "normalized": True},
        "49154": {"content": "<mask>", "special": True, "lstrip": True},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    vocab = range(VOCAB + 3)
    tokenizer = TextTokenizer(tmp_path, len(vocab))
    grammar = compiled(GrammarCompiler(tokenizer, fake_info(vocab_size=len(vocab))), **fields)
    assert grammar is not None
    state = Grammars(tmp_path, len(vocab), (EOS,)).start(grammar, [])
    data, written = text.encode(), b""
    while written != data:
        allowed = torch.nonzero(state.allowed(vocab, torch.device("cpu"))).flatten().tolist()
        fits = [t for t in allowed if t < VOCAB and t not in tokenizer.special_ids]
        fits = [t for t in fits if data.startswith(written + tokenizer.token_bytes(t))]
        assert fits, (written, allowed)
        token = max(fits, key=lambda t: len(tokenizer.token_bytes(t)))
        assert state.accept(token) is None
        written += tokenizer.token_bytes(token)
    assert torch.nonzero(state.allowed(vocab, torch.device("cpu"))).flatten().tolist() == [EOS]


# ---- how answers end ---------------------------------------------------------------------------------------------


def test_a_grammar_that_cannot_go_on_is_an_error_not_an_end() -> None:
    state = grammars().start('start: "a" /[^\\s\\S]/', [])  # no character follows the a
    assert write(state, "a") == [None]
    drawn = int(torch.nonzero(mask(state))[0])
    assert state.accept(drawn) == "the grammar cannot be followed any further: it allows no text after this one"
    state = grammars().start("start: /a+/", [])
    assert "cannot be followed" in (write(state, "b")[0] or "")
    assert mask(state).any(), "no row without a token"
    state = grammars().start('{"type": "object"}', [])  # offline, where nobody has looked at it before
    assert state.accept(encode("a")[0]) == "the grammar is not valid: missing field `grammars` at line 1 column 18"


@pytest.mark.parametrize("params", [{"min_tokens": 9}, {"ignore_eos": True}, {"min_tokens": 9, "ignore_eos": True}])
def test_only_a_complete_grammar_overrides_min_tokens_and_ignore_eos(params: dict[str, Any]) -> None:
    """One of two ranks each: with half of the vocabulary they hide the same tokens."""
    sampling = SamplingParams(max_tokens=20, temperature=0.0, grammar="start: /[0-9]{1,3}/", **params)
    halves = range(VOCAB // 2), range(VOCAB // 2, VOCAB)
    row = NewRow(0, 0, sampling, array("i", [5]), 1, 1, 0)
    ranks = [RowExtras.create(row, half, (EOS,), torch.device("cpu"), grammars()) for half in halves]

    def drawable() -> set[int]:
        logits = [torch.zeros(len(half)) for half in halves]
        for rank, part in zip(ranks, logits, strict=True):
            rank.process_(part)
        return set(torch.nonzero(torch.cat(logits) == 0).flatten().tolist())

    for length in range(3):
        assert EOS not in drawable() and drawable(), length
        for rank in ranks:
            assert rank.grammar is not None and rank.grammar.accept(encode("7")[0]) is None
            rank.note_sampled(torch.tensor(encode("7")[0]))
    assert drawable() == {EOS}
    assert [rank.grammar.accept(EOS) for rank in ranks if rank.grammar] == ["", ""]


@pytest.mark.parametrize("problem", ["", "the parser's limit"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_scheduler_ends_a_sequence_with_its_grammar(problem: str, overlap: bool) -> None:
    scheduler = Scheduler(
        SchedulerOptions(max_batch_tokens=16),
        page_size=4,
        num_pages=32,
        prefix_cache=True,
        max_model_len=64,
        eos_token_ids=(EOS,),
        overlap=overlap,
    )
    params = SamplingParams(max_tokens=20, min_tokens=9, ignore_eos=True, grammar="g")
    plain = SamplingParams(max_tokens=20)
    prompt = array("i", [7, 8, 9]).tobytes()
    scheduler.apply(StepInput(0, 0.0, (Request(1, prompt, plain), Request(2, prompt, params))))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.commit(batch, StepTokens([5, EOS], grammar_ends={1: problem}))
    output: StepOutput = scheduler.take_output()
    assert (output.uids, output.tokens) == ([1, 2], [5, EOS])
    (finish,) = output.finished
    assert (finish.uid, finish.reason) == (2, FinishReason.ERROR if problem else FinishReason.STOP)
    assert finish.message == problem
    scheduler.check_invariants()


# ---- models without a tokenizer that llguidance knows --------------------------------------------------------------


def test_without_a_tokenizer_a_grammar_ends_its_request_only(tmp_path: Path) -> None:
    state = Grammars(tmp_path, 211, (2,)).start("start: /a/", [5, 6])
    assert state.allowed(range(50, 100), torch.device("cpu")).shape == (50,)
    assert "has no tokenizer.json" in (state.accept(7) or "")


def test_a_tokenizer_that_llguidance_does_not_know_is_a_400(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    words.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(TextTokenizer(tmp_path, 3), fake_info(vocab_size=3))
    assert compiled(compiler) is None
    with pytest.raises(RequestError, match="does not work with this tokenizer") as caught:
        compiled(compiler, guided_regex="a")
    assert (caught.value.status, caught.value.param) == (400, "guided_regex")


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.WordPiece()], ids=lambda d: type(d).__name__)
def test_a_decoder_that_llguidance_does_not_know_is_named(tmp_path: Path, decoder: Any) -> None:
    """Its message has the decoder as Rust prints it."""
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    words.decoder = decoder
    words.save(str(tmp_path / "tokenizer.json"))
    state = Grammars(tmp_path, 3, (2,)).start("start: /a/", [])
    assert f"it has the decoder {type(decoder).__name__}, and" in (state.accept(0) or "")


def test_a_tokenizer_may_have_more_tokens_than_the_model() -> None:
    """The rest of its ids can never be drawn."""
    size = VOCAB - 1000
    state = Grammars(model_folder(), size, (EOS,)).start("start: /yes/", [])
    allowed = state.allowed(range(size), torch.device("cpu"))
    assert allowed.shape == (size,)
    assert allowed[encode("yes")[0]]
