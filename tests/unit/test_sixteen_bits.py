"""16-bit weights on a CPU that computes in float32: every kind of layer gives what rounding the weights alone would give."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import families
from transformers import AutoModelForCausalLM

from spmd_serve.distributed.collectives import Communicator
from spmd_serve.kernels.packed import activation_dtype

KINDS = ("llama-tied-biased", "phi3", "mixtral", "qwen3-moe", "olmo2")


@pytest.mark.parametrize("family", KINDS)
def test_logits_are_those_of_rounded_weights(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    if activation_dtype(torch.bfloat16, torch.device("cpu")) != torch.float32:
        pytest.skip("this CPU has no FBGEMM: weights and activations stay in 16 bits")
    families.write_family(family, tmp_path)
    rounded = {
        name: tensor.bfloat16().float() if tensor.ndim > 1 or name.endswith("bias") else tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(rounded, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    families.save_reference(model.eval(), tmp_path)
    # Float16 holds the weights but for the smallest: no more than float32's own rounding is left.
    differences = families.largest_difference(tmp_path, Communicator(), dtype=torch.bfloat16)
    assert max(differences.values()) < 1e-3, differences
