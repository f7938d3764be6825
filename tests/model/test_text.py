"""Texts of the served model equal those of transformers: on any rank count, alone and in company."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from cases import NEIGHBOURS, OTHERS, SEEDED, SOLO
from support.ask import ask, ask_at_once, at_once, create, to_answer
from support.reference import Answers
from support.server import Server, serving


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{}-ranks".format)
def server(
    request: pytest.FixtureRequest, answers: Answers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """9 query heads and 3 KV heads on 1, 2, 3 and 4 ranks. A step computes 128 tokens at most."""
    with serving(
        tmp_path_factory.mktemp("server"),
        *("--dtype", "float32", "--max-batch-tokens", "128", "--threads", "1"),
        ranks=request.param,
        meanwhile=lambda: answers.prepare([*SOLO, *OTHERS, *SEEDED]),
    ) as server:
        yield server


def test_greedy_alone(server: Server, answers: Answers) -> None:
    """Text, finish reason and usage of one request at a time; SOLO has a chat, and a prompt of several chunks."""
    assert answers[SOLO[-1]].prompt_tokens > 600
    client = server.client()
    for case in SOLO:
        assert ask(client, case) == answers[case]


def test_greedy_with_16_in_flight(server: Server, answers: Answers) -> None:
    """Row order: prompts of different lengths that start and end at different steps do not touch each other."""
    cases = [*OTHERS, *SOLO]
    assert len(cases) == 16
    assert ask_at_once(server, cases) == [answers[case] for case in cases]


def test_seeded_alone_and_in_shuffled_company(server: Server, answers: Answers) -> None:
    """A seeded text is a function of the request alone: not of its neighbours, its row, the order or the rank count."""
    if server.ranks > 2:
        pytest.skip("one rank and two show it, in half of the time")
    client = server.client()
    for case in SEEDED:
        assert ask(client, case) == answers[case]
    order = [*SEEDED, *NEIGHBOURS, *SEEDED]
    random.Random(5).shuffle(order)
    responses = at_once(
        server,
        # Neighbours have no seed; the server gives each its own.
        lambda client: [create(client, case, **({"seed": None} if case in NEIGHBOURS else {})) for case in order],
    )
    for case, response in zip(order, responses, strict=True):
        if case not in NEIGHBOURS:
            assert to_answer(response) == answers[case]
