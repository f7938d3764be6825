"""lm-eval itself, as its users run it, against the server: `pip install lm_eval[api]`; skipped where it is missing.

It brings 600 MB of packages for data sets and metrics, so it is no part of the test extra. The request that it makes is also
made by test_service.py, without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.ask import MODEL
from support.reference import Reference
from support.server import Server

pytest.importorskip("lm_eval")

DOCUMENTS = [
    ("The capital of Italy is", ["Rome", "a kind of cheese", "42"]),
    ("2 + 2 =", ["4", "5", "22"]),
    ("Water is made of hydrogen and", ["oxygen", "iron", "helium"]),
    ("東京は", ["日本の首都です。", "魚です。", "Berlin"]),
]
TASK = """
task: offline_choices
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""


def test_loglikelihoods_of_local_completions(
    start_server: Callable[..., Server], reference: Reference, tmp_path: Path
) -> None:
    """Each choice's log-likelihood after its question is that of transformers, to 1e-3."""
    server = start_server("--dtype", "float32", ranks=1, agent=False)
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps({"question": q, "choices": c}) + "\n" for q, c in DOCUMENTS))
    (tmp_path / "offline_choices.yaml").write_text(TASK % data)
    model_args = {
        "model": MODEL,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": str(reference.folder),
        "tokenizer_backend": "huggingface",
        "num_concurrent": "2",
    }
    options = ["--model", "local-completions", "--batch_size", "4", "--tasks", "offline_choices", "--log_samples"]
    options += ["--model_args", ",".join(f"{k}={v}" for k, v in model_args.items())]
    options += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", *options],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_offline_choices_*.jsonl")
    records = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda r: r["doc_id"])
    assert len(records) == len(DOCUMENTS)
    for record, (question, choices) in zip(records, DOCUMENTS, strict=True):
        for choice, (response,) in zip(choices, record["resps"], strict=True):
            context = reference.tokenizer(question).input_ids
            ids = reference.tokenizer(f"{question} {choice}").input_ids
            expected = reference.logprobs(ids)[:-1]
            tail = range(len(context), len(ids))
            wanted = sum(float(expected[i - 1, ids[i]]) for i in tail)
            greedy = all(int(expected[i - 1].argmax()) == ids[i] for i in tail)
            assert float(response[0]) == pytest.approx(wanted, abs=1e-3)
            assert str(response[1]) == str(greedy)
