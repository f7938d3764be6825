"""FP8 weights: quantising, checkpoints of every kind that is read, slices of them, and what they cost in accuracy."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import families
from support.thread_ranks import on_ranks

from spmd_serve.errors import UnsupportedModelError, WeightsError
from spmd_serve.kernels.fp8 import FP8, Fp8Format, Fp8Weight, fp8_linear
from spmd_serve.kernels.linear import Norm
from spmd_serve.models.fp8 import Fp8Source, fp8_checkpoint, fp8_format
from spmd_serve.models.model_config import ModelConfig
from spmd_serve.models.registry import load_model_config
from spmd_serve.models.weights import WeightPiece, load_weights

CPU = torch.device("cpu")
BLOCKED = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 4]}


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"type": "float", "num_bits": 8, "strategy": strategy, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }


def test_quantising_is_near_and_keeps_what_is_fp8_already() -> None:
    torch.manual_seed(0)
    for block in (None, 16):
        weight = torch.randn(24, 40) * torch.logspace(-4, 4, 24)[:, None]
        stored = Fp8Weight.empty(24, 40, Fp8Format(block), CPU)
        stored.quantize_(weight)
        again = stored.dequantize(torch.float32)
        # e4m3 has 3 bits after the leading one: half a step is 1/16; below the normal range steps are absolute.
        error = (again - weight).abs() / weight.abs().clamp(min=stored.scales.max(dim=1, keepdim=True).values * 2**-6)
        assert error.max() <= 1 / 16 + 1e-6
        copy = Fp8Weight.empty(24, 40, Fp8Format(block), CPU)
        copy.quantize_(again)
        torch.testing.assert_close(copy.dequantize(torch.float32), again, rtol=1e-6, atol=0)
    zero = Fp8Weight.empty(2, 3, Fp8Format(), CPU)
    zero.quantize_(torch.zeros(2, 3))
    assert torch.equal(zero.dequantize(torch.float32), torch.zeros(2, 3))


def test_linear_equals_the_plain_one_over_dequantised_weights() -> None:
    torch.manual_seed(1)
    x, residual, bias = torch.randn(5, 40), torch.randn(5, 24), torch.randn(24)
    weight = Fp8Weight.empty(24, 40, Fp8Format(16), CPU)
    weight.quantize_(torch.randn(24, 40))
    plain = weight.dequantize(torch.float32)
    norm = Norm(torch.rand(40), 1e-6)
    normed = torch.nn.functional.rms_norm(x, (40,), norm.scale, 1e-6)
    got = fp8_linear(x, weight, bias=bias, norm=norm, residual=residual.clone())
    torch.testing.assert_close(got, residual + normed @ plain.T + bias)
    gate, up = (x @ plain.T).chunk(2, dim=-1)
    torch.testing.assert_close(fp8_linear(x, weight, activation="silu"), torch.nn.functional.silu(gate) * up)


# ---- checkpoints --------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, kind: str) -> torch.Tensor:
    """A matrix [20, 14] in FP8; returns what it stands for."""
    torch.manual_seed(2)
    values = (torch.randn(20, 14) * 100).to(FP8)
    suffix, scale = {
        "channel": ("_scale", torch.rand(20, 1)),
        "channel 1-d": ("_scale", torch.rand(20)),
        "tensor": ("_scale", torch.rand(1)),
        "scalar": ("_scale", torch.rand(())),
        "block": ("_scale_inv", torch.rand(3, 4, dtype=torch.bfloat16)),
    }[kind]
    of_activations = {f"a.{name}": torch.ones(1) for name in ("input_scale", "kv_scale", "input_scale_ub")}
    save_file(
        {"a.weight": values, f"a.weight{suffix}": scale, "model.norm.weight": torch.ones(3)} | of_activations,
        folder / "model.safetensors",
    )
    whole = scale.float()
    if kind == "block":
        whole = whole.repeat_interleave(8, 0)[:20].repeat_interleave(4, 1)[:, :14]
    elif kind == "channel 1-d":
        whole = whole[:, None]
    return values.float() * whole


def open_fp8(folder: Path, kind: str) -> Fp8Source:
    checkpoint = fp8_checkpoint(BLOCKED if kind == "block" else compressed(kind))
    assert checkpoint is not None
    return Fp8Source(folder, checkpoint)


KINDS = ["channel", "channel 1-d", "tensor", "scalar", "block"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_slice_is_dequantised(tmp_path: Path, kind: str) -> None:
    whole = write_checkpoint(tmp_path, kind)
    source = open_fp8(tmp_path, kind)
    assert source.names() == ["a.weight", "model.norm.weight"]
    for rows, columns in ((slice(0, 20), slice(0, 14)), (slice(3, 11), slice(5, 14)), (slice(19, 20), slice(0, 1))):
        assert torch.equal(source.read("a.weight", (rows, columns)), whole[rows, columns])
    assert torch.equal(source.read("model.norm.weight", (slice(0, 2),)), torch.ones(2))


@pytest.mark.parametrize("kind", KINDS)
def test_stored_values_are_kept(tmp_path: Path, kind: str) -> None:
    """A quantised target takes values and scales as they are, on any slice that its scales allow."""
    whole = write_checkpoint(tmp_path, kind)
    block = 4 if kind == "block" else None
    columns = slice(8, 14) if kind == "block" else slice(5, 14)
    target = Fp8Weight.empty(12, columns.stop - columns.start, Fp8Format(block), CPU)
    source = open_fp8(tmp_path, kind)
    pieces = [
        WeightPiece(target[:5], "a.weight", (slice(3, 8), columns), (20, 14)),
        WeightPiece(target[5:], "a.weight", (slice(8, 15), columns), (20, 14)),
    ]
    report = load_weights(pieces, source, progress=False, ignore=lambda name: name == "model.norm.weight")
    assert torch.equal(target.dequantize(torch.float32), whole[3:15, columns])
    assert report.bytes_read < 2 * target.values.nbytes + 200


def test_blocks_that_a_slice_cuts_are_quantised_again(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path, "block")
    target = Fp8Weight.empty(20, 11, Fp8Format(4), CPU)
    piece = WeightPiece(target, "a.weight", (slice(0, 20), slice(3, 14)), (20, 14))
    load_weights([piece], open_fp8(tmp_path, "block"), progress=False, ignore=lambda name: True)
    error = (target.dequantize(torch.float32) - whole[:, 3:]).abs().max() / whole.abs().max()
    assert 0 < error < 1 / 16


def test_damage_is_named(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 4, dtype=FP8)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"a\.weight is FP8 but has no a\.weight_scale"):
        open_fp8(tmp_path, "channel").read("a.weight", (slice(0, 4), slice(0, 4)))
    save_file(
        {"a.weight": torch.zeros(4, 4, dtype=FP8), "a.weight_scale": torch.zeros(3, 1)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(WeightsError, match=r"a\.weight_scale is \[3, 1\], which does not fit a\.weight \[4, 4\]"):
        open_fp8(tmp_path, "channel").read("a.weight", (slice(0, 4), slice(0, 4)))


def test_what_config_json_says() -> None:
    assert fp8_checkpoint(None) is None
    for other in (
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        compressed("channel") | {"config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 8}}}},
    ):
        with pytest.raises(UnsupportedModelError, match="quantised by"):
            fp8_checkpoint(other)
    for known, block in (
        ({"quant_method": "fp8"}, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, None),
        (compressed("channel"), None),
        (compressed("block", block_structure=[128, 64]), (128, 64)),
        (compressed("block", block_structure="128x64"), (128, 64)),
    ):
        checkpoint = fp8_checkpoint(known)
        assert checkpoint is not None and checkpoint.block == block
    with pytest.raises(UnsupportedModelError, match=r"modelopt NVFP4"):
        fp8_checkpoint({"quant_method": "modelopt", "quant_algo": "NVFP4"})
    model = dataclasses.replace(families_config(), quantization=BLOCKED)
    assert fp8_format(model, requested=False, gpu=True) == Fp8Format(4)
    assert fp8_format(model, requested=False, gpu=False) is None
    plain = dataclasses.replace(model, quantization=None)
    assert fp8_format(plain, requested=True, gpu=False) == Fp8Format(None)
    assert fp8_format(plain, requested=False, gpu=True) is None


def test_rotations_of_activations_are_refused() -> None:
    """Those of weights are inside them."""

    def rotated(*locations: str) -> dict[str, Any]:
        apply = [{"targets": ["Linear"], "location": location} for location in locations]
        return compressed("channel") | {
            "transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": apply}}}
        }

    for inside in (compressed("channel") | {"transform_config": {}}, rotated("weight_input", "weight_output")):
        assert fp8_checkpoint(inside) is not None
    with pytest.raises(UnsupportedModelError, match="transforms activations"):
        fp8_checkpoint(rotated("weight_input", "input"))


def families_config() -> ModelConfig:
    return ModelConfig("LlamaForCausalLM", 8, 8, 0, 2, 2, 4, 8, 8, ())


@pytest.mark.parametrize("kept", [False, True], ids=["dequantised", "kept as FP8"])
def test_logits_of_a_block_scaled_checkpoint(tmp_path: Path, kept: bool) -> None:
    """Against transformers on the weights that the checkpoint stands for."""
    families.write_family("qwen3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        stored = Fp8Weight.empty(*tensors[name].shape, Fp8Format(8), CPU)
        stored.quantize_(tensors[name])
        # Blocks of 2 x 8 share the first row's scale, so that both dimensions of a block count.
        scales = stored.scales.view(-1, 2, stored.scales.shape[1])[:, 0]
        tensors[name], tensors[name + "_scale_inv"] = stored.values, scales.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = BLOCKED | {"weight_block_size": [2, 8]}
    (tmp_path / "config.json").write_text(json.dumps(config))

    plain = {n: t for n, t in tensors.items() if not n.endswith("_scale_inv")}
    for name in [n for n in plain if n + "_scale_inv" in tensors]:
        out_features, in_features = plain[name].shape
        scales = tensors[name + "_scale_inv"].repeat_interleave(2, 0).repeat_interleave(8, 1)
        plain[name] = plain[name].float() * scales[:out_features, :in_features]
    families.write_reference(tmp_path, plain)
    assert load_model_config(tmp_path).quantization is not None
    for ranks in (1, 2, 3):
        work = partial(families.largest_difference, tmp_path, fp8=Fp8Format(8) if kept else None)
        found = on_ranks(ranks, work)
        assert max(max(of_rank.values()) for of_rank in found) < families.TOLERANCE, (ranks, found)
