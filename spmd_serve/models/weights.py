"""Reading a checkpoint: each rank reads only the slices that it owns, straight from the safetensors files.

The decoder describes what it wants as `WeightPiece`s (a view of a parameter, and the slice of a checkpoint tensor that
fills it); `load_weights` checks all of them against the checkpoint before it reads the first byte.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spmd_serve.errors import WeightsError
from spmd_serve.models.model_config import ModelConfig
from spmd_serve.models.progress import byte_progress

Index = tuple[slice, ...]


class TensorSource(Protocol):
    """Named tensors of which slices can be read."""

    has_any: bool  # True: any name and shape that is asked for exists (random weights), so nothing can be missing

    def names(self) -> list[str]:
        """All tensor names, sorted: Hugging Face's, of the text model alone, experts named as in Qwen3-MoE."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        ...

    def read(self, name: str, index: Index) -> Tensor:
        """The slice `index` (one slice per dimension, with concrete start and stop), in the checkpoint's dtype."""
        ...


@dataclass(frozen=True)
class WeightPiece:
    """`target` (a view into a parameter) is to be filled with `source[index]`.

    Attributes:
        index: one slice per dimension of the source; missing dimensions are taken whole.
        full_shape: the shape that the whole source tensor must have.
    """

    target: Tensor
    source: str
    index: Index
    full_shape: tuple[int, ...]


@dataclass(frozen=True)
class LoadReport:
    """What loading cost this rank."""

    tensors: int
    bytes_read: int
    seconds: float

    def __str__(self) -> str:
        rate = self.bytes_read / max(self.seconds, 1e-9)
        return f"{self.tensors} tensors, {self.bytes_read / 1e6:.1f} MB in {self.seconds:.2f} s ({rate / 1e9:.2f} GB/s)"


# ---- sources ------------------------------------------------------------------------------------------------------


class SafetensorsSource:
    """The *.safetensors files of a folder: a single one, or shards with an index.

    Raises:
        WeightsError: no such files, shards missing, or a file that is damaged.
    """

    has_any = False

    def __init__(self, folder: Path) -> None:
        self._where: dict[str, tuple[Any, str]] = {}  # canonical name -> (open file, name in the file)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in _safetensors_files(folder):
            try:
                handle: Any = safe_open(path, framework="pt")
                names = list(handle.keys())
                shapes = [tuple(handle.get_slice(name).get_shape()) for name in names]
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path} is damaged or no safetensors file ({error}); fetch it again") from error
            for name, shape in zip(names, shapes, strict=True):
                canonical = _canonical_name(name)
                if canonical is not None:
                    self._where[canonical] = (handle, name)
                    self._shapes[canonical] = shape

    def names(self) -> list[str]:
        return sorted(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, index: Index) -> Tensor:
        handle, file_name = self._where[name]
        try:
            tensor: Tensor = handle.get_slice(file_name)[index if index else ...]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"tensor {name} cannot be read ({error}); fetch the checkpoint again") from error
        return tensor


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            files = sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index} is damaged ({type(error).__name__}: {error}); fetch it again") from error
        missing = [path.name for path in files if not path.exists()]
        if missing:
            raise WeightsError(f"{folder} lacks {len(missing)} of {len(files)} weight files: {_listing(missing)}")
        return files
    files = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("consolidated")]
    if not files:
        other = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
        hint = " (only PyTorch pickles, which are not read: convert them to safetensors)" if other else ""
        raise WeightsError(f"{folder} has no *.safetensors weights{hint}; --load-format dummy needs none")
    single = folder / "model.safetensors"
    return [single] if single in files else files


_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))  # the text model of a multimodal checkpoint
_NOT_TEXT = ("vision_", "visual.", "multi_modal_", "audio_")
_MIXTRAL = ((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."))


def _canonical_name(name: str) -> str | None:
    """The one name that the decoder uses for a tensor, or None for a tensor of a vision or audio part."""
    if name.removeprefix("model.").startswith(_NOT_TEXT):
        return None
    for prefix, replacement in _PREFIXES:
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
            break
    if _MIXTRAL[0][0] in name:
        for theirs, ours in _MIXTRAL:
            name = name.replace(theirs, ours)
    return name


class DummySource:
    """Random weights for a model that is known by its config alone.

    Every element is a pure function of (name, position), so slices equal slices of the whole at any rank count.
    A matrix's row is a window of one table of normal numbers (std 0.02, as Hugging Face initialises), which makes
    billions of values a matter of copying; norms are 1, biases 0.
    """

    has_any = True
    _PERIOD = 1 << 22

    def __init__(self, norm_offset: float, device: torch.device | str = "cpu") -> None:
        self._norm = 1.0 - norm_offset
        self._device = torch.device(device)
        generator = torch.Generator().manual_seed(0)
        # A row may be up to one period wide, so the table is two periods long.
        table = torch.randn(self._PERIOD, generator=generator).mul_(0.02)
        self._table = torch.cat([table, table]).to(self._device)

    def names(self) -> list[str]:
        return []

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def read(self, name: str, index: Index) -> Tensor:
        sizes = [i.stop - i.start for i in index]
        if len(index) < 2:
            value = self._norm if "norm" in name else 0.0
            return torch.full(sizes, value, device=self._device)
        *leading, columns = index
        rows = torch.zeros(1, dtype=torch.int64, device=self._device)
        for i in leading:
            # Mixed radix with a fixed base: the position must not depend on which slice is asked for.
            rows = (rows[:, None] * 1_000_003 + torch.arange(i.start, i.stop, device=self._device)).reshape(-1)
        starts = (rows * 2_654_435_761 + zlib.crc32(name.encode()) + columns.start) % self._PERIOD
        windows = self._table.as_strided((self._PERIOD, sizes[-1]), (1, 1))
        return windows[starts].reshape(sizes)


def open_source(folder: Path, model: ModelConfig, load_format: str, device: torch.device | str = "cpu") -> TensorSource:
    """The weights of the model in `folder`. `device` is where random weights (load_format "dummy") are made.

    Raises:
        WeightsError: weights are missing or damaged.
    """
    if load_format == "dummy":
        return DummySource(model.norm_offset, device)
    return SafetensorsSource(folder)


# ---- loading ------------------------------------------------------------------------------------------------------


def load_weights(
    pieces: Iterable[WeightPiece],
    source: TensorSource,
    *,
    progress: bool,
    ignore: Callable[[str], bool] = lambda name: False,
) -> LoadReport:
    """Fill every piece's target, converting to its dtype and device. Reads nothing but the slices.

    Args:
        progress: show a bar and the rate (one rank should).
        ignore: names that may be left over in the checkpoint.

    Raises:
        WeightsError: one message that lists all missing, extra and wrongly shaped tensors.
    """
    wanted = list(pieces)
    _check(wanted, source, ignore)
    started = time.perf_counter()
    bytes_read = 0
    total = sum(p.target.nbytes for p in wanted)
    with byte_progress("loading weights", total, show=progress) as advance, torch.no_grad():
        for piece in wanted:
            if piece.target.numel() == 0:
                continue  # a rank may own nothing of a tensor
            tensor = source.read(piece.source, _concrete(piece))
            assert tensor.shape == piece.target.shape, (piece.source, tensor.shape, piece.target.shape)
            piece.target.copy_(tensor)
            bytes_read += tensor.nbytes
            advance(piece.target.nbytes)
    return LoadReport(len(wanted), bytes_read, time.perf_counter() - started)


def _concrete(piece: WeightPiece) -> Index:
    whole = piece.index + (slice(None),) * (len(piece.full_shape) - len(piece.index))
    bounds = [i.indices(size) for i, size in zip(whole, piece.full_shape, strict=True)]
    assert all(step == 1 for _, _, step in bounds)
    return tuple(slice(start, stop) for start, stop, _ in bounds)


def _check(pieces: Sequence[WeightPiece], source: TensorSource, ignore: Callable[[str], bool]) -> None:
    if source.has_any:
        return
    present = set(source.names())
    wanted = {piece.source: piece.full_shape for piece in pieces}
    missing = [name for name in wanted if name not in present]
    extra = [name for name in sorted(present - wanted.keys()) if not ignore(name)]
    shapes = [
        f"{name} is {list(source.shape(name))} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in present and source.shape(name) != shape
    ]
    problems = {"missing": missing, "unexpected": extra, "wrong shape": shapes}
    text = "; ".join(f"{len(found)} {kind}: {_listing(found)}" for kind, found in problems.items() if found)
    if text:
        raise WeightsError(f"the checkpoint does not fit its config.json ({text})")


def _listing(names: Sequence[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
