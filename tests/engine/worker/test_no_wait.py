"""A whole step, from plan to launch, with the kernels of a GPU: nothing in it waits for the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
import torch
from pagefleet_engine.attention.torch_backend import TorchBackend
from pagefleet_engine.attention.triton_backend import TritonBackend
from pagefleet_engine.core.step import NewRow, ScheduledRow, ScheduledRows, StepPlan
from pagefleet_engine.worker.forward import EagerForward
from pagefleet_engine.worker.model_runner import LaunchedStep, ModelRunner, PassedOn, RequestState, RunnerLimits
from pagefleet_kernels.dispatch import Backend
from pagefleet_kernels.layout import KVLayout
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.graph_steps import BLOCK_SIZE, kv_groups, small_model
from tests.fakes.no_host_wait import NoHostRead, NoHostWait

NUM_BLOCKS = 24
BLOCKS_EACH = 8
PROMPTS = {"a": [5, 9, 3, 3, 8, 1], "b": [7, 2], "c": [11, 12, 13, 14, 15, 16, 17, 18, 19]}
SAMPLING = {
    "a": SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1),
    "b": SamplingParams(seed=1, top_k=8, top_p=0.9, repetition_penalty=1.2),
    "c": SamplingParams(seed=2, min_tokens=3, bad_words_token_ids=((4,), (5, 6))),
}


def make_runner(device: str, *, as_gpu: bool) -> ModelRunner:
    """`as_gpu`: staged writes and Triton kernels, in the interpreter where there is no GPU."""
    kernels: Backend = "triton" if as_gpu else "torch"
    model = small_model(device=device, use_kernels=as_gpu)
    groups, arch = kv_groups(model), model.arch
    layout = KVLayout(NUM_BLOCKS, groups.layers_per_block, arch.num_kv_heads, BLOCK_SIZE, arch.head_dim)
    pool = torch.zeros(layout.shape, device=device)
    limits = RunnerLimits(
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=BLOCKS_EACH * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        vocab_size=arch.vocab_size,
        max_in_flight=2,
    )
    state = RequestState(limits, 0, pool.device, kernels)
    backend = TritonBackend(pool, layout, groups, kernels) if as_gpu else TorchBackend(pool, layout, groups)
    return ModelRunner(model, EagerForward(model, backend), pool, state, limits.vocab_size)


def plans() -> Iterator[StepPlan]:
    """Prompts whole and in chunks, then tokens; one request leaves and its slot is taken again."""
    new = {name: NewRow(name, tokens, len(tokens), SAMPLING[name], (2,)) for name, tokens in PROMPTS.items()}
    tables = {
        name: (range(index * BLOCKS_EACH, (index + 1) * BLOCKS_EACH),) for index, name in enumerate(sorted(PROMPTS))
    }
    yield plan([new["a"], new["c"]], [("a", 0, 6, tables["a"], True), ("c", 0, 4, tables["c"], False)])
    yield plan([new["b"]], [("a", 6, 1, (), True), ("c", 4, 5, (), True), ("b", 0, 2, tables["b"], True)])
    yield plan([], [("a", 7, 1, (), True), ("c", 9, 1, (), True), ("b", 2, 1, (), True)])
    yield plan([], [("c", 10, 1, (), True), ("b", 3, 1, (), True)], removed=("a",))
    yield plan([new["a"]], [("c", 11, 1, (), True), ("a", 0, 6, tables["a"], True)])


def plan(
    new: Sequence[NewRow],
    rows: Sequence[tuple[str, int, int, Sequence[range], bool]],
    removed: Sequence[str] = (),
) -> StepPlan:
    scheduled = [ScheduledRow(*row) for row in rows]
    return StepPlan(0, removed, new, ScheduledRows.of(scheduled), sum(row.num_new_tokens for row in scheduled))


@contextmanager
def guarded(device: str) -> Iterator[None]:
    with ExitStack() as stack:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
        else:
            stack.enter_context(NoHostRead())
            stack.enter_context(NoHostWait())
        yield


def check_overlapping_steps(device: str) -> None:
    """Steps are launched before earlier ones are asked for their tokens; all give what plain steps on a CPU give."""
    plain, runner = make_runner("cpu", as_gpu=False), make_runner(device, as_gpu=True)
    expected = [plain.execute(step) for step in plans()]
    launched: list[LaunchedStep | PassedOn] = []
    found = []
    for step in plans():
        with guarded(device):
            launched.append(runner.launch(step))
        if len(launched) == 2:
            found.append(launched.pop(0).result())
    found.append(launched.pop().result())
    for result, other in zip(found, expected, strict=True):
        assert result.sampled == other.sampled
        assert result.failed == other.failed == {}
        assert result.logprobs.keys() == other.logprobs.keys()
        assert {name: [entry.token_ids for entry in entries] for name, entries in result.prompt_logprobs.items()} == {
            name: [entry.token_ids for entry in entries] for name, entries in other.prompt_logprobs.items()
        }
    assert sum(len(tokens) for result in found for tokens in result.sampled) == 11


def test_a_step_never_waits() -> None:
    check_overlapping_steps("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_never_waits_for_a_gpu() -> None:
    runner = make_runner("cuda", as_gpu=True)
    for step in plans():  # compiles what it launches, which may wait
        runner.execute(step)
    check_overlapping_steps("cuda")
