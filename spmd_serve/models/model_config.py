"""What the decoder needs to know of a model, whatever file it came from. models/registry.py fills it, by models/families.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spmd_serve.layers.rotary import RopeConfig


@dataclass(frozen=True)
class LayerSpec:
    """What differs from layer to layer."""

    window: int | None = None  # sliding window in tokens (a query sees itself and window-1 before it); None is full
    rope: int | None = 0  # index into ModelConfig.ropes; None is no positional encoding in this layer
    moe: bool = False


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts: softmax over router logits, top-k."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_top_k: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer. Sizes are of the whole model, not of a shard."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeConfig, ...] = (RopeConfig(),)
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # Gemma multiplies by (1 + weight)
    activation: str = "silu"  # silu | gelu_tanh
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = "none"  # none | head (Qwen3, Gemma 3) | full (OLMo 2: over all heads together)
    pre_norms: bool = True  # False: OLMo 2, norms after the blocks only
    post_norms: bool = False  # Gemma 2/3, OLMo 2: a norm on the block's output before the residual add
    embed_scale: float = 1.0
    attn_scale: float | None = None  # None: head_dim ** -0.5
    attn_softcap: float | None = None
    final_softcap: float | None = None
    moe: MoEConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"  # of the checkpoint
    quantization: dict[str, Any] | None = None  # quantization_config as in config.json
    fused_weights: bool = False  # checkpoint has qkv_proj / gate_up_proj (Phi-3)
    generation_defaults: dict[str, Any] = field(default_factory=dict)  # from generation_config.json

    @property
    def only_adds(self) -> bool:
        """Whether a layer is x += attention(norm(x)); x += mlp(norm(x)).

        Only then may kernels take in norms and adds (see decoder.py). A field that changes what lies between a block and the
        residual stream belongs in here as well.
        """
        return self.pre_norms and not self.post_norms

    def short_context(self, max_len: int) -> int:
        """Up to how many tokens a sequence has rotary frequencies of its own (longrope, dynamic); 0: all have the same.

        A sequence that grows beyond it is computed anew.
        """
        return max(rope.short_context(max_len) for rope in self.ropes)
