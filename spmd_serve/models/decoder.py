"""One decoder for the Llama family and its relatives; what differs between families is in ModelConfig. Its blocks: blocks.py.

The decoder holds one rank's shard. Two all-reduces per layer (after attention and after the MLP) make the hidden state
equal on all ranks; logits stay sharded over the vocabulary.

`DecoderLayer.__call__` says what a layer computes. Where ModelConfig.only_adds, steps may go through the layers in other ways,
which give the same with fewer kernels; `Decoder.__call__` takes the first that fits:

    ScriptedLayers.decode_  CPUs that compute in float32, decoding rows alone: TorchScript, in scripted_layers.py
    accumulate_ahead_       one GPU, few tokens, neither experts nor FP8: a linear layer takes in the add and the norm after it
    accumulate_halves_      GPUs with copy engines to sum by, large prefills: one half's sum beside the other half's products
    accumulate_             one rank, or GPUs whose sums add as well: linear layers take in the norm before them and the add
    __call__                all others
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spmd_serve.layers.embedding import Embedding
from spmd_serve.layers.linear import Linear
from spmd_serve.layers.norm import RMSNorm
from spmd_serve.layers.rotary import rope_factors, rope_table
from spmd_serve.models.blocks import MLP, Attention, DecoderContext, LayerKV, MoE, StepTensors
from spmd_serve.models.scripted_layers import ScriptedLayers, script_layers
from spmd_serve.models.weights import WeightPiece


class DecoderLayer:
    """Attention and MLP with their norms and residual adds."""

    def __init__(self, ctx: DecoderContext, index: int, rope_tables: list[Tensor]) -> None:
        model = ctx.model
        layer = model.layers[index]
        self._ctx = ctx
        self._prefix = f"model.layers.{index}"
        table = None if layer.rope is None else rope_tables[layer.rope]
        self.attention = Attention(ctx, layer, table, f"{self._prefix}.self_attn")
        self.mlp = (MoE if layer.moe else MLP)(ctx, f"{self._prefix}.mlp")
        # Names as in Hugging Face's checkpoints: with post-norms, "post_attention_layernorm" is the norm of the
        # attention's output; without them it is the norm before the MLP.
        hidden = model.hidden_size
        self.attention_pre = ctx.norm(hidden) if model.pre_norms else None
        self.mlp_pre = ctx.norm(hidden) if model.pre_norms else None
        self.attention_post = ctx.norm(hidden) if model.post_norms else None
        self.mlp_post = ctx.norm(hidden) if model.post_norms else None

    def __call__(self, x: Tensor, residual: Tensor | None, step: StepTensors, kv: LayerKV) -> tuple[Tensor, Tensor]:
        """x: the last block's output, [tokens, hidden], not yet added to `residual`. Returns the same two, of the kept rows.

        Collective (twice).
        """
        comm = self._ctx.comm
        x, residual = _add_norm(x, residual, self.attention_pre)
        x, residual = comm.all_reduce(self.attention(x, step, kv)), step.keep(residual)
        if self.attention_post is not None:
            x = self.attention_post(x)
        x, residual = _add_norm(x, residual, self.mlp_pre)
        x = comm.all_reduce(self.mlp(x))
        if self.mlp_post is not None:
            x = self.mlp_post(x)
        return x, residual

    @property
    def can_accumulate(self) -> bool:
        """Whether a block's output goes straight into the residual stream, and linear layers can take the norms in."""
        norm = self.attention_pre
        return self._ctx.model.only_adds and norm is not None and norm.scale.dtype == self._ctx.activations

    def accumulate_(self, stream: Tensor, step: StepTensors, kv: LayerKV) -> Tensor:
        """The layer with norms and residual adds inside other kernels. Collective (twice).

        Updates the residual stream and returns it; where not all rows are kept, returns a stream of those.
        """
        comm = self._ctx.comm
        kept = step.keep(stream)
        if comm.world_size == 1:
            self.attention(stream, step, kv, norm=self.attention_pre, residual=kept)
            self.mlp(kept, norm=self.mlp_pre, residual=kept)
        else:
            comm.all_reduce_add_(self.attention(stream, step, kv, norm=self.attention_pre), kept)
            comm.all_reduce_add_(self.mlp(kept, norm=self.mlp_pre), kept)
        return kept

    def accumulate_halves_(
        self, halves: Sequence[Tensor], sums: Sequence[Callable[[], object]], step: StepTensors, kv: LayerKV
    ) -> list[Callable[[], object]]:
        """`accumulate_` of all rows in two halves: while the sum over ranks of one is on its way, the other's products run.

        halves: of the residual stream. sums: to be called before a half is read; returns those that this layer leaves.
        """
        comm, attention = self._ctx.comm, self.attention
        projected = []
        for half, add in zip(halves, sums, strict=True):
            add()
            projected.append(attention.project(half, norm=self.attention_pre))
        outs = attention.attend(torch.cat(projected), step, kv).tensor_split(2)
        sums = [comm.start_all_reduce_add_(attention.output(out), half) for out, half in zip(outs, halves, strict=True)]
        left = []
        for half, add in zip(halves, sums, strict=True):
            add()
            left.append(comm.start_all_reduce_add_(self.mlp(half, norm=self.mlp_pre), half))
        return left

    def takes_following(self, x: Tensor) -> bool:
        """Whether `accumulate_ahead_` is better than `accumulate_` for as many tokens as x has."""
        mlp = self.mlp
        if self._ctx.comm.world_size > 1 or not self.can_accumulate or not isinstance(mlp, MLP):
            return False
        return self.attention.o.takes_following(x) and mlp.down.takes_following(x)

    def accumulate_ahead_(
        self, stream: Tensor, normed: Tensor, step: StepTensors, kv: LayerKV, following: RMSNorm
    ) -> Tensor:
        """The layer with residual add and the norm after it in one kernel.

        normed: the norm of the residual stream that this layer takes; returns `following`'s, that of the next layer. Where
        not all rows are kept, the stream is not of use any more.
        """
        assert isinstance(self.mlp, MLP)
        stream = step.keep(stream)
        normed = self.attention(normed, step, kv, residual=stream, following=self.mlp_pre)
        return self.mlp(normed, residual=stream, following=following)

    def linears(self) -> tuple[Linear | None, ...]:
        """qkv, o, gate_up, down; None in the place of experts."""
        mlp = (self.mlp.gate_up, self.mlp.down) if isinstance(self.mlp, MLP) else (None, None)
        return self.attention.qkv, self.attention.o, *mlp

    def pieces(self) -> Iterator[WeightPiece]:
        yield from self.attention.pieces()
        yield from self.mlp.pieces()
        has_post = self._ctx.model.post_norms
        for norm, name in (
            (self.attention_pre, "input_layernorm"),
            (self.mlp_pre, "pre_feedforward_layernorm" if has_post else "post_attention_layernorm"),
            (self.attention_post, "post_attention_layernorm"),
            (self.mlp_post, "post_feedforward_layernorm"),
        ):
            if norm is not None:
                yield WeightPiece.whole(norm.weight, f"{self._prefix}.{name}.weight")


LayerStep = tuple[DecoderLayer, StepTensors, LayerKV]  # a layer, what it needs to know of the step, and its caches


class Decoder:
    """The whole model on one rank."""

    def __init__(self, ctx: DecoderContext, max_len: int) -> None:
        model, part = ctx.model, ctx.partition
        self._ctx = ctx
        self.embedding = Embedding(part.vocab, model.hidden_size, dtype=ctx.dtype, device=ctx.device, comm=ctx.comm)
        short = model.short_context(max_len)
        self._rope_tables = [rope_table(rope, model.head_dim, max_len, short, ctx.device) for rope in model.ropes]
        # Rounded to the compute type, as the models were trained.
        self._embed_scale = float(torch.tensor(model.embed_scale, dtype=ctx.dtype))
        self.layers = [DecoderLayer(ctx, i, self._rope_tables) for i in range(model.num_layers)]
        self.norm = ctx.norm(model.hidden_size)
        self._scripted: ScriptedLayers | None = None  # made by `pack`
        self.lm_head = ctx.plain_linear(model.hidden_size, len(part.vocab))
        if model.tie_embeddings:
            self.lm_head.weight = self.embedding.weight

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self._ctx.dtype

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv_locations: Tensor,
        num_decodes: int,
        kv: list[LayerKV],
        kept: Tensor | None = None,
    ) -> Tensor:
        """tokens, positions, kv_locations: int64 [tokens] -> hidden states after the last norm, [tokens, hidden].

        positions: rows of the rotary tables. For sequences with more tokens than the model's short context: position + short context.

        kept: int64 [kept], at least one: only these rows are returned, [kept, hidden]. Behind the last layer's attention
        nothing else needs the others.

        The attention backend must have planned the step. Collective.
        """
        tables = () if positions.is_cuda else self._rope_tables
        ropes = tuple(rope_factors(table, positions, self._ctx.activations) for table in tables)
        step = StepTensors(positions, kv_locations, ropes, num_decodes)
        x = self.embedding(tokens).to(self._ctx.activations)
        if self._ctx.model.embed_scale != 1.0:
            x = x * self._embed_scale
        if kept is None and self._scripted is not None and self._scripted.decode_(x, step, kv):
            return self.norm(x)
        steps = [step] * (len(self.layers) - 1) + [replace(step, kept=kept)]
        layers = list(zip(self.layers, steps, kv, strict=True))
        if all(layer.takes_following(x) for layer in self.layers):
            return self._accumulate_ahead_(x, layers)
        if self.layers[0].can_accumulate and self._ctx.comm.adds_at_once(x):
            return self._accumulate_(x, layers)
        residual: Tensor | None = None
        for layer, layer_step, caches in layers:
            x, residual = layer(x, residual, layer_step, caches)
        return _add_norm(x, residual, self.norm)[0]

    def _accumulate_ahead_(self, x: Tensor, layers: Sequence[LayerStep]) -> Tensor:
        """The last `layers` by `accumulate_ahead_`, and the norm after them. Writes into the residual stream x."""
        following = [layer.attention_pre for layer, _, _ in layers[1:]] + [self.norm]
        normed = _add_norm(x, None, layers[0][0].attention_pre)[0]
        for (layer, step, caches), norm in zip(layers, following, strict=True):
            assert norm is not None
            normed = layer.accumulate_ahead_(x, normed, step, caches, norm)
        return normed

    def _accumulate_(self, x: Tensor, layers: Sequence[LayerStep]) -> Tensor:
        """All layers by `accumulate_` or in halves, and the norm after them. Writes into the residual stream x.

        Where the last layer keeps few rows, it may go ahead alone.
        """
        last_step = layers[-1][1]
        if last_step.num_decodes < len(x) and self._ctx.comm.overlaps(x):
            # Where all rows are kept, to the end: whole, the last layer would take memory that no other step does.
            in_halves = layers if last_step.kept is None else layers[:-1]
            halves, sums = x.tensor_split(2), [_nothing] * 2
            for layer, step, caches in in_halves:
                sums = layer.accumulate_halves_(halves, sums, step, caches)
            for add in sums:
                add()
            layers = layers[len(in_halves) :]
        for layer, step, caches in layers:
            if step.kept is not None and layer.takes_following(x[: len(step.kept)]):  # the last one
                return self._accumulate_ahead_(x, layers[-1:])
            x = layer.accumulate_(x, step, caches)
        return self.norm(x)

    def pack(self) -> None:
        """Once, after loading: bring the weights into the order that the linear layers are fastest with.

        A tied LM head then has a copy of its own: lookups need the plain rows.
        """
        for layer in self.layers:
            layer.attention.pack()
            layer.mlp.pack()
        self.lm_head.pack()
        self._scripted = script_layers(self._ctx, self.layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] -> [rows, vocabulary rows of this rank], in the compute type or float32."""
        logits = self.lm_head(hidden)
        cap = self._ctx.model.final_softcap
        return logits if cap is None else torch.tanh(logits.float() / cap) * cap

    def pieces(self) -> Iterator[WeightPiece]:
        """All parameters and where they come from."""
        model, vocab = self._ctx.model, self._ctx.partition.vocab
        rows = slice(vocab.start, vocab.stop)
        shape = (model.vocab_size, model.hidden_size)
        yield WeightPiece(self.embedding.weight, "model.embed_tokens.weight", (rows,), shape)
        for layer in self.layers:
            yield from layer.pieces()
        yield WeightPiece.whole(self.norm.weight, "model.norm.weight")
        if not model.tie_embeddings:
            yield WeightPiece(self.lm_head.weight, "lm_head.weight", (rows,), shape)


def _nothing() -> object:
    return None


def _add_norm(x: Tensor, residual: Tensor | None, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual); without a norm the sum itself stands for both."""
    if residual is None:
        return (x if norm is None else norm(x)), x
    if norm is None:
        residual = residual + x
        return residual, residual
    return norm.add(x, residual)
