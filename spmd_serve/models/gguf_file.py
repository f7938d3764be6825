"""Reading a GGUF file: its metadata and its tensors, dequantised by the gguf library."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from spmd_serve.errors import UnsupportedModelError, WeightsError


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores a family.

    Attributes:
        permuted: Q and K rows are reordered for interleaved rotary embeddings.
        norms_plus_one: norm weights are stored as 1 + weight.
    """

    hf_class: str
    model_type: str
    permuted: bool = False
    norms_plus_one: bool = False


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma": Architecture("GemmaForCausalLM", "gemma", norms_plus_one=True),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", norms_plus_one=True),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", norms_plus_one=True),
    "phi3": Architecture("Phi3ForCausalLM", "phi3"),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", permuted=True),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2"),
}


class _Reader(GGUFReader):  # type: ignore[misc]
    """The library's reader over a plain array: views of an np.memmap cost three times as much, and it makes millions."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)


class GgufFile:
    """A GGUF file's metadata and tensors (all parts of a split file).

    Raises:
        WeightsError: the file is damaged or no GGUF.
        UnsupportedModelError: an architecture, or a type of tensors, that is not known; another byte order.
    """

    def __init__(self, path: Path) -> None:
        try:
            readers = [_Reader(part) for part in split_parts(path)]
            self.meta: dict[str, Any] = {name: field.contents() for name, field in readers[0].fields.items()}
            self.tensors: dict[str, Any] = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
            name = str(self.meta["general.architecture"])
        except (ValueError, LookupError, OSError, OverflowError, MemoryError, TypeError, struct.error) as error:
            raise WeightsError(f"{path} is damaged or no GGUF file ({one_line(error)}); fetch it again") from error
        # The library swaps a file's numbers, but not those in the blocks of quantised weights.
        if any(reader.byte_order == "S" for reader in readers):
            raise UnsupportedModelError(
                f"{path} is a GGUF file for machines of the other byte order; fetch the little-endian one, or convert it with "
                "`gguf-convert-endian FILE little`"
            )
        if name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UnsupportedModelError(f"{path} has the GGUF architecture '{name}'; supported are {known}")
        types = {tensor.tensor_type for tensor in self.tensors.values()}
        if unknown := sorted(kind.name for kind in types if not _is_read(kind)):
            known = ", ".join(kind.name for kind in GGMLQuantizationType if _is_read(kind))
            raise UnsupportedModelError(f"{path} has tensors of the type {', '.join(unknown)}; supported are {known}")
        self.name = name
        self.architecture = ARCHITECTURES[name]
        self.parameters = sum(int(np.prod(t.shape)) for t in self.tensors.values())

    def get(self, key: str, default: Any = None) -> Any:
        """A value of this architecture, such as 'block_count'; one for all layers where the file lists equal ones."""
        value = self.meta.get(f"{self.name}.{key}", default)
        return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value

    def require(self, key: str) -> Any:
        """A value of this architecture that every file has."""
        if (value := self.get(key)) is None:
            raise WeightsError(f"the GGUF file lacks '{self.name}.{key}'; fetch it again")
        return value

    def values(self, name: str) -> Tensor:
        """A tensor, dequantised: float32, or the file's own type if that is a float."""
        tensor = self.tensors[name]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        kind = tensor.tensor_type
        if kind == GGMLQuantizationType.BF16:
            raw = tensor.data.copy().view(np.int16)
            return torch.from_numpy(raw).view(torch.bfloat16).reshape(shape)
        values = tensor.data if kind == GGMLQuantizationType.F16 else dequantize(tensor.data, kind)
        return torch.from_numpy(values if values.flags.writeable else values.copy()).reshape(shape)


def _is_read(kind: GGMLQuantizationType) -> bool:
    """Whether the library can dequantise this type."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def split_parts(path: Path) -> list[Path]:
    """The files of a split GGUF (name-00001-of-00003.gguf), in order; or just `path`."""
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    parts = [path.with_name(f"{match[1]}-{i:05}-of-{match[2]}.gguf") for i in range(1, int(match[2]) + 1)]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise WeightsError(f"{path.parent} lacks parts of the split GGUF file: {', '.join(missing)}")
    return parts


def one_line(error: BaseException) -> str:
    """An error of a library as part of a one-line message."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")
