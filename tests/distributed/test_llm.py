"""The offline API under torchrun: what cannot be served is said, and neither it nor a failed start spoils what follows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

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
    assert "prompt 2 of 2: the prompt has 3000 tokens; at most 256 fit" in too_long
    assert too_large == f"prompt 1 of 2: it has the token id {2**40}; ids go from 0 to 49151"
    assert negative == "prompt 1 of 1: it has the token id -1; ids go from 0 to 49151"
    assert cold == "prompt 2 of 2: temperature must be from 0 to 100"
    assert "torch.distributed has a process group already" in group
    assert of_rank_0[::2] == ["TypeError", "ValueError", "TypeError", "RequestError", "TypeError"]
    assert of_rank_0[1::2] == [first] * 5
    assert "/nowhere" in no_model and "--nope" in no_option
