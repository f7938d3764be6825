"""Reading checkpoints: slices only, damage and misfits reported in one message, random weights that any rank agrees on."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.models import TINY_LLAMA

from spmd_serve.errors import WeightsError
from spmd_serve.models.sources import DummySource, SafetensorsSource
from spmd_serve.models.weights import WeightPiece, has_own_head, is_unused, load_weights, open_source

A = torch.arange(24, dtype=torch.float32).reshape(6, 4)
B = torch.arange(5, dtype=torch.bfloat16)


def piece(target: torch.Tensor, source: str, *index: slice, shape: tuple[int, ...]) -> WeightPiece:
    return WeightPiece(target, source, index, shape)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": A}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": B}, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_fills_views_with_slices(layout: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(layout)
    fused = torch.zeros(5, 4, dtype=torch.bfloat16)
    bias = torch.zeros(2)
    pieces = [
        piece(fused[:2], "a", slice(1, 3), shape=(6, 4)),
        piece(fused[2:, :2], "a", slice(3, 6), slice(2, 4), shape=(6, 4)),
        piece(bias, "b", slice(3, None), shape=(5,)),
    ]
    report = load_weights(pieces, SafetensorsSource(folder), progress=False)
    assert torch.equal(fused[:2].float(), A[1:3])
    assert torch.equal(fused[2:, :2].float(), A[3:6, 2:4])
    assert torch.equal(bias, B[3:].float())
    assert report.tensors == 3
    assert report.bytes_read == 2 * 4 * 4 + 3 * 2 * 4 + 2 * 2


def test_a_rank_may_own_nothing(single: Path) -> None:
    report = load_weights(
        [
            piece(torch.zeros(0, 4), "a", slice(6, 6), shape=(6, 4)),
            piece(torch.zeros(5), "b", shape=(5,)),
        ],
        SafetensorsSource(single),
        progress=False,
    )
    assert report.bytes_read == B.nbytes


def test_all_misfits_in_one_message(single: Path) -> None:
    pieces = [piece(torch.zeros(4, 6), "a", shape=(4, 6)), piece(torch.zeros(1), "norm.weight", shape=(1,))]
    with pytest.raises(WeightsError) as caught:
        load_weights(pieces, SafetensorsSource(single), progress=False)
    message = str(caught.value)
    assert "1 missing: norm.weight" in message
    assert "1 unexpected: b" in message
    assert "a is [6, 4] instead of [4, 6]" in message
    with pytest.raises(WeightsError) as caught:
        load_weights(pieces, SafetensorsSource(single), progress=False, ignore=lambda name: name == "b")
    assert "unexpected" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool])
def test_integers_are_no_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """Of a quantisation that config.json does not tell of; the text would be noise."""
    save_file({"a": A.to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="tensor a holds torch"):
        load_weights([piece(torch.zeros(6, 4), "a", shape=(6, 4))], SafetensorsSource(tmp_path), progress=False)


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"lacks 1 of 2 weight files: model-00002-of-00002\.safetensors"):
        SafetensorsSource(sharded)


def test_which_files_are_the_weights(sharded: Path) -> None:
    """A folder that was saved to or copied into more than once has more than the model's own files."""
    index = sharded / "model.safetensors.index.json"
    for name in ("adapter_model", "consolidated.00", "._model-00001-of-00002"):
        save_file({"other": B}, sharded / f"{name}.safetensors")
    assert SafetensorsSource(sharded).names() == ["a", "b"]
    index.unlink()
    assert SafetensorsSource(sharded).names() == ["a", "b"]
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00003.safetensors"}}))
    with pytest.raises(WeightsError, match="lacks 1 of 1 weight files"):
        SafetensorsSource(sharded)
    save_file({"c": B}, sharded / "model.safetensors")  # as transformers: the one file, whatever the index says
    assert SafetensorsSource(sharded).names() == ["c"]


@pytest.mark.parametrize("damage", ["truncated", "empty", "no safetensors", "header"])
def test_damaged_file(single: Path, damage: str) -> None:
    path = single / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(
        {
            "truncated": data[:-3],
            "empty": b"",
            "no safetensors": b"<html>" * 100,
            "header": data[:8] + bytes(30) + data[38:],
        }[damage]
    )
    with pytest.raises(WeightsError, match="is damaged") as caught:
        SafetensorsSource(single)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_damaged_index(sharded: Path, text: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match=r"index\.json is damaged"):
        SafetensorsSource(sharded)


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no \*\.safetensors"):
        SafetensorsSource(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match="convert them to safetensors"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_checkpoint_may_hold_either_name(tmp_path: Path, kept: str) -> None:
    model = dataclasses.replace(TINY_LLAMA, vocab_size=6, hidden_size=4)
    save_file({kept: A}, tmp_path / "model.safetensors")
    source = open_source(tmp_path, model, "auto")
    assert torch.equal(source.read("model.embed_tokens.weight", (slice(0, 6), slice(0, 4))), A)
    assert not has_own_head(source, model, range(6))
    untied = open_source(tmp_path, dataclasses.replace(model, tie_embeddings=False), "auto")
    assert untied.names() == [kept]


def test_a_head_of_its_own_counts_more_than_the_config(tmp_path: Path) -> None:
    """What transformers 5 does with such checkpoints; each rank looks at the rows that it owns."""
    model = dataclasses.replace(TINY_LLAMA, vocab_size=6, hidden_size=4)
    head = A.bfloat16()  # the same values in another type are the same head
    for row, own in ((None, False), (4, True)):
        if row is not None:
            head[row] += 1
        save_file({"model.embed_tokens.weight": A, "lm_head.weight": head}, tmp_path / "model.safetensors")
        source = open_source(tmp_path, model, "auto")
        assert has_own_head(source, model, range(6)) == own
        assert has_own_head(source, model, range(4, 6)) == own
        assert not has_own_head(source, model, range(4))
        assert not has_own_head(source, model, range(6, 6))
    assert has_own_head(source, dataclasses.replace(model, vocab_size=7), range(4)), "loading shall name the shapes"


def test_buffers_that_are_computed_may_be_left_over() -> None:
    unused = is_unused(dataclasses.replace(TINY_LLAMA, tie_embeddings=False))
    for name in ("rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq", "self_attn.rotary_emb.cos_cached"):
        assert unused(f"model.{name}")
    assert not unused("lm_head.weight") and not unused("model.layers.3.mlp.up_proj.weight")
    assert is_unused(TINY_LLAMA)("lm_head.weight")


def test_a_model_saved_without_its_head_has_no_prefix(tmp_path: Path) -> None:
    tensors = {name: B.clone() for name in ("embed_tokens.weight", "layers.0.mlp.up_proj.weight", "norm.weight")}
    save_file(tensors, tmp_path / "model.safetensors")
    assert SafetensorsSource(tmp_path).names() == [f"model.{name}" for name in sorted(tensors)]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_multimodal_checkpoint(tmp_path: Path, prefix: str) -> None:
    save_file({prefix + "norm.weight": B, "model.vision_tower.x": A.clone()}, tmp_path / "model.safetensors")
    assert SafetensorsSource(tmp_path).names() == ["model.norm.weight"]


@given(row=st.integers(0, 8), rows=st.integers(0, 5), column=st.integers(0, 20), columns=st.integers(1, 9))
def test_dummy_slices_are_slices_of_the_whole(row: int, rows: int, column: int, columns: int) -> None:
    whole = DUMMY.read("w", (slice(0, 13), slice(0, 29)))
    part = DUMMY.read("w", (slice(row, row + rows), slice(column, column + columns)))
    assert torch.equal(part, whole[row : row + rows, column : column + columns])


def test_dummy_values_are_sane() -> None:
    weight = DUMMY.read("model.layers.0.mlp.up_proj.weight", (slice(0, 300), slice(0, 200)))
    other = DUMMY.read("model.layers.1.mlp.up_proj.weight", (slice(0, 300), slice(0, 200)))
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(weight.mean().item()) < 0.001
    assert torch.linalg.matrix_rank(weight) == 200
    assert not torch.equal(weight, other)
    experts = DUMMY.read("e", (slice(1, 3), slice(2, 4), slice(0, 7)))
    assert torch.equal(experts[1, 0], DUMMY.read("e", (slice(2, 3), slice(2, 3), slice(0, 7)))[0, 0])
    assert torch.equal(DUMMY.read("model.norm.weight", (slice(0, 4),)), torch.ones(4))
    assert torch.equal(DummySource(1.0).read("model.norm.weight", (slice(0, 4),)), torch.zeros(4))


def test_dummy_has_whatever_is_asked_for() -> None:
    target = torch.zeros(3, 2)
    load_weights([piece(target, "w", slice(0, 3), slice(4, 6), shape=(3, 8))], DUMMY, progress=False)
    assert torch.equal(target, DUMMY.read("w", (slice(0, 3), slice(4, 6))))


DUMMY = DummySource(0.0)
