"""The executor over rank processes that have no model, and what becomes of it when one of them fails."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from pagefleet_engine.config import EngineConfig, ModelConfig
from pagefleet_engine.core.step import NewRow, ScheduledRow, ScheduledRows, StepMasks, StepPlan
from pagefleet_engine.engine_core.step_queue import StepQueue
from pagefleet_engine.errors import ConfigError, EngineDead, ModelLoadError, ProfileRefused, StepOutOfMemory
from pagefleet_engine.executor import hang_watch, processes
from pagefleet_engine.executor.executor import PendingStep
from pagefleet_engine.executor.local_node import LocalNode
from pagefleet_engine.executor.processes import ProcessExecutor
from pagefleet_engine.executor.rank_memory import COMMAND_BYTES
from pagefleet_engine.executor.rank_pages import RankPages
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_engine.ranks.rendezvous import RendezvousTable
from pagefleet_engine.startup import StartupTimes
from pagefleet_kv.config import KVTransferConfig
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.architectures import llama_arch
from tests.fakes.rank_process import LOUD

COMMAND = (sys.executable, str(Path(__file__).parents[2] / "fakes" / "rank_process.py"))
HOST = os.uname().nodename
OTHERS = "fake?others=1"

Start = Callable[..., ProcessExecutor]


def config_of(model: str, size: int, stages: int = 1) -> EngineConfig:
    parallel = Parallelism(tensor_parallel_size=size, pipeline_parallel_size=stages)
    return EngineConfig(model=ModelConfig(model=model, device="cpu"), parallel=parallel)


@pytest.fixture
def start() -> Iterator[Start]:
    begun: list[ProcessExecutor] = []

    def start(
        model: str = "fake", size: int = 2, times: StartupTimes | None = None, stages: int = 1
    ) -> ProcessExecutor:
        begun.append(ProcessExecutor(config_of(model, size, stages), Path("/m"), llama_arch(), times, COMMAND))
        return begun[-1]

    yield start
    for executor in begun:
        executor.shutdown()


def plan(step_id: int, *names: str, num_tokens: int = 1, masked: tuple[int, ...] = (), new: bool = True) -> StepPlan:
    fresh = [NewRow(name, (5,) * num_tokens, num_tokens, SamplingParams(), ()) for name in names] if new else []
    rows = ScheduledRows.of([ScheduledRow(name, 0, num_tokens, ((0,),), True) for name in names])
    return StepPlan(step_id, (), fresh, rows, num_tokens * len(names), masked=masked)


def pids(executor: ProcessExecutor) -> list[int]:
    return [pid for node in executor._nodes if isinstance(node, LocalNode) for pid in node.pids]


def are_gone(executor: ProcessExecutor) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids(executor))


def test_steps_run_on_all_ranks_and_overlap(start: Start) -> None:
    executor = start(size=4)
    first, second = executor.launch(plan(0, "a")), executor.launch(plan(1, "b"))
    assert first.result().sampled == [[6]]
    assert second.result().sampled == [[6]]
    assert executor.max_in_flight == 2
    assert executor.cache.num_blocks == 256
    executor.shutdown()
    assert are_gone(executor)


def test_transfers_are_launched_among_steps_by_another_thread(start: Start) -> None:
    by_nccl = KVTransferConfig(kv_connector="p2p", kv_data_plane="nccl", kv_role="prefill")
    config = replace(config_of("fake", 2), kv_transfer=by_nccl)
    executor = ProcessExecutor(config, Path("/m"), llama_arch(), command=COMMAND)
    assert isinstance(executor.pages, RankPages)
    turns = executor.pages.turns("nccl")
    carries = threading.Thread(target=lambda: [turns.launch({0: turn}, "source") for turn in range(100)])
    carries.start()
    for step_id in range(100):
        assert executor.launch(plan(step_id, f"r{step_id}")).result().sampled == [[6]]
    carries.join()
    executor.shutdown()
    turns.launch({0: 100}, "source")  # who asks does not know yet


def test_ranks_that_are_gone_while_a_transfer_is_to_be_launched_are_seen(start: Start) -> None:
    executor = start()
    with futures.ThreadPoolExecutor(1) as other:
        with executor._commands._lock:  # as by one who waits for room until the ranks are known to be gone
            for pid in pids(executor):
                os.kill(pid, signal.SIGKILL)
            failed = other.submit(executor.launch, plan(0, "a"))
            while not executor._over:
                time.sleep(0.01)
        with pytest.raises(EngineDead, match="was killed by signal 9"):
            failed.result()


def test_masked_rows_are_sampled_later_under_large_masks(start: Start) -> None:
    executor = start()
    step = executor.launch(plan(0, "a", "b", "c", masked=(0, 2)))
    while not step.is_computed:
        select.select(executor.bells, [], [], 1)
    masks = np.zeros((2, COMMAND_BYTES // 8), dtype=np.int32)
    masks[0, 1], masks[1, 2] = 1, 2
    step.sample(StepMasks([0, 2], masks))
    assert step.result().sampled == [[32], [6], [65]]


@pytest.mark.parametrize("likeliest", [False, True])
def test_masked_rows_may_all_sit_a_step_out(start: Start, likeliest: bool) -> None:
    executor = start()
    none = np.zeros((0, 4), dtype=np.int32)
    step = executor.launch(plan(0, "a", "b", masked=(1,)))
    step.sample(StepMasks([], none, none if likeliest else None))
    assert step.result().sampled == [[6], []]
    assert executor.launch(plan(1, "c")).result().sampled == [[6]]


def test_masks_that_cannot_be_sent_end_the_engine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(masks: StepMasks) -> list[bytes]:
        raise TypeError("cannot cast")

    monkeypatch.setattr(processes, "encode_sample", refuse)
    executor = start()
    steps = StepQueue(executor)
    steps.launch(plan(0, "a", masked=(0,)))
    steps.sample(StepMasks([0], np.zeros((1, 4), dtype=np.int32)))
    with pytest.raises(EngineDead, match="masks of a step could not be sent to the ranks: TypeError: cannot cast"):
        steps.take()
    assert are_gone(executor)


def test_ranks_at_another_step_end_the_engine(start: Start) -> None:
    executor = start()
    executor.launch(plan(0, "a"))
    newer = executor.launch(plan(1, "b"))
    with pytest.raises(EngineDead, match="the ranks are not at step 1 but at 0"):
        newer.result()
    assert are_gone(executor)


def test_a_plan_larger_than_the_ring_comes_through(start: Start) -> None:
    executor = start()
    step = executor.launch(plan(0, "a", num_tokens=2 * COMMAND_BYTES))
    assert step.result().sampled == [[6]]


def test_ranks_and_their_core_tell_each_other_more_than_the_rings_hold(start: Start) -> None:
    executor = start(size=1, stages=2)
    loud = executor.launch(plan(0, "long-1", "loud"))
    large = executor.launch(plan(1, "a", masked=(0,)))
    large.sample(StepMasks([0], np.full((1, COMMAND_BYTES // 2), 1, dtype=np.int32)))
    assert loud.result().sampled == [[6], LOUD]
    assert large.result().sampled == [[32]]


def test_loading_is_told_of_all_ranks(start: Start) -> None:
    told = []
    times = StartupTimes(tell=lambda *progress: told.append(progress))
    start(times=times)
    assert told
    assert times.seconds()["weights"] > 0


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("config", ConfigError, f"rank 1 on {HOST}: one thing is wrong: do another"),
        ("model", ModelLoadError, f"rank 1 on {HOST}: /m is damaged: download it again"),
        ("memory", ModelLoadError, f"rank 1 on {HOST}: MemoryError: "),
        ("raise", ConfigError, f"rank 1 on {HOST}: ValueError: a bad step"),
        ("die", ModelLoadError, f"rank 1 on {HOST} was killed by signal 9 while it loaded: the machine's memory did"),
        ("version", ConfigError, f"rank 1 on {HOST} runs other code or has another configuration than the engine: ins"),
        ("blocks", ConfigError, f"rank 1 on {HOST} has 255 KV blocks where rank 0 has 256: give --num-kv-blocks"),
    ],
)
def test_a_rank_that_cannot_load_is_one_line(start: Start, fault: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind) as refused:
        start(f"fake?fault={fault}&rank=1")
    assert str(refused.value).startswith(says)
    assert "\n" not in str(refused.value)
    assert type(refused.value) is kind


def test_layers_that_read_what_others_keep_are_not_parted() -> None:
    arch = replace(llama_arch(), num_kv_shared_layers=llama_arch().num_layers - 1)
    with pytest.raises(ConfigError, match=f"last {arch.num_layers} of which have to be together: give 1 at most$"):
        ProcessExecutor(config_of("fake", 1, stages=2), Path("/m"), arch, None, COMMAND)


def test_a_line_of_the_log_says_which_copy_and_stage_a_rank_is(capfd: pytest.CaptureFixture[str]) -> None:
    config = config_of("fake?fault=raise&rank=1", 1, stages=2)
    parallel = replace(config.parallel, data_parallel_size=4, data_parallel_rank=3)
    with pytest.raises(ConfigError):
        ProcessExecutor(replace(config, parallel=parallel), Path("/m"), llama_arch(), None, COMMAND)
    assert "ERROR rank 1 (copy 3, stage 1): rank 1 could not start" in capfd.readouterr().err


@pytest.mark.parametrize("room", [0, 2, 5, 9, 12, 15, 17, 18, 19, 20, 21, 22, 23, 24, 26, 28])
def test_too_few_descriptors_are_one_line(start: Start, room: int) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    config_of("fake", 2)
    llama_arch()  # the first of either reads files
    gc.collect()  # what tests before this left open
    limits, before = resource.getrlimit(resource.RLIMIT_NOFILE), opened()
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + room, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"\(.*Too many open files.*\): raise the limits of processes and open"):
            start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert opened() == before


def test_ranks_whose_k_v_cannot_be_reached_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[LocalNode] = []

    def refuse(node: LocalNode, *_: object) -> None:
        nodes.append(node)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(LocalNode, "_pool", refuse)
    config = replace(config_of("fake", 2), kv_transfer=KVTransferConfig(kv_connector="offload"))
    with pytest.raises(ConfigError, match=r"^K/V of ranks cannot be reached \(.*\): raise the limits of processes and"):
        ProcessExecutor(config, Path("/m"), llama_arch(), command=COMMAND)
    (node,) = nodes
    assert not any(Path(f"/proc/{pid}").exists() for pid in node.pids)


def test_a_step_that_fails_on_all_ranks_ends_its_requests_alone(start: Start) -> None:
    executor = start()
    with pytest.raises(RuntimeError, match="ValueError: a bad step"):
        executor.launch(plan(0, "raise-all")).result()
    with pytest.raises(StepOutOfMemory, match="no room"):
        executor.launch(plan(1, "oom-all")).result()
    assert executor.launch(plan(2, "a")).result().sampled == [[6]]


@pytest.mark.parametrize("fault", ["raise-0", "raise-1", "oom-0", "oom-1"])
def test_a_step_that_fails_on_one_rank_ends_all(start: Start, fault: str) -> None:
    executor = start()
    step = executor.launch(plan(0, fault))
    with pytest.raises(EngineDead, match=f"rank {fault[-1]} on .* could not compute a step that others could"):
        end_of(executor, step)
    assert are_gone(executor)


@pytest.mark.parametrize("masked", [(), (0,)])
def test_a_rank_that_has_no_room_while_others_wait_for_it_is_named_at_once(
    start: Start, masked: tuple[int, ...]
) -> None:
    executor = start()
    executor.launch(plan(0, "a")).result()
    step = executor.launch(plan(1, "hang-0", "oom-1", masked=masked))  # rank 0 hangs as it would in a sum
    while masked and not step.is_computed:
        select.select(executor.bells, [], [], 10)
    says = rf"rank 1 on {HOST} could not compute .*\(StepOutOfMemory: no room\): lower --gpu-memory-utilization or "
    with pytest.raises(EngineDead, match=says):
        step.result()
    assert are_gone(executor)


def test_stages_tell_unasked_and_a_stage_that_fails_ends_its_step_alone(start: Start) -> None:
    """The fake of the last stage does not wait for what the first one gives."""
    executor = start(size=1, stages=2)
    steps = [executor.launch(plan(0, "a")), executor.launch(plan(1, "raise-0")), executor.launch(plan(2, "oom-1"))]
    assert steps[0].result().sampled == [[6]]
    while 1 not in executor._failed:
        select.select(executor.bells, [], [], 1)
        executor.check()
    with pytest.raises(RuntimeError, match=r"rank 0 on .*: ValueError: a bad step"):
        steps[1].result()
    with pytest.raises(StepOutOfMemory, match="no room"):
        steps[2].result()
    masked = executor.launch(plan(3, "b", masked=(0,)))
    allowed = np.zeros((1, 4), dtype=np.int32)
    allowed[0, 0] = 1 << 9
    masked.sample(StepMasks([0], allowed))
    assert masked.result().sampled == [[9]]


@pytest.mark.parametrize("fault", ["raise-0", "raise-2"])
def test_a_step_that_fails_on_one_rank_of_a_stage_ends_all(start: Start, fault: str) -> None:
    executor = start(size=2, stages=2)
    step = executor.launch(plan(0, fault))
    with pytest.raises(EngineDead, match=f"rank {fault[-1]} on .* could not compute a step that others could"):
        end_of(executor, step)
    assert are_gone(executor)


def test_a_stage_that_fails_once_its_tokens_are_out_ends_all(start: Start) -> None:
    executor = start(size=1, stages=2)
    assert executor.launch(plan(0, "late-0")).result().sampled == [[6]]
    os.kill(pids(executor)[0], signal.SIGUSR1)
    with pytest.raises(EngineDead, match=r"rank 0 on .* could not compute a step that others could .*a late fault"):
        end_of(executor)
    assert are_gone(executor)


def test_a_stage_that_gets_another_step_ends_all(start: Start) -> None:
    executor = start(size=1, stages=2)
    with pytest.raises(EngineDead, match=r"rank 1 on .* exited with status 1"):
        end_of(executor, executor.launch(plan(0, "astray-1")))
    assert are_gone(executor)


def test_every_rank_writes_a_profile_of_its_own(start: Start, tmp_path: Path) -> None:
    executor = start(size=2)
    executor.trace.start()
    executor.launch(plan(0, "a")).result()
    pattern = executor.trace.stop(tmp_path / "profile-1")
    assert pattern == tmp_path / "profile-1-rank*.json.gz"
    assert {path.name for path in tmp_path.glob(pattern.name)} == {f"profile-1-rank{n}.json.gz" for n in range(2)}
    executor.trace.start()
    with pytest.raises(ProfileRefused, match=f"rank 0 on {HOST}: The profile cannot be written to .*gone: No such"):
        executor.trace.stop(tmp_path / "gone" / "profile-2")
    assert executor.launch(plan(1, "b")).result().sampled == [[6]]


def test_where_one_rank_cannot_record_none_does(start: Start, tmp_path: Path) -> None:
    executor = start("fake?fault=trace&rank=1")
    with pytest.raises(ProfileRefused, match=f"rank 1 on {HOST}: No profile can be recorded: CUPTI is in use"):
        executor.trace.start()
    with pytest.raises(ProfileRefused, match=f"rank 0 on {HOST}: No profile is being recorded"):
        executor.trace.stop(tmp_path / "profile-1")
    assert not [*tmp_path.iterdir()]


def end_of(executor: ProcessExecutor, step: PendingStep | None = None) -> None:
    """Wait until the executor gives up: what rank 0 sampled may be told before another rank's failure is known."""
    if step is not None:
        step.result()
    while True:
        select.select(executor.bells, [], [], 0.5)
        executor.check()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_in_a_step_is_noticed(start: Start, rank: int) -> None:
    executor = start()
    step, began = executor.launch(plan(0, f"die-{rank}", "a")), time.monotonic()
    with pytest.raises(EngineDead, match=f"rank {rank} on {HOST} was killed by signal 9; .*: the engine must be"):
        end_of(executor, step)
    assert time.monotonic() - began < 60
    assert are_gone(executor)


def test_a_rank_that_dies_while_idle_is_noticed_by_its_bell(start: Start) -> None:
    executor = start()
    os.kill(pids(executor)[1], signal.SIGKILL)
    with pytest.raises(EngineDead, match="rank 1"):
        end_of(executor)
    assert are_gone(executor)


def test_an_executor_that_is_over_touches_no_descriptor(start: Start) -> None:
    executor = start()
    step = executor.launch(plan(0, "a", masked=(0,)))
    while not step.is_computed:
        select.select(executor.bells, [], [], 1)
    before = executor.bells
    os.kill(pids(executor)[1], signal.SIGKILL)
    with pytest.raises(EngineDead, match="rank 1") as first:
        end_of(executor)
    assert executor.bells == []
    reused = [os.eventfd(1, os.EFD_NONBLOCK) for _ in range(64)]
    assert set(before) <= set(reused)
    masks = StepMasks([0], np.zeros((1, 4), dtype=np.int32))
    calls: list[Callable[[], object]] = [
        executor.check,
        lambda: executor.launch(plan(1, "b")),
        lambda: step.is_computed,
        lambda: step.sample(masks),
        step.result,
    ]
    for call in calls:
        with pytest.raises(EngineDead) as again:
            call()
        assert str(again.value) == str(first.value)
    assert [os.eventfd_read(fd) for fd in reused] == [1] * len(reused)
    for fd in reused:
        os.close(fd)


SILENT, IDLE, AWAITED, LONG, LAYER = (
    "gave no sign of life",
    "has done nothing within a step",
    "did not come to the other ranks of its stage",
    "did not come out of a step",
    "did not come out of a layer",
)
BURNS = f"({LONG}|{LAYER})"
PATIENCE = (2.0, 10.0, 40.0)
"""For ranks: each is tried where a busy machine gave one that is well no time within the one before."""


def check_end(begin: Callable[[], ProcessExecutor], come_to: Callable[[ProcessExecutor], object], says: str) -> None:
    """An engine that comes to a fault ends by itself, says where, and leaves no process."""
    for patience in PATIENCE:
        executor = begin()
        with mock.patch.object(hang_watch, "HANG_S", patience), pytest.raises(EngineDead) as ended:
            come_to(executor)
        assert are_gone(executor)
        if re.match(rf"{says} for \d+ s: the engine must be started again", str(ended.value)):
            return
    raise ended.value


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        (["stop-1"], SILENT),
        (["hang-1"], IDLE),
        (["spin-1"], BURNS),
        (["stop-1", "meet"], SILENT),
        (["hang-1", "meet"], f"({IDLE}|{AWAITED})"),
        (["spin-1", "meet"], f"({AWAITED}|{LAYER})"),
    ],
)
def test_a_tensor_rank_that_hangs_is_noticed(start: Start, faults: Sequence[str], says: str) -> None:
    def come_to(executor: ProcessExecutor) -> None:
        executor.launch(plan(0, "meet")).result()
        end_of(executor, executor.launch(plan(1, *faults)))

    check_end(lambda: start(OTHERS), come_to, f"rank 1 on {HOST} {says}")


@pytest.mark.parametrize(
    ("fault", "says"),
    [("stop-0", SILENT), ("hang-0", IDLE), ("hang-1", IDLE), ("spin-0", BURNS), ("spin-1", BURNS)],
)
def test_a_stage_that_hangs_is_noticed_while_the_other_waits_for_it(
    start: Start, fault: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_watch, "STAGE_HANG_S", 9.0)  # where others use the machine

    def come_to(executor: ProcessExecutor) -> None:
        assert executor.launch(plan(0, "pass")).result().sampled == [[6]]
        step, _ = executor.launch(plan(1, fault, "pass")), executor.launch(plan(2, "pass"))
        step.result()

    check_end(lambda: start(OTHERS, size=1, stages=2), come_to, f"rank {fault[-1]} on {HOST} {says}")


def test_a_device_that_never_ends_a_step_is_noticed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "STAGE_HANG_S", 600.0)

    def come_to(executor: ProcessExecutor) -> None:
        executor.launch(plan(0, "a")).result()
        executor.launch(plan(1, "endless")).result()

    check_end(lambda: start("fake?device=1", size=1, stages=2), come_to, f"rank 1 on {HOST} {LONG}")


def test_a_stage_whose_ranks_wait_for_one_of_them_is_not_blamed(start: Start) -> None:
    def come_to(executor: ProcessExecutor) -> None:
        executor.launch(plan(0, "meet", "pass")).result()
        executor.launch(plan(1, "spin-1", "meet", "pass")).result()

    check_end(lambda: start(OTHERS, size=2, stages=2), come_to, rf"rank 1 on {HOST} ({AWAITED}|{LAYER})")


def test_a_long_step_is_not_taken_for_one_that_hangs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that computes may take longer than one that does nothing, while nobody knows what a layer takes."""
    monkeypatch.setattr(hang_watch, "HANG_S", 2.0)
    monkeypatch.setattr(hang_watch, "STAGE_HANG_S", 600.0)
    for _ in PATIENCE:
        executor = start(OTHERS, size=1, stages=2)
        try:
            assert executor.launch(plan(0, "long-1", "pass")).result().sampled == [[6], [6]]
        except EngineDead as ended:
            if SILENT not in str(ended):
                raise
        else:
            return
    pytest.fail("a rank that is well had no time for a sign of life, each time")


def test_ranks_end_with_a_parent_that_is_killed() -> None:
    script = (
        "from tests.engine.executor.test_processes import *\n"
        "config = EngineConfig(model=ModelConfig(model='fake', device='cpu'),"
        " parallel=Parallelism(tensor_parallel_size=2))\n"
        "executor = ProcessExecutor(config, Path('/m'), llama_arch(), None, COMMAND)\n"
        "print(*pids(executor), flush=True)\n"
        "import time; time.sleep(600)"
    )
    before: set[Any] = set(Path("/dev/shm").iterdir())
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    ranks = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(ranks) == 2
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 60
    while any(runs(pid) for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "pagefleet" in path.name]


def runs(pid: int) -> bool:
    """Whether a process that is nobody's child here exists, and is no corpse."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_rank_that_dies_with_an_answer_unread_is_told_by_its_sentinel() -> None:
    node = LocalNode(range(1), config_of("fake", 1), torch.device("cpu"), RendezvousTable())
    (rank,) = node._ranks
    rank.asking.send(b"answer")
    rank._close_theirs()
    assert list(node.receive()) == []
    assert node.ended() == (0, "was never started")
    node.end(0.0)
