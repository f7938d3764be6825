"""How far a 16-bit engine may be from transformers in float32: as far as transformers itself is in 16 bits.

What the engine rounds beyond bfloat16 (FP8 weights' inputs, FP8 keys and values) is rounded in the 16-bit model too, so
that every bound follows from what is computed, not from a guess.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_serve.kernels.fp8 import FP8, FP8_MAX, Fp8Format, Fp8Weight
from spmd_serve.kernels.gumbel import gumbel_noise, row_key, uniforms
from spmd_serve.llm import Generation

NEAR = 1.5  # times the reference's own largest error: for one value
BEST = 10  # tokens of each place that may be the greedy one
TYPICAL = 2.0  # times the reference's own mean error: for the mean of MANY values or more
MANY = 100


class Reference:
    """transformers on a folder's weights, in float32 and as it rounds.

    Args:
        fp8_weights: the layers' linear weights are what FP8 makes of them, and the rounding model's inputs to them FP8.
        fp8_kv: the rounding model's keys and values are FP8.

    Attributes:
        error: the largest difference of both models' log-probabilities in all sequences so far.
        outliers: share of values that no bound holds for. A mixture of experts has some: where two experts are nearly equal,
            rounding decides which one is asked.
    """

    def __init__(self, folder: Path, device: str, *, fp8_weights: bool = False, fp8_kv: bool = False) -> None:
        self.error = 0.0
        self._best_errors: list[Tensor] = []  # of each place's BEST tokens
        self.outliers = 0.01 if _is_mixture(folder) else 0.0
        self._device = device
        self._fp8_kv = fp8_kv
        self._models = [_load(folder, dtype, device) for dtype in (torch.float32, torch.bfloat16)]
        self._known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        if fp8_weights:
            for model, rounds in zip(self._models, (False, True), strict=True):
                _quantize(model, rounds)

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """The float32 log-probabilities of what follows each token: [tokens, vocabulary]."""
        return self._both(tokens)[0]

    def errors(self, tokens: Sequence[int]) -> Tensor:
        """By how much the log-probabilities of the tokens themselves differ, from the second one on: [tokens - 1]."""
        exact, rounded = self._both(tokens)
        return (exact - rounded)[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0].abs()

    def _both(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        key = tuple(tokens)
        if key not in self._known:
            exact, rounded = (self._run(model, tokens) for model in self._models)
            errors = (exact - rounded).abs()
            self.error = max(self.error, float(errors.max()))
            self._best_errors.append(errors.gather(1, exact.topk(BEST).indices).view(-1))
            self._known[key] = exact, rounded
        return self._known[key]

    def tie(self, temperature: float) -> float:
        """How far apart two tokens' scores may be for rounding to decide between them.

        Greedy tokens are among each place's best, whose errors are smaller than those of rare ones. A trained model has
        single places of large errors (its first token, say), hence not the largest error but the 99th percentile.
        """
        if temperature > 0.0 or self.outliers:
            return 2 * NEAR * self.error / (temperature or 1.0)
        return 2 * NEAR * float(torch.cat(self._best_errors).quantile(0.99))

    @torch.inference_mode()
    def _run(self, model: Any, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([tokens], device=self._device)
        more = {}
        if self._fp8_kv and model.dtype == torch.bfloat16:
            takes = inspect.signature(model.forward).parameters  # transformers 5.24 renamed it
            more["cache" if "cache" in takes else "past_key_values"] = _fp8_cache()
        return model(ids, **more).logits[0].float().log_softmax(-1).cpu()


def check(
    reference: Reference, results: Sequence[Generation], *, temperature: float = 0.0, seeds: Sequence[int] = ()
) -> None:
    """Log-probabilities that were asked for are the reference's, and so are the tokens, but for rounding."""
    expected = [reference.logprobs(result.prompt_ids + result.token_ids) for result in results]
    limit = NEAR * reference.error
    ours: list[float] = []
    theirs: list[float] = []
    wrong: list[str] = []
    count = 0
    for which, (result, rows) in enumerate(zip(results, expected, strict=True)):
        tokens = result.prompt_ids + result.token_ids
        first, own_errors = len(result.prompt_ids), reference.errors(tokens)
        assert result.token_ids, which
        asked = [(first + i, entry) for i, entry in enumerate(result.logprobs)]
        asked += [(1 + i, entry) for i, entry in enumerate(result.prompt_logprobs)]
        for place, entry in asked:
            wanted = float(rows[place - 1, tokens[place]])
            ours.append(abs(entry.logprob - wanted))
            theirs.append(float(own_errors[place - 1]))
            if not ours[-1] < limit:
                wrong.append(f"prompt {which}, token {place}: {entry.logprob:.4f} instead of {wanted:.4f}")
        for place in range(first, len(tokens)):
            scores = _scores(rows, place, temperature, seeds[which] if seeds else 0)
            lost, allowed = float(scores.max() - scores[tokens[place]]), reference.tie(temperature)
            if not lost < allowed:
                wrong.append(f"prompt {which}, token {place}: another one is better by {lost:.4f} > {allowed:.4f}")
        count += len(asked) + len(result.token_ids)
    assert len(wrong) <= reference.outliers * count, f"{len(wrong)} of {count}, limit {limit:.4f}: {wrong[:8]}"
    if len(ours) >= MANY:
        mean, bound = sum(ours) / len(ours), TYPICAL * sum(theirs) / len(theirs)
        print(
            f"error: largest {max(ours):.4f} of {limit:.4f}, mean {mean:.5f} of {bound:.5f} allowed; tie {reference.tie(0):.4f}"
        )
        assert mean < bound


def check_same(
    reference: Reference,
    ours: Sequence[Generation],
    theirs: Sequence[Generation],
    *,
    temperature: float = 0.0,
    seeds: Sequence[int] = (),
) -> list[int]:
    """Two runs have the same tokens up to where the reference's best two are within rounding, and near log-probabilities.

    Returns how many tokens of each are equal.
    """
    equal = []
    for which, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.prompt_ids == b.prompt_ids
        assert len(a.token_ids) == len(b.token_ids)
        rows = reference.logprobs(a.prompt_ids + a.token_ids)
        pairs = zip(a.token_ids, b.token_ids, strict=True)
        count = next((i for i, (x, y) in enumerate(pairs) if x != y), len(a.token_ids))
        equal.append(count)
        for i, (x, y) in enumerate(list(zip(a.logprobs, b.logprobs, strict=True))[:count]):
            assert abs(x.logprob - y.logprob) < 2 * reference.error, (which, i, x.logprob, y.logprob)
        if count < len(a.token_ids):
            scores = _scores(rows, len(a.prompt_ids) + count, temperature, seeds[which] if seeds else 0)
            best, second = scores.topk(2).values.tolist()
            limit = reference.tie(temperature)
            assert best - second < limit, (
                f"prompt {which} differs at output token {count}, where {best - second} > {limit}"
            )
    return equal


def _scores(rows: Tensor, place: int, temperature: float, seed: int) -> Tensor:
    """What the token at `place` is the argmax of."""
    if temperature == 0.0:
        return rows[place - 1]
    noise = gumbel_noise(uniforms(row_key(seed, place), 0, rows.shape[1]))
    return rows[place - 1] / temperature + torch.from_numpy(noise)


def _is_mixture(folder: Path) -> bool:
    return "num_experts_per_tok" in json.loads((folder / "config.json").read_text())


def _load(folder: Path, dtype: torch.dtype, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    # Its grouped product is for bfloat16, and its fused attention knows no soft caps.
    more = {"attn_implementation": "eager"}
    if _is_mixture(folder):
        more["experts_implementation"] = "eager"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **more).to(device).eval()


def _quantize(model: Any, rounds_inputs: bool) -> None:
    for name, layer in model.named_modules():
        if not name.endswith("_proj"):
            continue
        weight = Fp8Weight.empty(*layer.weight.shape, Fp8Format(), layer.weight.device)
        weight.quantize_(layer.weight.data)
        layer.weight.data.copy_(weight.dequantize(torch.float32))
        if rounds_inputs:
            layer.register_forward_pre_hook(lambda module, inputs: (_round(inputs[0], per_token=True),))


def _round(x: Tensor, *, per_token: bool) -> Tensor:
    """To FP8 and back, with a scale for each token or none."""
    scale = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / FP8_MAX if per_token else torch.ones(())
    scale = scale.to(x.device)
    return ((x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale).to(x.dtype)


def _fp8_cache() -> Any:
    from transformers import DynamicCache

    class Fp8Cache(DynamicCache):  # type: ignore[misc]
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            key, value = (_round(x, per_token=False) for x in (key_states, value_states))
            return super().update(key, value, *args, **kwargs)

    return Fp8Cache()
