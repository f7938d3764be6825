"""The offline API in one process: prompts and answers are those of the server."""

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.checkpoints import make_checkpoint
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from spmd_serve.errors import DeviceMemoryError, ModelError, RequestError
from spmd_serve.llm import LLM, Generation
from spmd_serve.types import SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


OPTIONS = ("--load-format", "dummy", "--device", "cpu", "--num-pages", "16")
GREEDY = SamplingParams(max_tokens=2, temperature=0.0)


def save_model(folder: Path) -> None:
    """A config and a tokenizer whose tokens 0 .. 15 are t0 .. t15."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(16)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_the_tokenizer_that_was_asked_for_cuts_no_prompt_and_pads_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(16)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.enable_truncation(3)  # as some are saved after training
    tokenizer.enable_padding(length=8)
    (tmp_path / "own").mkdir()
    tokenizer.save(str(tmp_path / "own" / "tokenizer.json"))
    arguments = ["--model", str(tmp_path), "--tokenizer", str(tmp_path / "own"), "--load-format", "dummy"]
    llm = LLM(*arguments, "--device", "cpu", "--num-pages", "16")
    try:
        (result,) = llm.generate(["t5 t6 t7 t8 t9"], SamplingParams(max_tokens=2, temperature=0.0))
        assert result.prompt_ids == [5, 6, 7, 8, 9]
        assert result.text.split() == [f"t{i}" for i in result.token_ids]
        (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps({"eos_token": f"t{result.token_ids[0]}"}))
        with pytest.raises(TypeError, match=r"give \[prompt\]"):  # not a generation for each of its letters
            llm.generate("t5 t6", SamplingParams(max_tokens=1))
        with pytest.raises(ValueError, match="2 prompts, but 1 params"):
            llm.generate([[1], [2]], [SamplingParams(max_tokens=1)])
    finally:
        llm.close()
    llm = LLM(*arguments, "--device", "cpu", "--num-pages", "16")
    try:
        (stopped,) = llm.generate(["t5 t6 t7 t8 t9"], SamplingParams(max_tokens=2, temperature=0.0))
        assert (stopped.token_ids, stopped.finish_reason) == (result.token_ids[:1], "stop")  # at that tokenizer's EOS
    finally:
        llm.close()


def test_the_text_is_what_the_server_would_show(tmp_path: Path) -> None:
    """The token that stops an answer is no part of it, be it EOS or one of stop_token_ids."""
    save_model(tmp_path)
    llm = LLM("--model", str(tmp_path), *OPTIONS)
    try:
        (plain,) = llm.generate([[5, 6]], GREEDY)
        assert plain.text.split() == [f"t{i}" for i in plain.token_ids]
        (stopped,) = llm.generate([[5, 6]], replace(GREEDY, stop_token_ids=(plain.token_ids[0],)))
        assert (stopped.text, stopped.token_ids) == ("", plain.token_ids[:1])
        (scored,) = llm.generate([[5, 6, 7]], replace(GREEDY, max_tokens=0, prompt_logprobs=0))
        assert (scored.text, len(scored.prompt_logprobs), scored.finish_reason) == ("", 2, "length")
    finally:
        llm.close()


@pytest.mark.parametrize(
    "wrong",
    [{"logprobs": True}, {"max_tokens": 2.5}, {"top_k": 1.5}, {"logit_bias": ((5, 1e30),)}, {"grammar": 5}],
    ids=str,
)
def test_wrong_params_are_refused_before_they_reach_a_step(tmp_path: Path, wrong: dict[str, Any]) -> None:
    save_model(tmp_path)
    llm = LLM("--model", str(tmp_path), *OPTIONS)
    try:
        seen: list[int] = []
        with pytest.raises(RequestError, match=f"prompt 2 of 2: .*{next(iter(wrong))}"):
            llm.generate([[6], [5]], [GREEDY, replace(GREEDY, **wrong)], on_tokens=seen.append)
        assert seen == []  # whoever has ten thousand prompts wants to know at once
        assert llm.generate([[5]], GREEDY)[0].token_ids
    finally:
        llm.close()


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "empty"),
        ([5] * 1000, "1000 tokens; at most"),
        ([5, 99], "token id 99"),
        ([-1], "token id -1"),
        ("t5 \ud800", r"cannot encode the text: character 3 is U\+D800, half of a surrogate pair"),
    ],
)
def test_prompts_that_cannot_be_are_refused_before_the_others_run(
    tmp_path: Path, prompt: str | list[int], problem: str
) -> None:
    save_model(tmp_path)
    llm = LLM("--model", str(tmp_path), *OPTIONS)
    try:
        seen: list[int] = []
        with pytest.raises(RequestError, match=f"prompt 2 of 3: .*{problem}"):
            llm.generate([[6], prompt, [7]], GREEDY, on_tokens=seen.append)
        assert seen == []
        assert [len(result.token_ids) for result in llm.generate([[6], [7]], GREEDY)] == [GREEDY.max_tokens] * 2
    finally:
        llm.close()


def test_after_an_interruption_it_says_that_it_cannot_go_on(tmp_path: Path) -> None:
    save_model(tmp_path)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    llm = LLM("--model", str(tmp_path), *OPTIONS)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5]], GREEDY, on_tokens=interrupt)
        with pytest.raises(RuntimeError, match="interrupted; make a new LLM"):
            llm.generate([[6]], GREEDY)
    finally:
        llm.close()
    with pytest.raises(RuntimeError, match="interrupted"):  # the first reason stays
        llm.generate([[6]], GREEDY)
    again = LLM("--model", str(tmp_path), *OPTIONS)
    assert again.generate([[6]], GREEDY)[0].token_ids
    again.close()
    with pytest.raises(RuntimeError, match="closed; make a new LLM"):
        again.generate([[6]], GREEDY)


def test_a_pool_that_no_memory_holds_is_one_line(tmp_path: Path) -> None:
    save_model(tmp_path)
    pool = ("--page-size", "1024", "--num-pages", str(2**31 - 1))  # more than a process can address
    with pytest.raises(DeviceMemoryError, match="fewer --num-pages"):
        LLM("--model", str(tmp_path), "--load-format", "dummy", "--device", "cpu", *pool)


@pytest.mark.parametrize("size", ["intermediate_size", "max_position_embeddings"])
def test_a_model_that_no_memory_holds_is_one_line(tmp_path: Path, size: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {size: 10**13}))
    with pytest.raises(
        DeviceMemoryError, match=r"rank 0's part of the model .*start more ranks.*smaller --max-model-len"
    ):
        LLM("--model", str(tmp_path), *OPTIONS)


def test_close_gives_the_memory_back(tmp_path: Path) -> None:
    """Also while the closed one has a name: `llm = LLM(...)` makes the next before it lets go of the one before."""
    save_model(tmp_path)
    llm = LLM("--model", str(tmp_path), *OPTIONS)
    llm.generate([[5]], GREEDY)
    held = [weakref.ref(llm._assembly.runner), weakref.ref(llm._assembly.scheduler)]
    llm.close()
    assert [ref() for ref in held] == [None, None]
    llm.close()


def test_one_call_at_a_time(tmp_path: Path) -> None:
    """A second one, of another thread or of on_tokens, is refused and spoils nothing."""
    save_model(tmp_path)
    llm = LLM("--model", str(tmp_path), *OPTIONS)
    said = []

    def again(_: int) -> None:
        with pytest.raises(RuntimeError, match=r"another generate\(\) of this LLM runs"):
            llm.generate([[6]], GREEDY)
        said.append(threading.current_thread().name)
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=again, args=(0,))
            thread.start()
            thread.join()

    try:
        alone = llm.generate([[5]], GREEDY)[0].token_ids
        assert llm.generate([[5]], GREEDY, on_tokens=again)[0].token_ids == alone
    finally:
        llm.close()
    assert len(set(said)) > 1


def test_ids_of_any_integer_type(tmp_path: Path) -> None:
    save_model(tmp_path)
    llm = LLM("--model", str(tmp_path), *OPTIONS)
    try:
        results = llm.generate([[5, 6], np.array([5, 6]), torch.tensor([5, 6])], GREEDY)
        assert [json.dumps(result.prompt_ids) for result in results] == ["[5, 6]"] * 3
        assert len({tuple(result.token_ids) for result in results}) == 1
        for wrong in ([5.0], ["t5"], [None]):
            with pytest.raises(TypeError, match=r"prompt 2 of 2: .*cannot be interpreted as an integer"):
                llm.generate([[5], wrong], GREEDY)  # type: ignore[list-item]
        with pytest.raises(TypeError, match=r"prompt 2 of 2: .*not iterable; give a text or token ids"):
            llm.generate([[5], None], GREEDY)  # type: ignore[list-item]
        with pytest.raises(TypeError, match="prompt 1 of 1: its params are None, not SamplingParams"):
            llm.generate([[5]], [None])  # type: ignore[list-item]
    finally:
        llm.close()


def test_a_process_group_of_the_programs_own_stays(tmp_path: Path) -> None:
    save_model(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ModelError):
            LLM("--model", str(tmp_path / "nothing"))
        LLM("--model", str(tmp_path), *OPTIONS).close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("setting", ["dtype", "device", "device context", "autocast"])
def test_what_a_program_sets_for_its_own_tensors_changes_no_answer(tmp_path: Path, setting: str) -> None:
    make_checkpoint(tmp_path, "gemma2")  # whose attention has products of its own
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0)
    options = ("--model", str(tmp_path), "--device", "cpu", "--num-pages", "16", "--quantization", "fp8")

    def answer() -> list[Generation]:
        llm = LLM(*options)
        try:
            return [replace(result, times=[]) for result in llm.generate([[5, 6], [9] * 40], params)]
        finally:
            llm.close()

    plain = answer()
    with contextlib.ExitStack() as undo:
        if setting == "dtype":
            undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.bfloat16)
        elif setting == "device":
            undo.callback(torch.set_default_device, None)
            torch.set_default_device("meta")
        elif setting == "device context":
            undo.enter_context(torch.device("meta"))
        else:
            undo.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        before = torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu")
        assert answer() == plain
        assert before == (torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu"))


def test_a_programs_threads_are_its_own(tmp_path: Path) -> None:
    save_model(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    seen = []
    try:
        llm = LLM("--model", str(tmp_path), *OPTIONS, "--threads", "1")
        assert torch.get_num_threads() == 3
        llm.generate(["t5"], GREEDY, on_tokens=lambda count: seen.append(torch.get_num_threads()))
        assert torch.get_num_threads() == 3
        llm.close()
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


FORKED = """
import multiprocessing, sys
from spmd_serve.llm import LLM
from spmd_serve.types import SamplingParams

llm = LLM(*sys.argv[1:])
params = SamplingParams(max_tokens=2, temperature=0.0)
llm.generate([[5] * 40], params)
child = multiprocessing.get_context("fork").Process(target=llm.generate, args=([[5] * 40], params))
child.start()
child.join(30)
print(child.exitcode)
child.kill()
print(len(llm.generate([[5]], params)))
llm.close()
"""


def test_a_fork_is_refused(tmp_path: Path) -> None:
    """It would wait for threads that only the other process has."""
    save_model(tmp_path)
    command = [sys.executable, "-c", FORKED, "--model", str(tmp_path), *OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["1", "1"]
    assert "this LLM was made before a fork" in done.stderr
