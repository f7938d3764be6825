"""The offline API in one process: prompts are tokenized as the server does it."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from spmd_serve.llm import LLM
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
        with pytest.raises(TypeError, match=r"give \[prompt\]"):  # not a generation for each of its letters
            llm.generate("t5 t6", SamplingParams(max_tokens=1))
        with pytest.raises(ValueError, match="2 prompts, but 1 params"):
            llm.generate([[1], [2]], [SamplingParams(max_tokens=1)])
    finally:
        llm.close()
