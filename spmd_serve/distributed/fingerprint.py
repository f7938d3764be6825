"""The start-up fingerprint: ranks that do not run the same thing refuse to start, and say which rank, host and field."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import spmd_serve
from spmd_serve.config import Config, flag_name
from spmd_serve.distributed.board import Board, Peer
from spmd_serve.errors import FingerprintMismatchError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
_SAMPLES, _SAMPLE_BYTES = 16, 4096


def software_fingerprint() -> dict[str, str]:
    """Python, torch and the source text of this package."""
    root = Path(spmd_serve.__file__).parent
    sources = [*root.rglob("*.py"), *root.rglob("*.cu")]
    return {
        "python version": platform.python_version(),
        "torch version": torch.__version__,
        "spmd_serve source": _hash_files(root, sorted(path.relative_to(root).as_posix() for path in sources)),
    }


def model_fingerprint(model: Any, folder: Path, tokenizer_folder: Path) -> dict[str, str]:
    """Fields of the model's configuration (a dataclass), the tokenizer's files, and samples of the weights.

    The samples tell two fine-tunes of one model apart. Names and shapes of tensors are not in it: each rank holds its own
    against this configuration when it loads.
    """
    prints = {f"model.{f.name}": repr(getattr(model, f.name)) for f in dataclasses.fields(model)}
    for name in _TOKENIZER_FILES:
        prints[name] = _hash_files(tokenizer_folder, [name])
    for path in sorted(folder.glob("*.safetensors")):
        prints[path.name] = _sample(path)
    return prints


def options_fingerprint(config: Config) -> dict[str, str]:
    """Every resolved option, by its flag."""
    return {
        flag_name(option.name): repr(getattr(getattr(config, section.name), option.name))
        for section in dataclasses.fields(config)
        for option in dataclasses.fields(getattr(config, section.name))
    }


def agree(board: Board, what: str, own: Mapping[str, str]) -> None:
    """Have all ranks compare their fingerprints; `what` names the occasion on the board. Called by every rank.

    Hashes go first; only ranks that differ exchange the fields.

    Raises:
        FingerprintMismatchError: see `check_fingerprints`.
    """
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    if len(set(board.gather(f"{what} hash", digest))) > 1:
        check_fingerprints(board.gather(what, dict(own)), board.peers)


def check_fingerprints(prints: Sequence[Mapping[str, str]], peers: Iterable[Peer]) -> None:
    """Compare every rank's fingerprint with rank 0's.

    Raises:
        FingerprintMismatchError: names the first rank that differs, its host, and the first field with both values.
    """
    reference = prints[0]
    for own, peer in zip(prints, peers, strict=True):
        for field in [*reference, *(name for name in own if name not in reference)]:
            if own.get(field) != reference.get(field):
                raise FingerprintMismatchError(
                    f"{peer} does not run the same as rank 0: {field} is {own.get(field, 'missing')} there and "
                    f"{reference.get(field, 'missing')} on rank 0; install the same software and the same model on every host"
                )


def _sample(path: Path) -> str:
    """A file that is too large to read whole, as its size and a hash over some blocks from begin to end."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(size - _SAMPLE_BYTES, 0) * i // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{size} bytes, {digest.hexdigest()[:16]}"


def _hash_files(root: Path, names: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        path = root / name
        digest.update(name.encode() + b"\0")
        digest.update(path.read_bytes() if path.is_file() else b"(missing)")
    return digest.hexdigest()[:16]
