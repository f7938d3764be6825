"""The command line: whatever is wrong with an option is one line with its name, before anything is loaded."""

import dataclasses

import pytest

from spmd_serve.config import Config, flag_name, ignored_options, parse_args
from spmd_serve.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(
            (name, value)
            for name in ("--kv-memory", "--max-body-size")
            for value in ("inf", "nan", "1e400", "1e30", "-1")
        ),
        *(
            (name, value)
            for name in (
                "--request-timeout",
                "--control-timeout",
                "--heartbeat-interval",
                "--step-timeout",
                "--drain-timeout",
                "--sync-latency",
            )
            for value in ("inf", "nan", "1e300", "-1")
        ),
        ("--num-pages", "10000000000000"),
        ("--max-queue", "1" + "0" * 30),
        ("--threads", "100000"),
        ("--served-model-name", "a\udcff"),  # as Python has a byte that is not UTF-8
        ("--model", "/models/\udcff"),
        ("--frontend", "process:99999"),
        ("--frontend", "process:\u00b2"),
    ],
)
def test_values_that_nothing_can_hold(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=option):
        parse_args([option, value])


def test_an_empty_text_is_no_value() -> None:
    """As of a script's variable that is not set: `--model ""` would be the folder that the server is started in."""
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default):
            if field.metadata["parse"] is str and not field.metadata["choices"]:
                with pytest.raises(ConfigError, match=f"{flag_name(field.name)} is (empty|'')"):
                    parse_args([flag_name(field.name), ""])


def test_every_number_has_a_least_value() -> None:
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default):
            if field.metadata["parse"] in (int, float):
                assert field.metadata["minimum"] is not None, field.name


def test_the_largest_values_are_options() -> None:
    assert parse_args(["--drain-timeout", "1e6", "--kv-memory", "900000GB"]).cache.kv_memory == 900 * 10**12
    assert parse_args(["--kv-memory", "1.5TiB"]).cache.kv_memory == 3 * 2**39


def test_what_another_rank_is_given_and_has_no_effect() -> None:
    rank0 = parse_args(["--num-pages", "64", "--cors-origin", "a", "--no-api-key"])
    same = ["--num-pages", "64", "--cors-origin", "a", "--max-num-seqs", "256"]
    of_this_host = [
        "--model",
        "/other",
        "--tokenizer",
        "/t",
        "--chat-template",
        "/c",
        "--address-file",
        "/a",
        "--host",
        "h",
    ]
    assert ignored_options([], rank0) == ignored_options(same + of_this_host, rank0) == ""
    other = ["--num-pages=65", "--api-key", "secret", "--cors-origin", "b", "--nope=3", "--help"]
    assert ignored_options(other, rank0) == "--num-pages, --api-key, --cors-origin, --nope"
    assert "--max-num-seqs: invalid int value" in ignored_options(["--max-num-seqs", "many"], rank0)
