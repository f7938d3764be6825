"""GGUF files: converted once into a Hugging Face folder in the user's cache, so that later starts just read slices.

The converted copy holds dequantised weights under Hugging Face's names, config.json, generation_config.json and the
tokenizer with its chat template. Its folder is named after the source's path, size and mtime, so a copy of another file
(or of an older conversion) is never used, nor is one whose files are not as long as they were.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from spmd_serve.errors import ModelError, UnsupportedModelError, WeightsError
from spmd_serve.models.gguf_config import write_configs
from spmd_serve.models.gguf_file import GgufFile, one_line, split_parts
from spmd_serve.models.gguf_tokenizer import write_tokenizer
from spmd_serve.models.progress import byte_progress
from spmd_serve.user_cache import cache_root

logger = logging.getLogger(__name__)

_SIZES = "sizes.json"  # of the other files in a converted copy
CONVERSION_VERSION = 5  # raise it whenever a conversion would come out differently
_SHARD_BYTES = 4 * 2**30
# Quantised weights are exact in float32 alone. A model above this size is computed in 16 bits anyway, and its copy
# would fill the disk.
_EXACT_UP_TO_PARAMETERS = 2 * 10**9


_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_TENSOR = re.compile(r"(?:blk\.\d+\.)?rope_(?:freqs|factors_long|factors_short)\.weight")


def convert_gguf(path: Path, *, progress: bool) -> Path:
    """The folder with the converted copy of the GGUF file at `path`, made now if there is none.

    Safe to call from many processes at once: one converts, the others wait for it.

    Raises:
        ModelError: damaged or unsupported file, or a cache folder that cannot be written.
    """
    root = cache_root() / "gguf"
    # Copies of other versions of this package stay: one may be serving from the same cache.
    stem = f"{path.stem}-{_digest(str(path.resolve()))}-v{CONVERSION_VERSION}"
    folder = root / f"{stem}-{_content_key(path)}"
    if _is_whole(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{stem}.lock"):
            if _is_whole(folder):
                return folder
            # Of other versions of the file, damaged, or left by a conversion that was killed.
            for pattern in (f"{glob.escape(stem)}-*", f".converting-{glob.escape(stem)}-*"):
                for stale in root.glob(pattern):
                    shutil.rmtree(stale, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".converting-{stem}-", dir=root))
            try:
                started = time.perf_counter()
                _write_folder(GgufFile(path), scratch, progress)
                sizes = {file.name: file.stat().st_size for file in sorted(scratch.iterdir())}
                (scratch / _SIZES).write_text(json.dumps(sizes))
                os.replace(scratch, folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"the converted copy of {path} cannot be written to {root} ({one_line(error)}); set XDG_CACHE_HOME to a "
            "folder with space"
        ) from error
    logger.info("converted %s in %.1f s, kept in %s", path.name, time.perf_counter() - started, folder)
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether all files of the converted copy are there, as long as they were."""
    try:
        sizes = json.loads((folder / _SIZES).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _content_key(path: Path) -> str:
    stats = [part.stat() for part in split_parts(path)]
    return _digest(repr([(s.st_size, s.st_mtime_ns) for s in stats]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---- conversion ---------------------------------------------------------------------------------------------------


def _write_folder(file: GgufFile, folder: Path, progress: bool) -> None:
    write_configs(file, folder)
    write_tokenizer(file.name, file.meta, folder)
    exact = file.parameters <= _EXACT_UP_TO_PARAMETERS
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        try:
            save_file(shard, folder / name, metadata={"format": "pt"})
        except SafetensorError as error:  # its way to say that the disk is full
            raise OSError(str(error)) from error
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    total = sum(int(t.n_bytes) for t in file.tensors.values())
    with byte_progress(f"converting {file.meta.get('general.name', 'GGUF')}", total, show=progress) as advance:
        for name in file.tensors:
            for hf_name, values in _hf_tensors(file, name):
                shard[hf_name] = (values if exact or values.element_size() < 4 else values.bfloat16()).contiguous()
                if sum(t.nbytes for t in shard.values()) >= _SHARD_BYTES:
                    flush()
            advance(int(file.tensors[name].n_bytes))
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _hf_tensors(file: GgufFile, name: str) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors that a GGUF tensor stands for."""
    if _ROPE_TENSOR.fullmatch(name):
        return  # these went into config.json
    values = file.values(name)
    if name in _GLOBAL_NAMES:
        hf_name = _GLOBAL_NAMES[name]
    else:
        match = _LAYER_TENSOR.fullmatch(name)
        if match is None or match[2] not in _LAYER_NAMES:
            raise UnsupportedModelError(f"the GGUF tensor {name} has no place in a {file.architecture.hf_class}")
        part = _LAYER_NAMES[match[2]]
        if match[2] == "ffn_norm" and f"blk.{match[1]}.post_ffw_norm.weight" in file.tensors:
            part = "pre_feedforward_layernorm"  # the block has norms on both sides
        if match[2] == "ffn_up" and file.name == "phi3":
            part = "mlp.gate_up_proj"
        hf_name = f"model.layers.{match[1]}.{part}.{match[3]}"
        if file.architecture.permuted and match[2] in ("attn_q", "attn_k"):
            heads = file.get("attention.head_count")
            values = unpermute(values, heads if match[2] == "attn_q" else file.get("attention.head_count_kv", heads))
    if file.architecture.norms_plus_one and name.endswith("norm.weight"):
        values = values - 1
    if "{}" in hf_name:
        yield from ((hf_name.format(expert), values[expert]) for expert in range(values.shape[0]))
    else:
        yield hf_name, values


def unpermute(values: Tensor, heads: int) -> Tensor:
    """Rows of a Q or K projection from llama.cpp's interleaved order back to two halves per head.

    Raises:
        WeightsError: they are not those of so many heads.
    """
    if values.shape[0] % (2 * heads):
        raise WeightsError(f"the GGUF file is damaged ({values.shape[0]} rows are not {heads} heads); fetch it again")
    return values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
