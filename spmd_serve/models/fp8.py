"""Checkpoints whose linear weights are FP8 already: compressed-tensors (per channel or tensor) and block scales.

A weight `x.weight` comes with `x.weight_scale` (or `x.weight_scale_inv`, which is multiplied all the same): one number,
one a row, or one a block of rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_serve.errors import UnsupportedModelError, WeightsError
from spmd_serve.kernels.fp8 import FP8, Fp8Format
from spmd_serve.models.model_config import ModelConfig
from spmd_serve.models.sources import Index, SafetensorsSource

_SCALES = ("_scale", "_scale_inv")  # appended to the weight's name
# Activations are scaled as they come.
_OF_ACTIVATIONS = "input_scale input_scale_ub activation_scale output_scale q_scale k_scale v_scale kv_scale"
_NOT_USED = tuple(f".{name}" for name in _OF_ACTIVATIONS.split())


@dataclass(frozen=True)
class Fp8Checkpoint:
    """What config.json says of the scales. block: (rows, columns) that share one, None where shapes tell."""

    block: tuple[int, int] | None = None


def fp8_checkpoint(quantization: Mapping[str, Any] | None) -> Fp8Checkpoint | None:
    """From config.json's quantization_config; None for a checkpoint that is not quantised.

    Raises:
        UnsupportedModelError: quantised in another way.
    """
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    if method in ("fp8", "fbgemm_fp8") or (method == "modelopt" and quantization.get("quant_algo") == "FP8"):
        return Fp8Checkpoint(_block(quantization.get("weight_block_size")))
    if method == "compressed-tensors" and quantization.get("format") in ("float-quantized", "naive-quantized"):
        weights = [group.get("weights") or {} for group in quantization.get("config_groups", {}).values()]
        if weights and all(w.get("type") == "float" and w.get("num_bits") == 8 for w in weights):
            if _transforms_activations(quantization.get("transform_config") or {}):
                raise UnsupportedModelError(
                    "the checkpoint's quantization_config transforms activations (transform_config), which is not supported"
                )
            return Fp8Checkpoint(_block(weights[0].get("block_structure")))
    details = [str(quantization[key]) for key in ("format", "quant_algo", "bits") if quantization.get(key)]
    raise UnsupportedModelError(
        f"the checkpoint is quantised by {' '.join([str(method), *details])}; supported are fp8, compressed-tensors "
        "float-quantized with 8 bits, and modelopt's FP8"
    )


def _transforms_activations(config: Mapping[str, Any]) -> bool:
    """Whether something is to be multiplied by rotations beside the weights, which have theirs inside."""
    applied = [part for group in config.get("config_groups", {}).values() for part in group.get("apply", [])]
    return any(part["location"] not in ("weight_input", "weight_output") for part in applied)


def _block(given: Any) -> tuple[int, int] | None:
    """[128, 128], or "128x128"."""
    if not given:
        return None
    rows, columns = given.split("x") if isinstance(given, str) else given
    return int(rows), int(columns)


def fp8_format(model: ModelConfig, *, requested: bool, gpu: bool) -> Fp8Format | None:
    """How the linear weights are kept: FP8 if it is requested, and on a GPU if the checkpoint is; None: the compute type."""
    checkpoint = fp8_checkpoint(model.quantization)
    if not requested and (checkpoint is None or not gpu):
        return None
    return Fp8Format(checkpoint.block[1] if checkpoint is not None and checkpoint.block else None)


class Fp8Source(SafetensorsSource):
    """Files that show their weights as float32, and on request as they are; the scales are not among the tensors."""

    def __init__(self, folder: Path, checkpoint: Fp8Checkpoint) -> None:
        super().__init__(folder)
        self._block = checkpoint.block
        names = set(super().names())
        weights = [name for name in names if name.endswith(".weight")]
        self._scale_of = {name: name + suffix for name in weights for suffix in _SCALES if name + suffix in names}

    def names(self) -> list[str]:
        scales = set(self._scale_of.values())
        return [name for name in super().names() if name not in scales and not name.endswith(_NOT_USED)]

    def read(self, name: str, index: Index) -> Tensor:
        values = super().read(name, index)
        if name not in self._scale_of:
            if values.dtype == FP8:
                raise WeightsError(f"tensor {name} is FP8 but has no {name}_scale; fetch the checkpoint again")
            return values
        rows, columns = index
        row_block, column_block, scales = self._scales(name, index)
        first_row, first_column = rows.start // row_block, columns.start // column_block
        by_row = torch.arange(rows.start, rows.stop) // row_block - first_row
        by_column = torch.arange(columns.start, columns.stop) // column_block - first_column
        return values.float() * scales[by_row][:, by_column]

    def read_fp8(self, name: str, index: Index, block: int | None) -> tuple[Tensor, Tensor] | None:
        if name not in self._scale_of:
            return None
        rows, columns = index
        row_block, column_block, scales = self._scales(name, index)
        whole_rows = column_block >= self.shape(name)[1]
        fits = whole_rows if block is None else column_block == block and columns.start % block == 0
        if not fits:
            return None
        by_row = torch.arange(rows.start, rows.stop) // row_block - rows.start // row_block
        return super().read(name, index), scales[by_row]

    def _scales(self, name: str, index: Index) -> tuple[int, int, Tensor]:
        """Rows and columns that share a scale, and the float32 scales [blocks, blocks] that the slice touches."""
        rows, columns = index
        scale_name = self._scale_of[name]
        shape, size = self.shape(scale_name), self.shape(name)
        if all(n == 1 for n in shape):
            whole = super().read(scale_name, tuple(slice(0, n) for n in shape))
            return size[0], max(size[1], 1), whole.float().reshape(1, 1)
        row_block, column_block = self._block or (1, size[1])
        expected = (-(-size[0] // row_block), -(-size[1] // column_block))
        if shape not in (expected, (expected[0],)[: 1 if expected[1] == 1 else 0]):
            raise WeightsError(f"tensor {scale_name} is {list(shape)}, which does not fit {name} {list(size)}")
        touched = (
            slice(rows.start // row_block, -(-rows.stop // row_block)),
            slice(columns.start // column_block, -(-columns.stop // column_block)),
        )
        part = super().read(scale_name, touched[: len(shape)])
        return row_block, column_block, part.float().reshape(touched[0].stop - touched[0].start, -1)
