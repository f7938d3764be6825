"""The blocks of a decoder layer on one rank: attention, MLP and experts, and what they are built with.

A block returns this rank's partial sum; the layer sums over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_serve.attention.base import AttentionBackend, AttentionSpec
from spmd_serve.distributed.collectives import Communicator
from spmd_serve.distributed.partition import Partition
from spmd_serve.kernels.fp8 import Fp8Format
from spmd_serve.kernels.packed import activation_dtype
from spmd_serve.kernels.rope_cache import Rotation, rope_and_cache, store
from spmd_serve.layers.linear import Linear
from spmd_serve.layers.moe import Experts, route
from spmd_serve.layers.norm import HeadsNorm, RMSNorm
from spmd_serve.layers.rotary import rotate
from spmd_serve.models.model_config import LayerSpec, ModelConfig
from spmd_serve.models.weights import WeightPiece

LayerKV = tuple[Tensor, Tensor]  # a layer's K and V caches, each [pages, page_size, kv_heads of this rank, head_dim]


@dataclass(frozen=True)
class DecoderContext:
    """What every layer is built with."""

    model: ModelConfig
    partition: Partition
    comm: Communicator
    attention: AttentionBackend
    dtype: torch.dtype  # of weights
    device: torch.device
    fp8: Fp8Format | None = None  # of the layers' linear weights

    @property
    def activations(self) -> torch.dtype:
        """What is computed in: `dtype`, or float32 on a CPU that has no arithmetic for it."""
        return activation_dtype(self.dtype, self.device)

    def linear(self, in_features: int, out_features: int, *, bias: bool = False) -> Linear:
        return Linear(in_features, out_features, dtype=self.dtype, device=self.device, bias=bias, fp8=self.fp8)

    def plain_linear(self, in_features: int, out_features: int) -> Linear:
        """Never quantised: the LM head and routers, whose errors cost most."""
        return Linear(in_features, out_features, dtype=self.dtype, device=self.device)

    def norm(self, size: int) -> RMSNorm:
        model = self.model
        return RMSNorm(size, eps=model.norm_eps, offset=model.norm_offset, dtype=self.activations, device=self.device)

    def heads_norm(self) -> HeadsNorm:
        model, part = self.model, self.partition
        return HeadsNorm(
            part,
            model.num_q_heads,
            model.num_kv_heads,
            model.head_dim,
            eps=model.norm_eps,
            comm=self.comm,
            dtype=self.activations,
            device=self.device,
        )


@dataclass(frozen=True)
class StepTensors:
    """What the layers need to know of a step besides the attention plan.

    Attributes:
        positions: int64 [tokens], rows of the rotary tables.
        kv_locations: int64 [tokens], where each token's K and V go: page * page_size + offset; -1 (GPU) is nowhere.
        ropes: (cos, signed sin) per ModelConfig.ropes entry, for `rotate` (CPU).
        num_decodes: the first rows, which are decoding sequences' one token each.
        kept: int64 [kept], the rows that go on behind this layer's attention; None means all.
    """

    positions: Tensor
    kv_locations: Tensor
    ropes: tuple[tuple[Tensor, Tensor], ...]
    num_decodes: int
    kept: Tensor | None = None

    def keep(self, x: Tensor) -> Tensor:
        """The rows of x that are kept."""
        return x if self.kept is None else x[self.kept]

    def without_decodes(self) -> StepTensors:
        """The rows of the prefill chunks alone (GPU: without ropes)."""
        n = self.num_decodes
        return StepTensors(self.positions[n:], self.kv_locations[n:], (), 0)


class Attention:
    """Projections, rotary embedding, cache write and attention of one layer."""

    def __init__(self, ctx: DecoderContext, layer: LayerSpec, rope_table: Tensor | None, prefix: str) -> None:
        model, part = ctx.model, ctx.partition
        self._ctx = ctx
        self.layer = layer
        self._rope_table = rope_table
        self._prefix = prefix
        self._q_heads, self._kv_heads, self._head_dim = len(part.q_heads), len(part.kv_heads), model.head_dim
        scale = model.attn_scale if model.attn_scale is not None else model.head_dim**-0.5
        self.spec = AttentionSpec(scale=scale, window=layer.window, softcap=model.attn_softcap)
        rows = (self._q_heads + 2 * self._kv_heads) * self._head_dim
        self.qkv = ctx.linear(model.hidden_size, rows, bias=model.qkv_bias)
        # The output bias is added once, by rank 0.
        self.o = ctx.linear(self._q_heads * self._head_dim, model.hidden_size, bias=model.o_bias and part.rank == 0)
        self.q_norm = ctx.norm(model.head_dim) if model.qk_norm == "head" else None
        self.k_norm = ctx.norm(model.head_dim) if model.qk_norm == "head" else None
        self.heads_norm = ctx.heads_norm() if model.qk_norm == "full" else None

    def __call__(
        self,
        x: Tensor,
        step: StepTensors,
        kv: LayerKV,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        following: RMSNorm | None = None,
    ) -> Tensor:
        """norm(x): [tokens, hidden] -> this rank's partial sum, [step's kept, hidden]; added to `residual` if given.

        following: see Linear. Collective where the model norms over all heads.
        """
        out = step.keep(self.attend(self.project(x, norm=norm), step, kv))
        return self.output(out, residual=residual, following=following)

    def project(self, x: Tensor, *, norm: RMSNorm | None = None) -> Tensor:
        """Q, K and V of norm(x): [tokens, (q_heads + 2 * kv_heads) * head_dim]. Collective as the whole."""
        qkv = self.qkv(x, norm=norm) if self._q_heads else x[:, :0]
        return qkv if self.heads_norm is None else self.heads_norm(qkv)

    def output(self, out: Tensor, *, residual: Tensor | None = None, following: RMSNorm | None = None) -> Tensor:
        """out: [tokens, q_heads, head_dim] -> this rank's partial sum, [tokens, hidden]."""
        if self._q_heads == 0:
            return out.new_zeros(len(out), self._ctx.model.hidden_size)
        return self.o(out.view(len(out), -1), residual=residual, following=following)

    def attend(self, qkv: Tensor, step: StepTensors, kv: LayerKV) -> Tensor:
        """K and V into the cache, and each row's attention: [tokens, q_heads, head_dim]."""
        attention = self._ctx.attention
        if self._q_heads == 0:
            return qkv
        if not attention.fuses_decode:
            cache = self._cache_gpu if qkv.is_cuda else self._cache
            return attention.attend(cache(qkv, step, kv), *kv, self.spec)
        decodes = step.num_decodes
        rotation = self._rotation(step.positions[:decodes])
        if decodes == qkv.shape[0]:
            return attention.decode(qkv, rotation, *kv, self.spec)
        out = qkv.new_empty(qkv.shape[0], self._q_heads, self._head_dim)
        q = self._cache_gpu(qkv[decodes:], step.without_decodes(), kv)
        attention.attend(q, *kv, self.spec, out[decodes:])
        if decodes:
            attention.decode(qkv[:decodes], rotation, *kv, self.spec, out[:decodes])
        return out

    def _cache(self, qkv: Tensor, step: StepTensors, kv: LayerKV) -> Tensor:
        """QK-norm, rotation, K and V into the cache; returns q, [tokens, q_heads, head_dim]."""
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        split = self._q_heads + self._kv_heads
        qk, v = heads[:, :split], heads[:, split:]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : self._q_heads]), self.k_norm(qk[:, self._q_heads :])), dim=1)
        if self.layer.rope is not None:
            qk = rotate(qk, *step.ropes[self.layer.rope])
        store(kv[0], step.kv_locations, qk[:, self._q_heads :])
        store(kv[1], step.kv_locations, v)
        return qk[:, : self._q_heads]

    def _cache_gpu(self, qkv: Tensor, step: StepTensors, kv: LayerKV) -> Tensor:
        """`_cache` in one kernel."""
        return rope_and_cache(qkv, self._rotation(step.positions), step.kv_locations, *kv)

    def _rotation(self, positions: Tensor) -> Rotation:
        return Rotation(
            positions,
            rope_table=self._rope_table,
            q_scale=None if self.q_norm is None else self.q_norm.scale,
            k_scale=None if self.k_norm is None else self.k_norm.scale,
            eps=self._ctx.model.norm_eps,
        )

    def pack(self) -> None:
        self.qkv.pack()
        self.o.pack()

    def pieces(self) -> Iterator[WeightPiece]:
        model, part, d = self._ctx.model, self._ctx.partition, self._head_dim
        q_rows, kv_rows = _scaled(part.q_heads, d), _scaled(part.kv_heads, d)
        q_all, kv_all, hidden = model.num_q_heads * d, model.num_kv_heads * d, model.hidden_size
        parts = (("q_proj", q_rows, q_all), ("k_proj", kv_rows, kv_all), ("v_proj", kv_rows, kv_all))
        fused = "qkv_proj" if model.fused_weights else None
        yield from _column_parallel_pieces(self.qkv, self._prefix, parts, fused, hidden)
        yield from _row_parallel_pieces(self.o, f"{self._prefix}.o_proj", q_rows, (hidden, q_all), bias=model.o_bias)
        for norm, name in ((self.q_norm, "q_norm"), (self.k_norm, "k_norm")):
            if norm is not None:
                yield WeightPiece.whole(norm.weight, f"{self._prefix}.{name}.weight")
        if self.heads_norm is not None:
            for weight, name, rows, total in (
                (self.heads_norm.q_weight, "q_norm", q_rows, q_all),
                (self.heads_norm.k_weight, "k_norm", kv_rows, kv_all),
            ):
                index = slice(rows.start, rows.stop)
                yield WeightPiece(weight, f"{self._prefix}.{name}.weight", (index,), (total,))


class MLP:
    """Gated MLP over this rank's columns."""

    def __init__(self, ctx: DecoderContext, prefix: str) -> None:
        model, columns = ctx.model, ctx.partition.ffn
        self._ctx = ctx
        self._prefix = prefix
        self.gate_up = ctx.linear(model.hidden_size, 2 * len(columns), bias=model.mlp_bias)
        self.down = ctx.linear(len(columns), model.hidden_size, bias=model.mlp_bias and ctx.partition.rank == 0)

    def __call__(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        following: RMSNorm | None = None,
    ) -> Tensor:
        """norm(x): [tokens, hidden] -> this rank's partial sum, [tokens, hidden]; added to `residual` if given.

        following: see Linear.
        """
        activation = self._ctx.model.activation
        if self.down.takes_gate(x):
            return self.down(self.gate_up(x, norm=norm), gate=activation, residual=residual)
        return self.down(self.gate_up(x, norm=norm, activation=activation), residual=residual, following=following)

    def pack(self) -> None:
        self.gate_up.pack()
        self.down.pack()

    def pieces(self) -> Iterator[WeightPiece]:
        model, columns = self._ctx.model, self._ctx.partition.ffn
        total, hidden = model.intermediate_size, model.hidden_size
        parts = (("gate_proj", columns, total), ("up_proj", columns, total))
        fused = "gate_up_proj" if model.fused_weights else None
        yield from _column_parallel_pieces(self.gate_up, self._prefix, parts, fused, hidden)
        down = f"{self._prefix}.down_proj"
        yield from _row_parallel_pieces(self.down, down, columns, (hidden, total), bias=model.mlp_bias)


class MoE:
    """Router and this rank's experts, in the place of an MLP."""

    def __init__(self, ctx: DecoderContext, prefix: str) -> None:
        assert ctx.model.moe is not None
        self._ctx = ctx
        self._moe = ctx.model.moe
        self._prefix = prefix
        hidden, width = ctx.model.hidden_size, self._moe.intermediate_size
        self.router = ctx.plain_linear(hidden, self._moe.num_experts)  # whole on every rank
        activation, owned = ctx.model.activation, ctx.partition.experts
        self.experts = Experts(owned, hidden, width, activation=activation, dtype=ctx.dtype, device=ctx.device)

    def __call__(self, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        """norm(x): [tokens, hidden] -> this rank's partial sum, [tokens, hidden]; added to `residual` if given."""
        if norm is not None:
            x = norm(x)
        choice = route(self.router(x), self._moe.experts_per_token, normalize=self._moe.normalize_top_k)
        out = self.experts(x, *choice)
        return out if residual is None else residual.add_(out)

    def pack(self) -> None:
        self.router.pack()
        self.experts.pack()

    def pieces(self) -> Iterator[WeightPiece]:
        """Experts of other ranks have empty targets: nothing is read of them, but they must be in the checkpoint."""
        hidden, width, owned = self._ctx.model.hidden_size, self._moe.intermediate_size, self._ctx.partition.experts
        yield WeightPiece(self.router.weight, f"{self._prefix}.gate.weight", (), (self._moe.num_experts, hidden))
        nothing = self.experts.down.new_empty(0)
        for expert in range(self._moe.num_experts):
            gate = up = down = nothing
            if expert in owned:
                gate, up = self.experts.gate_up[expert - owned.start].chunk(2)
                down = self.experts.down[expert - owned.start]
            name = f"{self._prefix}.experts.{expert}"
            yield WeightPiece(gate, f"{name}.gate_proj.weight", (), (width, hidden))
            yield WeightPiece(up, f"{name}.up_proj.weight", (), (width, hidden))
            yield WeightPiece(down, f"{name}.down_proj.weight", (), (hidden, width))


def _scaled(units: range, size: int) -> range:
    """Heads -> rows."""
    return range(units.start * size, units.stop * size)


def _column_parallel_pieces(
    linear: Linear, prefix: str, parts: Sequence[tuple[str, range, int]], fused: str | None, in_features: int
) -> Iterator[WeightPiece]:
    """The weights of a layer that holds several of the checkpoint's, one below the other.

    Args:
        parts: the name of each, the rows that this rank owns, and how many there are.
        fused: the name of all together, where the checkpoint has them so.
    """
    start = offset = 0
    everything = sum(total for _, _, total in parts)
    for name, owned, total in parts:
        source, first, rows = (name, 0, total) if fused is None else (fused, offset, everything)
        target, index = slice(start, start + len(owned)), slice(first + owned.start, first + owned.stop)
        yield WeightPiece(linear.weight[target], f"{prefix}.{source}.weight", (index,), (rows, in_features))
        if linear.bias is not None:
            yield WeightPiece(linear.bias[target], f"{prefix}.{source}.bias", (index,), (rows,))
        start += len(owned)
        offset += total


def _row_parallel_pieces(
    linear: Linear, source: str, columns: range, shape: tuple[int, int], *, bias: bool
) -> Iterator[WeightPiece]:
    """The weights of a layer that owns `columns` of the checkpoint's. bias: the checkpoint has one, which rank 0 adds."""
    index = (slice(None), slice(columns.start, columns.stop))
    yield WeightPiece(linear.weight, f"{source}.weight", index, shape)
    if bias:
        target = torch.empty(0) if linear.bias is None else linear.bias
        yield WeightPiece(target, f"{source}.bias", (), shape[:1])
