"""What a user does with the box that the batch script prints: asks the server, by what the box says alone."""

from __future__ import annotations

import subprocess
import threading
from dataclasses import dataclass

import openai
from support.ask import ask, create
from support.reference import Case

CASE = Case("The capital of France is", 3)  # four ranks without shared memory on two cores take long for each token
SERVER = ("--dtype", "float32", "--num-pages", "256", "--threads", "1")  # each node takes the machine for its own
GONE_S = 10  # an orphan may live this long


def client(box: dict[str, str]) -> openai.OpenAI:
    """For its URL, with its key."""
    key = subprocess.run(box["API key"], shell=True, check=True, capture_output=True, text=True).stdout.strip()
    return openai.OpenAI(base_url=box["URL"], api_key=key, max_retries=0, timeout=60)


def answer(box: dict[str, str]) -> str:
    """The text for CASE."""
    with client(box) as own:
        return ask(own, CASE).text


@dataclass
class Stream:
    """One streamed answer, read by a thread of its own."""

    box: dict[str, str]
    tokens: int
    chunks: int = 0
    finish_reason: str | None = None
    error: Exception | None = None

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self._read)
        thread.start()
        return thread

    def _read(self) -> None:
        try:
            case = Case("Once upon a time", self.tokens)
            with client(self.box) as own:
                for chunk in create(own, case, stream=True, extra_body={"ignore_eos": True}):
                    self.chunks += 1
                    self.finish_reason = chunk.choices[0].finish_reason or self.finish_reason
        except openai.OpenAIError as error:
            self.error = error
