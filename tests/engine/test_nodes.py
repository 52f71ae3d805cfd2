"""A real model whose ranks are on two machines, which network namespaces play: answers, and what becomes of faults."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from pagefleet_engine import LLM, SamplingParams

from tests.engine.test_ranks import Stream
from tests.fakes.fleet_processes import all_gone, child_pids
from tests.fakes.free_ports import free_ports
from tests.fakes.network_namespace import NetworkNamespace, NoNamespaces, network_namespace
from tests.fakes.slow_requests import SLOW, finding_plugin

pytestmark = pytest.mark.fleet

PROMPT = "What is pagefleet?"
HERE = "198.18.72.1"
COMMON = (SLOW, "--dtype=float32", "--device=cpu", "--num-kv-blocks=256", "--num-threads=1")


@pytest.fixture(scope="module")
def alone() -> tuple[int, ...]:
    """What one process answers."""
    llm = LLM("builtin://tiny", dtype="float32", device="cpu", num_kv_blocks=256, num_threads=1)
    try:
        (told,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
        return tuple(told.outputs[0].token_ids)
    finally:
        llm.shutdown()


@pytest.fixture
def machine() -> Iterator[NetworkNamespace]:
    try:
        with network_namespace({"nodes": (HERE, "198.18.72.2")}) as made:
            yield made
    except NoNamespaces as error:
        pytest.skip(f"no namespaces here: {error}")


@dataclass
class Node:
    """A process of `pagefleet serve`, whose log is read to its end."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self.changed:
                self.log.append(line)
                self.changed.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the log."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.log if (match := re.search(pattern, line))), None)

        with self.changed:
            assert self.changed.wait_for(lambda: found() or self.process.poll() is not None, 300), self.log
        match = found()
        assert match is not None, "".join(self.log)
        return match

    def end(self) -> int:
        """Wait for its end; return its status."""
        status = self.process.wait(60)
        self._reading.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


class Pair:
    """A leader here, a follower there."""

    def __init__(self, machine: NetworkNamespace, folder: Path, sizes: Sequence[str]) -> None:
        key = folder / "key"
        key.write_text("k" * 40)
        port = str(free_ports())
        shared = ["builtin://tiny", *COMMON, *sizes, "--nnodes=2", f"--master-addr={HERE}", f"--master-port={port}"]
        self._arguments = [*shared, f"--fleet-key-file={key}"]
        self.leader = self._start((), "--port=0", "--node-rank=0")
        self.leader.wait_for("waiting up to 600 s for node 1")
        self.follower = self._start(machine.within, "--port=0", "--node-rank=1", "--headless")
        self.url = self.leader.wait_for(r"serving tiny on (http://\S+)")[1]
        (self.core,) = child_pids(self.leader.process.pid)
        self.ranks = child_pids(self.core)
        self.far_ranks = _children_of_threads(self.follower.process.pid)

    def _start(self, within: Sequence[str], *own: str) -> Node:
        command = [*within, sys.executable, "-m", "pagefleet_engine.cli", *self._arguments, *own]
        return Node(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=finding_plugin()))

    @property
    def pids(self) -> list[int]:
        return [self.leader.process.pid, self.core, self.follower.process.pid, *self.ranks, *self.far_ranks]

    def close(self) -> None:
        for node in (self.leader, self.follower):
            node.process.kill()
            node.end()


def _children_of_threads(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def answer_of(url: str) -> tuple[int, ...]:
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
    told = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
    return tuple(told["choices"][0]["token_ids"])


def stop(pair: Pair) -> None:
    os.kill(pair.follower.process.pid, signal.SIGSTOP)


FAULTS: dict[str, tuple[Callable[[Pair, NetworkNamespace], None], str]] = {
    "rank": (lambda pair, _: os.kill(pair.far_ranks[0], signal.SIGKILL), "rank 1 on .* was killed by signal 9"),
    "follower": (lambda pair, _: pair.follower.process.kill(), "rank 1 on .* is out of reach"),
    "frozen": (lambda pair, _: stop(pair), "rank 1 on .* (is out of reach|gave no sign of life)"),
    "cut": (
        lambda _, machine: machine.cut("nodes"),
        "rank [01] on .* (is out of reach|gave no sign of life|could not compute)",
    ),
}


@pytest.fixture
def pair(machine: NetworkNamespace, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(machine, tmp_path, ["-tp=2"])
    yield made
    made.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_tokens_are_those_of_one_process_and_faults_end_all(
    pair: Pair, machine: NetworkNamespace, alone: tuple[int, ...], fault: str
) -> None:
    assert answer_of(pair.url) == alone
    stream = Stream(pair.url)
    stream.start()
    while not stream.lines:
        time.sleep(0.05)
    happens, says = FAULTS[fault]
    happens(pair, machine)
    stream.join(60)
    assert '"error"' in stream.lines[-1]
    assert pair.leader.end() == 1
    assert any(re.search(f"EngineDead: {says}.*: the engine must be started again", line) for line in pair.leader.log)
    if fault == "frozen":
        os.kill(pair.follower.process.pid, signal.SIGCONT)
    assert pair.follower.end() == (-9 if fault == "follower" else 1)
    assert all_gone(pair.pids)


def test_a_leader_that_is_killed_ends_its_followers(pair: Pair) -> None:
    os.kill(pair.leader.process.pid, signal.SIGKILL)
    assert pair.follower.end() == 1
    assert f"the leader at {HERE} is out of reach" in pair.follower.log[-1]
    assert all_gone(pair.pids)


def test_a_leader_that_is_stopped_ends_its_followers_after_its_requests(pair: Pair) -> None:
    os.kill(pair.follower.process.pid, signal.SIGTERM)
    pair.follower.wait_for("waiting up to 30 s for the leader to end")
    assert answer_of(pair.url)
    os.kill(pair.leader.process.pid, signal.SIGTERM)
    assert pair.leader.end() == 0
    assert pair.follower.end() == 0
    assert all_gone(pair.pids)


def test_both_may_be_stopped_at_once(pair: Pair) -> None:
    for node in (pair.leader, pair.follower):
        os.kill(node.process.pid, signal.SIGTERM)
    assert (pair.leader.end(), pair.follower.end()) == (0, 0)
    assert not any("Traceback" in line for line in pair.follower.log)
    assert all_gone(pair.pids)


def test_stages_on_two_machines_give_the_tokens_of_one_process(
    machine: NetworkNamespace, tmp_path: Path, alone: tuple[int, ...]
) -> None:
    made = Pair(machine, tmp_path, ["-pp=2"])
    try:
        assert answer_of(made.url) == alone
    finally:
        made.close()
