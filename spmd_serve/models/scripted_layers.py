"""The decoder's layers in steps of decoding rows on a CPU, by kernels/scripted.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spmd_serve.attention.torch_native import TorchAttention
from spmd_serve.kernels.scripted import ScriptWeight, script_functions

if TYPE_CHECKING:
    from spmd_serve.models.blocks import DecoderContext, StepTensors
    from spmd_serve.models.decoder import DecoderLayer


class ScriptedLayers:
    """All layers of a dense model with float32 activations whose blocks only add to the residual stream.

    Args:
        functions: of kernels/scripted.py, for the order of the weights.
        weights: of each layer: qkv, o, gate_up, down.
    """

    def __init__(
        self,
        ctx: DecoderContext,
        attention: TorchAttention,
        layers: Sequence[DecoderLayer],
        functions: Any,
        weights: Sequence[Sequence[ScriptWeight]],
    ) -> None:
        self._comm = ctx.comm
        self._attention = attention
        self._functions = functions
        self._eps = ctx.model.norm_eps
        self._activation = ctx.model.activation
        self._q_heads = len(ctx.partition.q_heads)
        self._specs = [layer.attention.spec for layer in layers]
        self._ropes = [layer.attention.layer.rope for layer in layers]
        self._attention_norms = [layer.attention_pre.scale for layer in layers if layer.attention_pre]
        self._mlp_norms = [layer.mlp_pre.scale for layer in layers if layer.mlp_pre]
        self._q_scales = [None if (norm := layer.attention.q_norm) is None else norm.scale for layer in layers]
        self._k_scales = [None if (norm := layer.attention.k_norm) is None else norm.scale for layer in layers]
        orders = [([w.weight for w in of_all], [w.bias for w in of_all]) for of_all in zip(*weights, strict=True)]
        self._qkv, self._o, self._gate_up, self._down = orders

    def decode_(self, stream: Tensor, step: StepTensors, kv: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Update the residual stream, [tokens, hidden], by all layers. Collective.

        Returns:
            False, with nothing done, for a step of another kind: chunks of prompts, rows of very different lengths, a KV
            cache of another type.
        """
        k_caches, v_caches = (list(caches) for caches in zip(*kv, strict=True))
        _, page_size, _, _ = k_caches[0].shape
        plans = {spec: self._attention.scripted_decode(spec, page_size) for spec in set(self._specs)}
        pages = next(iter(plans.values()))
        if pages is None or k_caches[0].dtype != torch.float32:
            return False
        masks = [plan.mask for spec in self._specs if (plan := plans[spec]) is not None]
        turns = [(None, None) if rope is None else step.ropes[rope] for rope in self._ropes]
        # The arguments of the function `attention`, each a list over the layers or the same for all.
        attention = (
            self._attention_norms, self._eps, *self._qkv, self._q_heads,
            [cos for cos, _ in turns], [sin for _, sin in turns], self._q_scales, self._k_scales,
            step.kv_locations, k_caches, v_caches, pages.pages, pages.first, pages.length, masks, self._specs[0].scale,
            *self._o,
        )  # fmt: skip
        mlp = (self._mlp_norms, self._eps, *self._gate_up, self._activation, *self._down)
        if self._comm.world_size == 1:
            self._functions.layers(stream, *attention, *mlp)
        else:
            for i in range(len(self._specs)):
                stream += self._comm.all_reduce(self._functions.attention(stream, *_of_layer(attention, i), None))
                stream += self._comm.all_reduce(self._functions.mlp(stream, *_of_layer(mlp, i), None))
        return True


def script_layers(ctx: DecoderContext, layers: Sequence[DecoderLayer]) -> ScriptedLayers | None:
    """The layers, with their weights packed, as ScriptedLayers; None where those cannot stand for them."""
    model, attention = ctx.model, ctx.attention
    if not ctx.partition.q_heads:  # a rank beyond the last head has no attention to compute
        return None
    if not model.only_adds or model.qk_norm == "full":
        return None
    if ctx.activations != torch.float32 or not isinstance(attention, TorchAttention):
        return None
    weights = [[linear.script_weight if linear else None for linear in layer.linears()] for layer in layers]
    functions = script_functions([weight for of_layer in weights for weight in of_layer])
    if functions is None:
        return None
    known = [[weight for weight in of_layer if weight is not None] for of_layer in weights]
    return ScriptedLayers(ctx, attention, layers, functions, known)


def _of_layer(arguments: Sequence[Any], layer: int) -> list[Any]:
    return [argument[layer] if isinstance(argument, list) else argument for argument in arguments]
