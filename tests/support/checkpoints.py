"""Small random models of many kinds, saved in bfloat16 as transformers does it: for tests of the engine as a whole.

Sizes suit a GPU's kernels (heads of 64, 128 and 256, hidden sizes of some hundreds), and the logits have some spread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 1003
WINDOW = 96  # no multiple of a page or a chunk; prompts and chunks go beyond it

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
_WIDE = {"num_attention_heads": 16, "head_dim": 128}
_MOE = {"num_hidden_layers": 3, "num_experts_per_tok": 2, "tie_word_embeddings": False}
_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

# name -> (class prefix in transformers, what differs from _COMMON)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "llama-untied": ("Llama", {"num_attention_heads": 8, "head_dim": 64, "tie_word_embeddings": False}),
    "llama-odd-heads": ("Llama", {"head_dim": 96}),
    "qwen3": ("Qwen3", _WIDE | {"num_key_value_heads": 8}),
    "qwen3-wide": ("Qwen3", _WIDE | {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2", {}),
    "mistral": ("Mistral", {"num_attention_heads": 8, "head_dim": 64, "sliding_window": WINDOW}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "olmo2": ("Olmo2", {}),
    "qwen3-moe": (
        "Qwen3Moe",
        _MOE
        | {
            "head_dim": 64,
            "num_experts": 5,
            "moe_intermediate_size": 96,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("Mixtral", _MOE | {"num_local_experts": 4, "intermediate_size": 192, "sliding_window": None}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 64,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 64,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": _ROPES,
        },
    ),
}


def make_checkpoint(folder: Path, kind: str, **changes: Any) -> Path:
    """Save a random model of `kind` into `folder`; `changes` are fields of its config."""
    import transformers

    prefix, differences = KINDS[kind]
    config_class = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(prefix, f"{prefix}Config"))
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config_class(**(_COMMON | differences | changes)))
    one = 0.0 if prefix.startswith("Gemma") else 1.0  # what a norm's weight means "unchanged" by
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            torch.nn.init.normal_(parameter, std=0.3)  # a router that mostly means the first of its experts
        elif parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.06)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        else:
            torch.nn.init.uniform_(parameter, one - 0.5, one + 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of VOCAB words "t0" "t1" ..., so that a server can start."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def random_prompts(*lengths: int) -> list[list[int]]:
    """Token ids, the same in every call."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
