"""Where weights come from: safetensors files, of which slices are read, or random numbers."""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spmd_serve.errors import WeightsError

Index = tuple[slice, ...]


class TensorSource(ABC):
    """Named tensors of which slices can be read."""

    has_any = False  # True: any name and shape that is asked for exists (random weights), so nothing can be missing
    bytes_read = 0  # of all slices read so far, as stored

    @abstractmethod
    def names(self) -> list[str]:
        """All tensor names, sorted: Hugging Face's, of the text model alone, experts named as in Qwen3-MoE."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @abstractmethod
    def read(self, name: str, index: Index) -> Tensor:
        """The slice `index` (one slice per dimension, with concrete start and stop), in the checkpoint's dtype."""

    def read_fp8(self, name: str, index: Index, block: int | None) -> tuple[Tensor, Tensor] | None:
        """Values and scales of a slice of a matrix as in Fp8Weight, or None if they are not stored in that way."""
        return None


class SafetensorsSource(TensorSource):
    """The *.safetensors files of a folder: a single one, or shards with an index.

    Raises:
        WeightsError: no such files, shards missing, or a file that is damaged.
    """

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

    def stand_in(self, other: str, name: str) -> None:
        """Show the tensor `other` as `name` too, if there is no `name`."""
        if other in self._where and name not in self._where:
            self._where[name], self._shapes[name] = self._where[other], self._shapes[other]

    def read(self, name: str, index: Index) -> Tensor:
        handle, file_name = self._where[name]
        try:
            tensor: Tensor = handle.get_slice(file_name)[index if index else ...]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"tensor {name} cannot be read ({error}); fetch the checkpoint again") from error
        self.bytes_read += tensor.nbytes
        return tensor


# Mistral's copy under other names, adapters beside their base, and what macOS leaves beside each file on other disks.
_NO_WEIGHTS = ("consolidated", "adapter_", "._")


def _safetensors_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():  # also beside shards and their index, which may be of an earlier save
        return [single]
    if index.exists():
        try:
            files = sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index} is damaged ({type(error).__name__}: {error}); fetch it again") from error
        missing = [path.name for path in files if not path.exists()]
        if missing:
            raise WeightsError(f"{folder} lacks {len(missing)} of {len(files)} weight files: {listing(missing)}")
        return files
    files = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(_NO_WEIGHTS)]
    if not files:
        other = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
        hint = " (only PyTorch pickles, which are not read: convert them to safetensors)" if other else ""
        raise WeightsError(f"{folder} has no *.safetensors weights{hint}; --load-format dummy needs none")
    return files


_PREFIXES = (
    ("model.language_model.", "model."),  # the text model of a multimodal checkpoint
    ("language_model.", ""),
    *((part, f"model.{part}") for part in ("embed_tokens.", "layers.", "norm.")),  # saved without its LM head
)
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


class DummySource(TensorSource):
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


def listing(names: Sequence[str], limit: int = 20) -> str:
    """Names in a message, cut after `limit`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
