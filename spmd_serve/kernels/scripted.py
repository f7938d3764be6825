"""A decoding step's layers on a CPU in TorchScript: one call for all of them, or two a layer where ranks meet in between.

With few tokens each operation takes longer to reach from Python than to run: the weights that stream through the caches push
the interpreter out of them in every layer. kernels/README.md has the times. Each function below stands for one in plain
torch, named beside it, that its tests compare it with; that one serves where this does not: other types, other ranks'
norms, chunks of prompts, and a torch without TorchScript.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spmd_serve.kernels.packed import HALF_SCRIPT, CpuWeight, HalfWeight

# The type of a weight, and x @ w.T, for each order of weights (kernels/packed.py).
_PRODUCTS = {
    "half": HALF_SCRIPT,
    "onednn": ("Tensor", 'torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")'),
    "plain": ("Tensor", "torch.ops.aten.linear(x, w)"),
}

_SOURCE = """
# kernels/linear.py, linear_torch. No activation is "".
def linear(x: Tensor, w: WEIGHT, bias: Optional[Tensor], scale: Optional[Tensor], eps: float, activation: str,
           residual: Optional[Tensor]):
    if scale is not None:
        x = torch.rms_norm(x, [x.size(-1)], scale, eps)
    out = PRODUCT
    if bias is not None:
        out = out.add_(bias)
    if activation != "":
        gate, up = out.chunk(2, -1)
        if activation == "silu":
            return torch.ops.aten.silu(gate).mul_(up)
        return torch.ops.aten.gelu(gate, approximate="tanh").mul_(up)
    if residual is not None:
        return residual.add_(out)
    return out

# models/blocks.py, Attention._cache.
def rotate_and_store(qkv: Tensor, q_heads: int, cos: Optional[Tensor], sin: Optional[Tensor], q_scale: Optional[Tensor],
                     k_scale: Optional[Tensor], eps: float, locations: Tensor, k_cache: Tensor, v_cache: Tensor):
    kv_heads, head_dim = k_cache.size(2), k_cache.size(3)
    heads = qkv.view(qkv.size(0), -1, head_dim)
    qk, v = heads[:, :q_heads + kv_heads], heads[:, q_heads + kv_heads:]
    if q_scale is not None and k_scale is not None:
        q = torch.rms_norm(qk[:, :q_heads], [head_dim], q_scale, eps)
        qk = torch.cat([q, torch.rms_norm(qk[:, q_heads:], [head_dim], k_scale, eps)], 1)
    if cos is not None and sin is not None:
        d = cos.size(-1)
        part = qk[:, :, :d]
        rotated = torch.addcmul(part * cos, part.roll([d // 2], [-1]), sin)
        qk = rotated if d == head_dim else torch.cat([rotated, qk[:, :, d:]], -1)
    k_cache.view(-1, kv_heads, head_dim).index_copy_(0, locations, qk[:, q_heads:])
    v_cache.view(-1, kv_heads, head_dim).index_copy_(0, locations, v)
    return qk[:, :q_heads]

# attention/torch_native.py, _gather.
def gather(cache: Tensor, pages: Optional[Tensor], first: int, length: int, rows: int):
    page_size, kv_heads, head_dim = cache.size(1), cache.size(2), cache.size(3)
    if pages is not None:
        flat = cache.view(cache.size(0), -1).index_select(0, pages.view(-1))
        return flat.view(rows, -1, kv_heads, head_dim).transpose(1, 2)
    entry, keys = kv_heads * head_dim, length * page_size
    offset = cache.storage_offset() + first * page_size * entry
    return cache.as_strided([1, kv_heads, keys, head_dim], [keys * entry, head_dim, entry, 1], offset)

# attention/torch_native.py, _decode.
def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Optional[Tensor], first: int, length: int, mask: Tensor,
           attention_scale: float):
    rows, q_heads, kv_heads, head_dim = q.size(0), q.size(1), k_cache.size(2), q.size(2)
    k, v = gather(k_cache, pages, first, length, rows), gather(v_cache, pages, first, length, rows)
    grouped = q.view(rows, kv_heads, q_heads // kv_heads, head_dim)
    out = torch.ops.aten.scaled_dot_product_attention(grouped, k, v, mask, 0.0, False, scale=attention_scale)
    return out.reshape(rows, -1)

# models/blocks.py, Attention.__call__ of decoding rows.
def attention(x: Tensor, scale: Optional[Tensor], eps: float, w_qkv: WEIGHT, b_qkv: Optional[Tensor], q_heads: int,
              cos: Optional[Tensor], sin: Optional[Tensor], q_scale: Optional[Tensor], k_scale: Optional[Tensor],
              locations: Tensor, k_cache: Tensor, v_cache: Tensor, pages: Optional[Tensor], first: int,
              length: int, mask: Tensor, attention_scale: float, w_o: WEIGHT, b_o: Optional[Tensor],
              residual: Optional[Tensor]):
    qkv = linear(x, w_qkv, b_qkv, scale, eps, "", None)
    q = rotate_and_store(qkv, q_heads, cos, sin, q_scale, k_scale, eps, locations, k_cache, v_cache)
    out = decode(q, k_cache, v_cache, pages, first, length, mask, attention_scale)
    return linear(out, w_o, b_o, None, 0.0, "", residual)

# models/blocks.py, MLP.__call__.
def mlp(x: Tensor, scale: Optional[Tensor], eps: float, w_gate_up: WEIGHT, b_gate_up: Optional[Tensor], activation: str,
        w_down: WEIGHT, b_down: Optional[Tensor], residual: Optional[Tensor]):
    hidden = linear(x, w_gate_up, b_gate_up, scale, eps, activation, None)
    return linear(hidden, w_down, b_down, None, 0.0, "", residual)

# models/decoder.py, DecoderLayer.accumulate_ of all layers: the arguments of `attention` and of `mlp`, over layers.
def layers(x: Tensor, attention_norms: List[Tensor], eps: float, w_qkv: List[WEIGHT], b_qkv: List[Optional[Tensor]],
           q_heads: int, cos: List[Optional[Tensor]], sin: List[Optional[Tensor]], q_scales: List[Optional[Tensor]],
           k_scales: List[Optional[Tensor]], locations: Tensor, k_caches: List[Tensor], v_caches: List[Tensor],
           pages: Optional[Tensor], first: int, length: int, masks: List[Tensor], attention_scale: float,
           w_o: List[WEIGHT], b_o: List[Optional[Tensor]], mlp_norms: List[Tensor], mlp_eps: float,
           w_gate_up: List[WEIGHT], b_gate_up: List[Optional[Tensor]], activation: str, w_down: List[WEIGHT],
           b_down: List[Optional[Tensor]]):
    for i in range(len(w_qkv)):
        attention(x, attention_norms[i], eps, w_qkv[i], b_qkv[i], q_heads, cos[i], sin[i], q_scales[i], k_scales[i],
                  locations, k_caches[i], v_caches[i], pages, first, length, masks[i], attention_scale, w_o[i], b_o[i], x)
        mlp(x, mlp_norms[i], mlp_eps, w_gate_up[i], b_gate_up[i], activation, w_down[i], b_down[i], x)
"""


@dataclass(frozen=True)
class ScriptWeight:
    """A linear layer's weight and bias as the functions take them."""

    order: str  # a key of _PRODUCTS
    weight: Any
    bias: Tensor | None


def script_weight(weight: CpuWeight, bias: Tensor | None) -> ScriptWeight | None:
    """The weight that `kernels.packed.pack` returned, and the bias; None if the functions cannot take it."""
    bias = None if bias is None else bias.float()
    if isinstance(weight, HalfWeight):
        return ScriptWeight("half", weight.packed, bias)
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    return ScriptWeight("onednn" if weight.is_mkldnn else "plain", weight, bias)


def script_functions(weights: Sequence[ScriptWeight | None]) -> Any | None:
    """The functions of _SOURCE for these weights, with float32 activations and caches; None if they cannot take them."""
    orders = {weight.order if weight else "" for weight in weights}
    return _compile(orders.pop()) if len(orders) == 1 and "" not in orders else None


@cache
def _compile(order: str) -> Any | None:
    if not hasattr(torch.jit, "CompilationUnit"):
        return None
    kind, product = _PRODUCTS[order]
    unit: Any = torch.jit.CompilationUnit()  # type: ignore[no-untyped-call]
    unit.define(_SOURCE.replace("WEIGHT", kind).replace("PRODUCT", product))
    return unit
