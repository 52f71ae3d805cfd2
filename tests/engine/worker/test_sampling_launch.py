"""Sampling by the kernels as the worker launches it: no wait for the device, and the tokens of the CPU's path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pagefleet_engine.core.step import NewRow, ScheduledRow, ScheduledRows, TokenLogprobs
from pagefleet_engine.worker.prompt_logprobs import PromptLogprobs
from pagefleet_engine.worker.sampler import DeviceSamples, Sampler, SampleRows
from pagefleet_kernels import sampling
from pagefleet_kernels.dispatch import Backend
from pagefleet_protocol.sampling_params import SamplingParams
from torch import Tensor

from tests.fakes.no_host_wait import NoHostRead, NoHostWait

CPU = torch.device("cpu")
VOCAB_SIZE = 150
MIX = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3, top_p=0.9, logprobs=2),
    SamplingParams(seed=4, temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.4, presence_penalty=0.1),
    SamplingParams(
        seed=5, top_k=9, min_tokens=2, max_tokens=9, logit_bias={7: 3.0}, bad_words_token_ids=((8,), (7, 9), (9, 9))
    ),
    SamplingParams(seed=6, temperature=1.5, allowed_token_ids=tuple(range(0, 150, 5)), frequency_penalty=1.0),
]


class Slots:
    """A sampler, the tokens of its slots and how many there are."""

    def __init__(self, kernels: Backend, device: torch.device = CPU) -> None:
        self.device = device
        self.tokens_SM = torch.zeros((len(MIX), 32), dtype=torch.int32, device=device)
        self.sampler = Sampler(VOCAB_SIZE, 0, self.tokens_SM, kernels)
        self.lens = np.full(len(MIX), 4)
        self.tokens_SM[:, :4] = torch.tensor([1, 7, 9, 2], dtype=torch.int32, device=device)
        for slot, params in enumerate(MIX):
            self.sampler.add(slot, NewRow(f"r{slot}", (1, 7, 9, 2), 4, params, (5,)))

    def rows(self, slots: Sequence[int]) -> SampleRows:
        at = np.array(slots)
        lens = self.lens[at]
        self.lens[at] += 1
        return SampleRows(
            slots=at,
            slots_R=torch.from_numpy(at).to(self.device),
            lens=lens,
            lens_R=torch.from_numpy(lens.astype(np.int32)).to(self.device),
        )


def collected(samples: DeviceSamples) -> dict[int, TokenLogprobs]:
    return {} if samples.logprobs is None else samples.logprobs.collect()


def test_the_kernels_sample_as_the_cpu_does_and_never_wait() -> None:
    by_kernel, by_twin = Slots("triton"), Slots("torch")
    for step, slots in enumerate(([0, 1, 2, 3, 4], [4, 2, 3], [3, 2, 4])):
        logits_RV = torch.randn(len(slots), VOCAB_SIZE, generator=torch.Generator().manual_seed(step)) * 2
        rows = by_kernel.rows(slots)
        with NoHostRead(), NoHostWait():
            samples = by_kernel.sampler.sample(logits_RV.clone(), rows)
        expected = by_twin.sampler.sample(logits_RV, by_twin.rows(slots))
        assert samples.token_ids_R.tolist() == expected.token_ids_R.tolist()
        assert collected(samples) == collected(expected)
        assert torch.equal(by_kernel.tokens_SM, by_twin.tokens_SM)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_never_waited_for() -> None:
    device = torch.device("cuda")
    slots = Slots("triton", device)
    logits_RV = torch.randn(len(MIX), VOCAB_SIZE, device=device)
    batches = [slots.rows(range(len(MIX))), slots.rows([2, 1, 4])]
    slots.sampler.sample(logits_RV.clone(), batches[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        slots.sampler.remove(0)
        slots.sampler.add(0, NewRow("late", (1, 7), 2, MIX[2], (5,)))
        samples = slots.sampler.sample(logits_RV[:3].clone(), batches[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert min(samples.token_ids_R.tolist()) >= 0


def test_what_the_guards_refuse() -> None:
    with NoHostRead(), NoHostWait(), pytest.raises(AssertionError, match="wait"):
        torch.ones(3).nonzero()
    with NoHostRead(), NoHostWait(), pytest.raises(AssertionError, match="wait"):
        torch.ones(3).sum().item()
    with NoHostRead(), NoHostWait(), pytest.raises(AssertionError, match="wait"):
        bool(torch.ones(3).any())


def test_a_batch_runs_only_the_kernels_that_its_rows_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    for name in ("_block_maxima_kernel", "_join_blocks_kernel"):
        kernel = getattr(sampling, name)

        class Counted:
            def __init__(self, kernel: Any, name: str) -> None:
                self.kernel, self.name = kernel, name

            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                launched.append(self.name)
                return self.kernel[grid]

        monkeypatch.setattr(sampling, name, Counted(kernel, name))
    monkeypatch.setattr(sampling, "draw_truncated", lambda *_: launched.append("truncated"))
    slots = Slots("triton")
    slots.sampler.sample(torch.zeros(1, VOCAB_SIZE), slots.rows([0]))
    assert launched == ["_block_maxima_kernel", "_join_blocks_kernel"]
    slots.sampler.sample(torch.zeros(2, VOCAB_SIZE), slots.rows([0, 3]))
    assert launched[2:] == ["_block_maxima_kernel", "_join_blocks_kernel", "truncated"]


def prompts(compute_logits: Any) -> PromptLogprobs:
    described = PromptLogprobs(compute_logits, vocab_size=1 << 23)  # two rows at once
    described.add(NewRow("a", (3, 1, 4, 1, 5), 5, SamplingParams(prompt_logprobs=1), ()))
    described.add(NewRow("b", (2, 6), 2, SamplingParams(prompt_logprobs=0), ()))
    return described


ROWS = ScheduledRows.of(
    [ScheduledRow("c", 0, 1, (), True), ScheduledRow("a", 1, 4, (), True), ScheduledRow("b", 1, 1, (), True)]
)


def test_prompts_are_described_in_parts_without_a_wait() -> None:
    hidden_TD = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    sizes = []

    def compute_logits(hidden_SD: Tensor) -> Tensor:
        sizes.append(len(hidden_SD))
        return hidden_SD

    described = prompts(compute_logits)
    with NoHostRead(), NoHostWait():
        pending = described.launch(ROWS, np.array([0, 1, 5, 6]), hidden_TD)
    assert sizes == [2, 1]
    assert pending is not None
    found = pending.collect()
    assert set(found) == {"a"}
    entries = found["a"]
    assert entries is not None
    logprobs = hidden_TD[1:4].log_softmax(1)
    for row, (entry, token) in enumerate(zip(entries, (4, 1, 5), strict=True)):
        assert list(entry.token_ids) == [token, int(logprobs[row].argmax())]
        assert list(entry.logprobs) == pytest.approx([float(logprobs[row, token]), float(logprobs[row].max())])
        assert entry.rank == 1 + int((logprobs[row] > logprobs[row, token]).sum())


def test_a_prompt_whose_logits_are_no_numbers_is_named() -> None:
    hidden_TD = torch.zeros(6, 8)
    hidden_TD[3, 2] = float("nan")
    pending = prompts(lambda hidden: hidden).launch(ROWS, np.array([0, 1, 5, 6]), hidden_TD)
    assert pending is not None
    assert pending.collect() == {"a": None}


def test_a_step_without_such_prompts_has_nothing_to_read() -> None:
    described = prompts(lambda hidden: hidden)
    assert described.launch(ScheduledRows.of([ROWS[0]]), np.array([0, 1]), torch.zeros(1, 8)) is None
    described.remove("a")
    described.remove("b")
    assert described.launch(ROWS, np.array([0, 1, 5, 6]), torch.zeros(6, 8)) is None
