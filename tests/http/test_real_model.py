"""The API over the bundled model on two ranks: structured output, log-probabilities, lm-eval."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from support.fake_service import bundled_tokenizer, model_folder
from support.server import Server

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["tall", "kind", "old"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TEXTS = ["The capital of France is Paris, and", "one two three four five six", "日本語 😀 text"]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_server("--dtype", "float32", ranks=2)


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(model_folder()), dtype=torch.float32).eval()


def own_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """[tokens - 1, vocabulary]: of the tokens after each position."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), dim=-1)


def test_structured_output_is_always_valid(server: Server) -> None:
    """At temperature 1, whatever the seed; also beside requests without a grammar."""

    def ask(seed: int) -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=120) as client:
            fields: dict[str, Any] = {"max_tokens": 80, "temperature": 1, "seed": seed}
            form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
            messages: Any = [{"role": "user", "content": "Describe a person."}]
            answer = client.chat.completions.create(
                model="smollm2-135m-instruct", messages=messages, response_format=form, **fields
            ).choices[0]
            assert answer.finish_reason == "stop"
            person = json.loads(answer.message.content or "")
            assert set(person) == {"name", "age", "tags"}
            assert 0 <= person["age"] <= 150
            plain = client.completions.create(
                model="smollm2-135m-instruct", prompt="Once", **fields | {"max_tokens": 5}
            )
            assert plain.usage is not None and plain.usage.completion_tokens <= 5
            if seed % 4 == 0:
                extra = {"structured_outputs": {"choice": ["red", "green"]}}
                answer = client.chat.completions.create(
                    model="smollm2-135m-instruct", messages=messages, extra_body=extra, **fields
                ).choices[0]
                assert answer.message.content in ("red", "green")

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(ask, range(12)))


@pytest.mark.parametrize("text", TEXTS)
def test_log_probabilities_are_the_models_also_when_asked_twice(server: Server, model: Any, text: str) -> None:
    ids = bundled_tokenizer().encode(text).tolist()
    expected = own_logprobs(model, ids)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=60) as client:
        fields: Any = {"echo": True, "logprobs": 3, "max_tokens": 1, "temperature": 0}
        first, second = (
            client.completions.create(model="smollm2-135m-instruct", prompt=ids, **fields).choices[0] for _ in range(2)
        )
    assert first.logprobs == second.logprobs and first.logprobs is not None
    own, tops = first.logprobs.token_logprobs, first.logprobs.top_logprobs
    assert own is not None and tops is not None
    assert len(own) == len(ids) + 1 and own[0] is None
    for position, token in enumerate(ids[1:]):
        assert own[position + 1] == pytest.approx(float(expected[position, token]), abs=1e-3)
        best = sorted(tops[position + 1].values(), reverse=True)[:3]
        assert best == pytest.approx(expected[position].topk(3).values.tolist(), abs=1e-3)


def test_lm_eval_local_completions(server: Server, model: Any, tmp_path: Path) -> None:
    """lm-eval's own client, on a task made here, gets transformers' log-likelihoods."""
    documents = [
        {"context": "The capital of France is", "target": " Paris"},
        {"context": "Water boils at one hundred", "target": " degrees Celsius"},
        {"context": "One plus one is", "target": " purple elephants"},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{target}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(task))  # JSON is YAML
    code = f"""
import json, lm_eval
from lm_eval.tasks import TaskManager
arguments = dict(
    model="smollm2-135m-instruct", base_url="{server.url}/v1/completions", tokenizer={str(model_folder())!r},
    tokenizer_backend="huggingface", num_concurrent=1, max_retries=1,
)
manager = TaskManager(include_path={str(tmp_path)!r}, include_defaults=False)
results = lm_eval.simple_evaluate("local-completions", model_args=arguments, tasks=["tiny"], task_manager=manager, bootstrap_iters=0)
samples = sorted(results["samples"]["tiny"], key=lambda s: s["doc_id"])
print(json.dumps([s["filtered_resps"][0] for s in samples]))
"""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(documents)
    for document, (loglikelihood, is_greedy) in zip(documents, found, strict=True):
        context = bundled_tokenizer().encode(document["context"]).tolist()
        ids = bundled_tokenizer().encode(document["context"] + document["target"]).tolist()
        rows = own_logprobs(model, ids)[len(context) - 1 :]
        expected = sum(float(row[token]) for row, token in zip(rows, ids[len(context) :], strict=True))
        assert loglikelihood == pytest.approx(expected, abs=1e-3)
        assert is_greedy == all(
            int(row.argmax()) == token for row, token in zip(rows, ids[len(context) :], strict=True)
        )
