"""A model configuration for tests that need none in particular."""

from __future__ import annotations

from spmd_serve.models.model_config import LayerSpec, ModelConfig

TINY_LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=211,
    hidden_size=48,
    num_layers=3,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=80,
    max_position=128,
    layers=(LayerSpec(),) * 3,
    norm_eps=1e-5,
    tie_embeddings=True,
    eos_token_ids=(2,),
    dtype="float32",
)
