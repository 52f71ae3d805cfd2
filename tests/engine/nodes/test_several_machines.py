"""An executor over ranks of other machines: followers are threads here, their ranks processes without a model."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pagefleet_engine.config import EngineConfig, ExecutionConfig, ModelConfig
from pagefleet_engine.core.step import NewRow, ScheduledRow, ScheduledRows, StepMasks, StepPlan
from pagefleet_engine.errors import AddressTaken, ConfigError, EngineDead, EngineError, ModelLoadError
from pagefleet_engine.executor.executor import PendingStep
from pagefleet_engine.executor.local_node import LocalNode
from pagefleet_engine.executor.processes import ProcessExecutor
from pagefleet_engine.executor.rank_memory import COMMAND_BYTES
from pagefleet_engine.nodes import leader, link
from pagefleet_engine.nodes.follower import Follower, LeaderAddress
from pagefleet_engine.nodes.leader import SeveralMachines
from pagefleet_engine.nodes.link import NodeLink
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.p2p.planes.device.opening import NoPlane, PlaneOpening
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.sampling_params import SamplingParams

from tests.engine.executor.test_processes import IDLE, check_end
from tests.fakes.architectures import llama_arch
from tests.fakes.free_ports import free_ports
from tests.fakes.rank_process import LOUD

COMMAND = (sys.executable, str(Path(__file__).parents[2] / "fakes" / "rank_process.py"))
HOST = socket.gethostname()
SECRET = "s" * 40


class Following(threading.Thread):
    """A follower, and how it ended."""

    def __init__(self, config: EngineConfig, folder: Path, secret: str = SECRET) -> None:
        super().__init__(daemon=True)
        address = LeaderAddress("127.0.0.1", config.parallel.master_port, FleetKey(secret.encode()))
        self.follower = Follower(config, config.parallel.node_rank, address, COMMAND)
        self.follower.bring(folder)
        self.error: EngineError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.follower.run()
        except EngineError as error:
            self.error = error

    @property
    def pids(self) -> list[int]:
        assert self.follower._local is not None
        return self.follower._local.pids

    def end(self) -> str:
        """Wait for its end; return what it says."""
        self.join(120)
        assert not self.is_alive()
        return str(self.error)


class Scene:
    """A leader and its followers, on one port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_ports()
        self.key_file = folder / "fleet-key"
        self.key_file.write_text(SECRET)
        self.executors: list[ProcessExecutor] = []
        self.followers: list[Following] = []
        (folder / "config.json").write_text("{}")

    def config(self, nodes: int = 2, size: int = 2, model: str = "fake", wait_s: float = 60.0) -> EngineConfig:
        parallel = Parallelism(
            tensor_parallel_size=size,
            nnodes=nodes,
            master_addr="127.0.0.1",
            master_port=self.port,
            rank_wait_timeout=wait_s,
        )
        return EngineConfig(model=ModelConfig(model=model, device="cpu"), parallel=parallel)

    def follow(
        self, config: EngineConfig, node: int = 1, folder: Path | None = None, secret: str = SECRET
    ) -> Following:
        own = replace(config, parallel=replace(config.parallel, node_rank=node))
        self.followers.append(Following(own, folder or self.folder, secret))
        return self.followers[-1]

    def lead(self, config: EngineConfig) -> ProcessExecutor:
        several = partial(SeveralMachines, folder=self.folder, fleet_key_file=str(self.key_file))
        self.executors.append(ProcessExecutor(config, self.folder, llama_arch(), None, COMMAND, several))
        return self.executors[-1]

    def pair(self, model: str = "fake", size: int = 2) -> tuple[ProcessExecutor, Following]:
        config = self.config(size=size, model=model)
        follower = self.follow(config)
        return self.lead(config), follower

    def close(self) -> None:
        for executor in self.executors:
            executor.shutdown()
        for follower in self.followers:
            if follower.is_alive():
                follower.follower.stop()
            follower.join(120)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


def plan(step_id: int, *names: str, masked: tuple[int, ...] = ()) -> StepPlan:
    fresh = [NewRow(name, (5,), 1, SamplingParams(), ()) for name in names]
    rows = ScheduledRows.of([ScheduledRow(name, 0, 1, ((0,),), True) for name in names])
    return StepPlan(step_id, (), fresh, rows, len(names), masked=masked)


def end_of(executor: ProcessExecutor, step: PendingStep | None = None) -> None:
    if step is not None:
        step.result()
    while True:
        select.select(executor.bells, [], [], 0.5)
        executor.check()


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


def test_steps_run_on_all_machines(scene: Scene) -> None:
    config = scene.config(nodes=4, size=4)
    followers = [scene.follow(config, node) for node in (2, 1, 3)]
    executor = scene.lead(config)
    first, second = executor.launch(plan(0, "a")), executor.launch(plan(1, "b", masked=(0,)))
    assert first.result().sampled == [[6]]
    while not second.is_computed:
        select.select(executor.bells, [], [], 1)
    masks = np.zeros((1, 1 << 20), dtype=np.int32)
    masks[0, 1] = 1
    second.sample(StepMasks([0], masks))
    assert second.result().sampled == [[32]]
    assert [node.ranks for node in executor._nodes] == [range(node, node + 1) for node in range(4)]
    assert all(follower.follower.is_ready for follower in followers)
    executor.shutdown()
    for follower in followers:
        assert f"on {HOST}: the leader has ended (the ranks were ended)" in follower.end()


def test_a_rank_of_another_machine_that_dies_is_named(scene: Scene) -> None:
    executor, follower = scene.pair()
    step = executor.launch(plan(0, "die-1", "a"))
    with pytest.raises(EngineDead, match=f"rank 1 on {HOST} was killed by signal 9; .*: the engine must be"):
        end_of(executor, step)
    assert f"rank 1 on {HOST} was killed by signal 9" in follower.end()


def test_a_rank_of_the_leader_that_dies_ends_followers(scene: Scene) -> None:
    executor, follower = scene.pair()
    rank = follower.pids[0]
    with pytest.raises(EngineDead, match="rank 0"):
        executor.launch(plan(0, "die-0")).result()
    assert f"the leader has ended (rank 0 on {HOST} was killed by signal 9" in follower.end()
    assert is_gone(rank)


def test_a_follower_that_leaves_is_noticed_at_once(scene: Scene) -> None:
    executor, follower = scene.pair()
    follower.follower.stop()
    with pytest.raises(EngineDead, match=f"rank 1 on {HOST} was ended with its node: the engine must be started again"):
        end_of(executor)
    follower.end()


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("config", ConfigError, f"rank 1 on {HOST}: one thing is wrong: do another"),
        ("model", ModelLoadError, f"rank 1 on {HOST}: /m is damaged: download it again"),
        ("die", ModelLoadError, f"rank 1 on {HOST} was killed by signal 9 while it loaded"),
        ("version", ConfigError, f"rank 1 on {HOST} runs other code"),
        ("blocks", ConfigError, f"rank 1 on {HOST} has 255 KV blocks where rank 0 has 256"),
    ],
)
def test_a_rank_that_cannot_load_is_one_line(scene: Scene, fault: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind) as refused:
        scene.pair(f"fake?fault={fault}&rank=1")
    assert str(refused.value).startswith(says)
    assert type(refused.value) is kind
    scene.followers[0].end()


def test_a_model_that_does_not_come_is_one_line_on_both_sides(scene: Scene) -> None:
    config = scene.config()
    follower = scene.follow(config)

    def fail() -> None:
        while not follower.follower.is_joined:
            time.sleep(0.01)
        follower.follower.give_up(ModelLoadError("org/name: the hub is out of reach"))

    threading.Thread(target=fail, daemon=True).start()
    with pytest.raises(ModelLoadError, match=f"rank 1 on {HOST}: org/name: the hub is out of reach"):
        scene.lead(config)
    assert follower.end() == "org/name: the hub is out of reach"


def test_another_model_is_refused(scene: Scene) -> None:
    config, other = scene.config(), scene.folder / "other"
    other.mkdir()
    (other / "config.json").write_text('{"other": 1}')
    follower = scene.follow(config, folder=other)
    with pytest.raises(ConfigError, match=f"rank 1 on {HOST}: its files of the model are not the leader's"):
        scene.lead(config)
    assert f"node 1 on {HOST}: its files of the model are not the leader's" in follower.end()


def test_a_follower_that_never_comes_is_named(scene: Scene) -> None:
    config = scene.config(nodes=4, size=4, wait_s=0.2)
    with pytest.raises(ConfigError, match=f"node 1, 2, 3 never came to port {scene.port} within 0 s: start"):
        scene.lead(config)


def refused_pair(scene: Scene, follower: Callable[[], Following]) -> tuple[str, str]:
    """What a follower that is refused says, and its leader after a while."""
    refused = follower()
    with pytest.raises(ConfigError) as waited:
        scene.lead(scene.config(wait_s=10.0))
    return refused.end(), str(waited.value)


def test_another_key_is_refused_on_both_sides(scene: Scene) -> None:
    theirs, ours = refused_pair(scene, lambda: scene.follow(scene.config(wait_s=10.0), secret="t" * 40))
    assert f"127.0.0.1 port {scene.port} has another fleet key, or is no leader: give all nodes the same" in theirs
    assert "node 1 never came" in ours


def test_other_settings_are_refused_on_both_sides(scene: Scene) -> None:
    theirs, ours = refused_pair(scene, lambda: scene.follow(scene.config(wait_s=11.0)))
    line = (
        f"node 1 on {HOST}: rank_wait_timeout is 11.0 there, and 10.0 at the leader: give all nodes the same settings"
    )
    assert theirs == line
    assert f"never came to port {scene.port} within 10 s (the last one was refused: {line})" in ours


def test_a_node_rank_given_twice_is_refused(scene: Scene) -> None:
    executor, _ = scene.pair()
    second = scene.follow(scene.config())
    assert second.end() == f"node 1 on {HOST}: node 1 is {HOST} already: give each node a --node-rank of its own"
    assert executor.launch(plan(0, "a")).result().sampled == [[6]]


def test_a_follower_may_be_replaced_before_the_engine_begins(scene: Scene) -> None:
    config = scene.config(nodes=4, size=4)
    leading = threading.Thread(target=scene.lead, args=(config,))
    leading.start()
    early = scene.follow(config, 1)
    while not early.follower.is_joined:
        time.sleep(0.01)
    early.follower.stop()
    early.end()
    again = scene.follow(config, 1)
    while again.is_alive() and not again.follower.is_joined:
        time.sleep(0.01)
    scene.follow(config, 2)
    scene.follow(config, 3)
    leading.join(120)
    (executor,) = scene.executors
    assert executor.launch(plan(0, "a")).result().sampled == [[6]]


def test_a_follower_that_leaves_as_the_engine_begins_is_noticed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    config = scene.config()
    follower = scene.follow(config)
    links: list[NodeLink] = []

    class Known(NodeLink):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            links.append(self)

    class Late(LocalNode):
        def __init__(self, *arguments: Any) -> None:
            follower.follower.stop()
            follower.end()
            while links[0].nodes[1].peer is not None:
                time.sleep(0.01)
            super().__init__(*arguments)

    monkeypatch.setattr(leader, "NodeLink", Known)
    monkeypatch.setattr(leader, "LocalNode", Late)
    said: list[EngineError] = []

    def lead() -> None:
        try:
            scene.lead(config)
        except EngineError as error:
            said.append(error)

    leading = threading.Thread(target=lead, daemon=True)
    leading.start()
    leading.join(120)
    assert len(said) == 1
    assert str(said[0]).startswith(f"rank 1 on {HOST} ")


def test_a_link_that_fails_ends_what_waits(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise KeyError("a mistake")

    monkeypatch.setattr(link, "refusal_of", fail)
    config = scene.config()
    scene.follow(config)
    with pytest.raises(ConfigError, match="rank 1 on node 1 cannot be heard: the link to other nodes failed, as"):
        scene.lead(config)


def test_a_follower_keeps_its_cache_in_its_own_folder(scene: Scene) -> None:
    config = scene.config()
    here, there = (replace(config, execution=ExecutionConfig(cache_dir=folder)) for folder in ("/here", "/there"))
    follower = scene.follow(there).follower
    executor = scene.lead(here)
    assert executor.launch(plan(0, "a")).result().sampled == [[6]]
    assert follower._local is not None
    assert follower._local._config == replace(here, execution=there.execution)


def test_whoever_calls_a_follower_after_its_end_writes_nothing(scene: Scene) -> None:
    executor, following = scene.pair()
    executor.shutdown()
    following.end()
    follower = following.follower
    for call in (follower.stop, partial(follower.bring, scene.folder), partial(follower.give_up, ConfigError("x"))):
        call()
    assert not follower._posted


def test_a_port_that_is_taken_is_one_line(scene: Scene) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", scene.port))
        taken.listen()
        with pytest.raises(AddressTaken, match=f"port {scene.port}, where other nodes are to come, is taken: give all"):
            scene.lead(scene.config())


def test_no_key_is_one_line_that_says_how_to_make_one(scene: Scene) -> None:
    several = partial(SeveralMachines, folder=scene.folder, fleet_key_file=None)
    with pytest.raises(ConfigError, match=r"make one \(`openssl rand -hex 32 > fleet.key`\), and give all nodes"):
        ProcessExecutor(scene.config(), scene.folder, llama_arch(), None, COMMAND, several)


def test_a_rank_that_has_no_room_for_a_command_still_tells_and_shows_how_it_is(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes until it is seen, then tells more than its ring holds, while it is told more than its ring holds."""
    config = scene.config()
    parallel = replace(config.parallel, tensor_parallel_size=1, pipeline_parallel_size=2)
    following = scene.follow(replace(config, parallel=parallel))
    executor = scene.lead(replace(config, parallel=parallel))
    beats: list[float] = []
    beat = following.follower._beat

    def note() -> None:
        beats.append(time.monotonic())
        beat()

    monkeypatch.setattr(following.follower, "_beat", note)
    loud = executor.launch(plan(0, "until-1", "loud"))
    large = executor.launch(plan(1, "a", masked=(0,)))
    large.sample(StepMasks([0], np.full((1, COMMAND_BYTES // 2), 1, dtype=np.int32)))
    began = time.monotonic()
    while len([at for at in beats if at > began]) < 3:
        time.sleep(0.01)
    os.kill(following.pids[0], signal.SIGUSR1)
    assert loud.result().sampled == [[6], LOUD]
    assert large.result().sampled == [[32]]


def test_ranks_whose_k_v_cannot_be_reached_there_are_one_line(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(LocalNode, "_pool", refuse)
    config = replace(scene.config(), kv_transfer=KVTransferConfig(kv_connector="offload"))
    following = scene.follow(config)
    says = rf"rank [01] on {HOST}: K/V of ranks cannot be reached \(.*\): raise the limits|^K/V of ranks cannot"
    with pytest.raises(ConfigError, match=says):
        scene.lead(config)
    assert following.end()


def test_a_follower_that_passes_no_k_v_any_more_ends_the_engine(scene: Scene) -> None:
    executor, following = scene.pair()
    following.follower._post(following.follower._planes_failed)
    with pytest.raises(EngineDead, match=f"rank 1 on {HOST} passes no K/V any more, as its node's log says: the"):
        end_of(executor)
    assert f"node 1 on {HOST} passes no K/V any more" in following.end()


def test_nobody_waits_for_planes_of_a_machine_that_leaves(scene: Scene) -> None:
    executor, following = scene.pair()
    device, *_ = executor._nodes[1].devices(executor._fence, executor._is_over)
    threading.Timer(0.2, following.follower.stop).start()
    with pytest.raises(NoPlane, match="the engine's ranks are gone"):
        device.open(PlaneOpening("nccl", b"c" * 32, 4, (4, 0), (4, 0)))
    following.end()


def test_a_follower_that_is_stopped_is_noticed(scene: Scene) -> None:
    """The rank is; its machine is played by this process, which cannot be."""
    executor, follower = scene.pair()
    os.kill(follower.pids[0], signal.SIGSTOP)
    with pytest.raises(EngineDead, match=f"rank 1 on {HOST} gave no sign of life for"):
        end_of(executor)
    follower.end()


def test_a_rank_that_hangs_in_a_step_on_another_machine_is_noticed(scene: Scene) -> None:
    def come_to(executor: ProcessExecutor) -> None:
        end_of(executor, executor.launch(plan(0, "hang-1")))

    check_end(lambda: scene.pair()[0], come_to, f"rank 1 on {HOST} {IDLE}")
    assert "the leader has ended (rank 1 on" in scene.followers[-1].end()
