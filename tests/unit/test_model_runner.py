"""The runner against transformers: a tiny random Llama, in float32, driven by hand-written batches."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import TINY_LLAMA
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from spmd_serve.attention.torch_native import TorchAttention
from spmd_serve.distributed.collectives import Communicator
from spmd_serve.engine.build import partition_of
from spmd_serve.engine.grammar import Grammars
from spmd_serve.engine.model_runner import ModelRunner, RunnerLimits
from spmd_serve.models.blocks import DecoderContext
from spmd_serve.models.decoder import Decoder, DecoderLayer
from spmd_serve.models.weights import load_weights, open_source
from spmd_serve.types import NewRow, PrefillChunk, SamplingParams, ScheduledBatch


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=80,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim > 1 else 1.0)
    model.save_pretrained(folder)
    return model, folder


def make_runner(folder: Path, page_size: int, max_num_seqs: int = 4, tokenizer: Path | None = None) -> ModelRunner:
    comm = Communicator()
    partition = partition_of(TINY_LLAMA, comm)
    attention = TorchAttention()
    device = torch.device("cpu")
    decoder = Decoder(DecoderContext(TINY_LLAMA, partition, comm, attention, torch.float32, device), 128)
    load_weights(decoder.pieces(), open_source(folder, TINY_LLAMA, "auto"), progress=False)
    limits = RunnerLimits(page_size, max_num_seqs, 128, 64)
    grammars = Grammars(tokenizer or folder, TINY_LLAMA.vocab_size, TINY_LLAMA.eos_token_ids)
    runner = ModelRunner(TINY_LLAMA, partition, decoder, attention, comm, limits, grammars, torch.float32, device)
    runner.allocate(512)
    return runner


class Driver:
    """Plays the scheduler: gives each sequence its own pages and feeds batches."""

    def __init__(self, runner: ModelRunner, page_size: int) -> None:
        self.runner = runner
        self.page_size = page_size
        self.tokens: dict[int, array[int]] = {}
        self.next_page = 7
        self.have: dict[int, int] = {}
        self.done: dict[int, int] = {}
        self.step = 0

    def start(self, slot: int, prompt: list[int], params: SamplingParams) -> NewRow:
        self.tokens[slot] = array("i", prompt)
        self.have[slot] = self.done[slot] = 0
        return NewRow(slot, slot, params, self.tokens[slot], len(prompt), len(prompt), 0)

    def pages(self, slot: int, end: int) -> list[tuple[int, int, list[int]]]:
        need = -(-end // self.page_size) - self.have[slot]
        if need <= 0:
            return []
        # Every other page, so that no run of pages is contiguous by accident.
        new = [self.next_page + 2 * i for i in range(need)]
        self.next_page += 2 * need
        first, self.have[slot] = self.have[slot], self.have[slot] + need
        return [(slot, first, new)]

    def run(self, decodes: list[int], chunks: dict[int, int], new: list[NewRow]) -> None:
        """`chunks`: slot -> tokens to prefill."""
        writes, pieces = [], []
        for slot in decodes:
            writes += self.pages(slot, self.done[slot] + 1)
            self.done[slot] += 1
        for slot, count in chunks.items():
            start = self.done[slot]
            self.done[slot] += count
            writes += self.pages(slot, start + count)
            samples = self.done[slot] == len(self.tokens[slot])
            pieces.append(PrefillChunk(slot, start, self.tokens[slot][start : start + count], samples))
        batch = ScheduledBatch(self.step, decodes, pieces, new, writes)
        self.step += 1
        result = self.runner.launch(batch).wait()
        sampled = decodes + [c.slot for c in pieces if c.samples]
        for slot, token in zip(sampled, result.tokens, strict=True):
            self.tokens[slot].append(token)
        self.result = result


def greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return out[0].tolist()


@pytest.mark.parametrize(("page_size", "norms_ahead"), [(1, False), (16, False), (16, True)])
def test_chunks_decodes_and_mixtures_equal_transformers(
    reference: tuple[LlamaForCausalLM, Path], page_size: int, norms_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if norms_ahead:  # a GPU's way with some tens of tokens
        monkeypatch.setattr(DecoderLayer, "takes_following", lambda self, x: True)
    model, folder = reference
    driver = Driver(make_runner(folder, page_size), page_size)
    params = SamplingParams(max_tokens=10, temperature=0.0)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 211, (n,), generator=generator).tolist() for n in (37, 5, 1)]
    driver.run([], {0: 20}, [driver.start(0, prompts[0], params)])
    driver.run([], {0: 17, 1: 5}, [driver.start(1, prompts[1], params)])
    driver.run([0, 1], {2: 1}, [driver.start(2, prompts[2], params)])
    for _ in range(6):
        driver.run([1, 0, 2], {}, [])
    for slot, prompt in enumerate(prompts):
        got = driver.tokens[slot].tolist()
        assert got == greedy(model, prompt, len(got) - len(prompt))


@pytest.mark.parametrize(("page_size", "pages"), [(1, 24), (16, 4), (16, 64)])
def test_warming_up_fits_and_leaves_no_trace(
    reference: tuple[LlamaForCausalLM, Path], page_size: int, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = reference
    runner = make_runner(folder, page_size)
    steps: list[ScheduledBatch] = []
    launch = runner.launch
    monkeypatch.setattr(runner, "launch", lambda batch: steps.append(batch) or launch(batch))
    runner.allocate(pages)
    runner._warm_up(pages)
    assert any(step.chunks and step.decode_slots for step in steps)
    assert max(page for step in steps for _, _, ids in step.page_writes for page in ids) < pages
    runner.allocate(512)
    driver = Driver(runner, page_size)
    prompt = [5, 9, 17]
    driver.run([], {0: 3}, [driver.start(0, prompt, SamplingParams(max_tokens=10, temperature=0.0))])
    for _ in range(4):
        driver.run([0], {}, [])
    assert driver.tokens[0].tolist() == greedy(model, prompt, 5)


def test_logprobs_equal_transformers(reference: tuple[LlamaForCausalLM, Path]) -> None:
    model, folder = reference
    driver = Driver(make_runner(folder, 16), 16)
    prompt = list(range(3, 30))
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, prompt_logprobs=2)
    driver.run([], {0: 10}, [driver.start(0, prompt, params)])
    found = driver.result.prompt_logprobs[0]
    driver.run([], {0: 17}, [])
    found = found + driver.result.prompt_logprobs[0]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert len(found) == len(prompt) - 1
    for i, entry in enumerate(found):
        torch.testing.assert_close(entry.logprob, float(expected[i, prompt[i + 1]]), atol=1e-4, rtol=0)
        assert entry.top_ids == expected[i].topk(2).indices.tolist()
        assert entry.rank == 1 + int((expected[i] > expected[i, prompt[i + 1]]).sum())
    sampled = driver.result.logprobs[0]
    torch.testing.assert_close(sampled.top_logprobs, expected[-1].topk(3).values.tolist(), atol=1e-4, rtol=0)
    assert sampled.rank == 1 and sampled.top_ids[0] == driver.tokens[0][-1]


def test_processors_change_what_is_drawn(reference: tuple[LlamaForCausalLM, Path]) -> None:
    model, folder = reference
    prompt = list(range(3, 30))
    plain = greedy(model, prompt, 1)[-1]
    for params in (
        SamplingParams(max_tokens=1, temperature=0.0, logit_bias=((plain, -100.0),)),
        SamplingParams(max_tokens=1, temperature=0.0, stop_token_ids=(plain,), min_tokens=1),
    ):
        driver = Driver(make_runner(folder, 16), 16)
        driver.run([], {0: 27}, [driver.start(0, prompt, params)])
        assert driver.tokens[0][-1] != plain
    driver = Driver(make_runner(folder, 16), 16)
    params = SamplingParams(max_tokens=20, temperature=0.0, presence_penalty=100.0)
    driver.run([], {0: 27}, [driver.start(0, prompt, params)])
    for _ in range(19):
        driver.run([0], {}, [])
    output = driver.tokens[0][27:].tolist()
    assert len(set(output)) == len(output), "a token that was there is penalised beyond reach"


@pytest.mark.parametrize("extra", [{"min_tokens": 5}, {"ignore_eos": True}])
def test_a_grammar_from_another_folder_writes_its_text_and_says_that_it_ended(
    reference: tuple[LlamaForCausalLM, Path], tmp_path: Path, extra: dict[str, Any]
) -> None:
    """The model's folder has no tokenizer; the other one has a letter for each of the ids 3 to 28."""
    ids = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(ord("a") + i): 3 + i for i in range(26)}
    letters = Tokenizer(models.BPE(ids, []))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    letters.save(str(tmp_path / "tokenizer.json"))
    driver = Driver(make_runner(reference[1], 16, tokenizer=tmp_path), 16)
    params = SamplingParams(max_tokens=20, temperature=0.0, grammar="start: /yes/", **extra)
    driver.run([], {0: 3, 1: 3}, [driver.start(0, [3, 4, 5], params), driver.start(1, [3, 4, 5], params)])
    ends = [driver.result.grammar_ends]
    for _ in range(3):
        driver.run([1, 0], {}, [])
        ends.append(driver.result.grammar_ends)
    for slot in (0, 1):
        assert driver.tokens[slot].tolist() == [3, 4, 5, ids["y"], ids["e"], ids["s"], 2]
    assert ends == [{}, {}, {}, {0: "", 1: ""}]
    bare = Driver(make_runner(reference[1], 16), 16)
    bare.run([], {0: 3}, [bare.start(0, [3, 4, 5], params)])
    assert "has no tokenizer.json" in bare.result.grammar_ends[0]
