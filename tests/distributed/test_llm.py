"""The offline API under torchrun: what cannot be served is said, and neither it nor a failed start spoils what follows."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path

from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint, write_tokenizer
from support.plain_job import torchrun


def test_errors_leave_the_ranks_in_step(tmp_path: Path) -> None:
    out = tmp_path / "said.json"
    script = str(Path(__file__).with_name("llm_ranks.py"))
    done = subprocess.run(torchrun(2, script, str(out)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    first, too_long, too_large, negative, second, cold, group, *of_rank_0, no_model, no_option, last = json.loads(
        out.read_text()
    )
    assert "Paris" in first
    assert second == last == first
    assert "prompt 2 of 2: the prompt has 3000 tokens; at most 255 fit" in too_long
    assert too_large == f"prompt 1 of 2: it has the token id {2**40}; ids go from 0 to 49151"
    assert negative == "prompt 1 of 1: it has the token id -1; ids go from 0 to 49151"
    assert cold == "prompt 2 of 2: temperature must be from 0 to 100"
    assert group.startswith("torch.distributed has a process group already")  # on each rank its own error
    assert of_rank_0[::2] == ["TypeError", "ValueError", "TypeError", "RequestError", "TypeError"]
    assert of_rank_0[1::2] == [first] * 5
    assert "/nowhere" in no_model and "--nope" in no_option


def test_a_start_that_fails_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    """The others would wait for it in a collective, or answer nonsense with weights that are not its own."""
    here, there = tmp_path / "here", tmp_path / "there"
    make_checkpoint(here / "model", "llama")
    write_tokenizer(here / "model")
    shutil.copytree(here, there)
    (weights,) = (there / "model").glob("*.safetensors")
    save_file({name: t * 1.01 for name, t in load_file(weights).items()}, weights, metadata={"format": "pt"})
    script = str(Path(__file__).with_name("llm_start_ranks.py"))
    command = torchrun(3, script, str(here), str(there), str(tmp_path / "said"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [json.loads((tmp_path / f"said.{rank}").read_text()) for rank in range(3)]
    host = socket.gethostname()
    differ, plan, memory, damaged, tokenizer, good, again = zip(*said, strict=True)
    for text in differ:
        assert text.startswith(
            f"FingerprintMismatchError: rank 1 ({host}) does not run the same as rank 0: {weights.name}"
        )
    assert plan[1] == "PermissionError: [Errno 13] no"
    assert {*plan[::2]} == {f"RankLostError: rank 1 ({host}) failed: {plan[1]}"}
    assert memory[1] == "MemoryError: no"
    assert {*memory[::2]} == {f"RankLostError: rank 1 ({host}) failed: {memory[1]}"}
    assert damaged[0] == "WeightsError: damaged"
    assert {*damaged[1:]} == {f"WeightsError: rank 0 ({host}): damaged"}
    assert {*tokenizer[::2]} == {f"RankLostError: rank 1 ({host}) failed: {tokenizer[1]}"}
    assert good == again == ("1 results",) * 3
