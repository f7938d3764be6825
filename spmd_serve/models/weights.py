"""Loading a checkpoint: each rank reads only the slices that it owns.

The decoder describes what it wants as `WeightPiece`s (a view of a parameter, and the slice of a checkpoint tensor that
fills it); `load_weights` checks all of them against the checkpoint before it reads the first byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spmd_serve.errors import WeightsError
from spmd_serve.kernels.fp8 import Fp8Weight
from spmd_serve.models.fp8 import Fp8Source, fp8_checkpoint
from spmd_serve.models.model_config import ModelConfig
from spmd_serve.models.progress import byte_progress
from spmd_serve.models.sources import DummySource, Index, SafetensorsSource, TensorSource, listing

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_ROWS = 4096


@dataclass(frozen=True)
class WeightPiece:
    """`target` (a view into a parameter) is to be filled with `source[index]`; an FP8 target quantises what is not FP8.

    Attributes:
        index: one slice per dimension of the source; missing dimensions are taken whole.
        full_shape: the shape that the whole source tensor must have.
    """

    target: Tensor | Fp8Weight
    source: str
    index: Index
    full_shape: tuple[int, ...]

    @classmethod
    def whole(cls, target: Tensor, source: str) -> WeightPiece:
        """All of a checkpoint tensor, which has the target's shape."""
        return cls(target, source, (), tuple(target.shape))


@dataclass(frozen=True)
class LoadReport:
    """What loading cost this rank."""

    tensors: int
    bytes_read: int
    seconds: float

    def __str__(self) -> str:
        rate = self.bytes_read / max(self.seconds, 1e-9)
        return f"{self.tensors} tensors, {self.bytes_read / 1e6:.1f} MB in {self.seconds:.2f} s ({rate / 1e9:.2f} GB/s)"


def open_source(folder: Path, model: ModelConfig, load_format: str, device: torch.device | str = "cpu") -> TensorSource:
    """The weights of the model in `folder`. `device` is where random weights (load_format "dummy") are made.

    Raises:
        WeightsError: weights are missing or damaged.
    """
    if load_format == "dummy":
        return DummySource(model.norm_offset, device)
    checkpoint = fp8_checkpoint(model.quantization)
    source = SafetensorsSource(folder) if checkpoint is None else Fp8Source(folder, checkpoint)
    if model.tie_embeddings:
        source.stand_in(_HEAD, _EMBEDDING)  # some tools keep the one, some the other
    return source


def has_own_head(source: TensorSource, model: ModelConfig, vocab: range) -> bool:
    """Whether the checkpoint has an LM head that is not the embeddings, whatever config.json says; seen in the rows `vocab`."""
    if not {_EMBEDDING, _HEAD} <= set(source.names()):
        return False
    if not source.shape(_EMBEDDING) == source.shape(_HEAD) == (model.vocab_size, model.hidden_size):
        return True  # which `load_weights` refuses
    for start in range(vocab.start, vocab.stop, _COMPARED_ROWS):
        index = (slice(start, min(start + _COMPARED_ROWS, vocab.stop)), slice(0, model.hidden_size))
        if not torch.equal(source.read(_EMBEDDING, index).float(), source.read(_HEAD, index).float()):
            return True
    return False


def is_unused(model: ModelConfig) -> Callable[[str], bool]:
    """Checkpoint names that may be left over: buffers that are computed, and the LM head of a tied model."""

    def ignore(name: str) -> bool:
        return "rotary_emb." in name or name.endswith("masked_bias") or (model.tie_embeddings and name == _HEAD)

    return ignore


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
    read_before = source.bytes_read
    total = sum(p.target.nbytes for p in wanted)
    with byte_progress("loading weights", total, show=progress) as advance, torch.no_grad():
        for piece in wanted:
            if piece.target.nbytes:  # a rank may own nothing of a tensor
                _fill(piece, source)
                advance(piece.target.nbytes)
    return LoadReport(len(wanted), source.bytes_read - read_before, time.perf_counter() - started)


def _fill(piece: WeightPiece, source: TensorSource) -> None:
    index, target = _concrete(piece), piece.target
    if isinstance(target, Fp8Weight):
        stored = source.read_fp8(piece.source, index, target.block)
        if stored is None:
            target.quantize_(_read(piece, source, index))
        else:
            target.values.copy_(stored[0])
            target.scales.copy_(stored[1])
        return
    tensor = _read(piece, source, index)
    assert tensor.shape == target.shape, (piece.source, tensor.shape, target.shape)
    target.copy_(tensor)


def _read(piece: WeightPiece, source: TensorSource, index: Index) -> Tensor:
    tensor = source.read(piece.source, index)
    if not tensor.is_floating_point():  # what they stand for is not known: config.json names no quantisation
        raise WeightsError(
            f"tensor {piece.source} holds {tensor.dtype} numbers; give a checkpoint that is not quantised so"
        )
    return tensor


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
    text = "; ".join(f"{len(found)} {kind}: {listing(found)}" for kind, found in problems.items() if found)
    if text:
        raise WeightsError(f"the checkpoint does not fit its config.json ({text})")
