"""Real engines and a router for the benchmarks of disaggregation.

Each engine has one core to itself, as if it had a machine; routers and clients run where there is room. Engines compute
in float32: what they answer then does not depend on how a prompt is cut, so that answers can be compared.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pagefleet_engine.bench.shapes import write_shape
from pagefleet_protocol.endpoints import Endpoint, encode_endpoints
from pagefleet_protocol.engine_facts import FACTS_PATH, EngineFacts, decode_facts
from pagefleet_protocol.kv_handoff import KvRole
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bench.models import LLAMA_125M, llama_checkpoint

MODEL = "llama"
VOCAB_SIZE = 2000
SHAPE: Mapping[str, object] = {
    **LLAMA_125M,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 16384,
}
"""4 million parameters and 8 KiB of K/V per token: a core needs some five seconds for a prompt of 8k tokens."""
START_S = 240.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine."""

    name: str
    core: int
    """That it is bound to; the first of them, where it has several ranks."""
    role: KvRole | None = None
    """None: it computes whole requests and passes no K/V."""
    send_type: str = "put_async"
    ranks: int = 1
    """Tensor ranks, with a core each."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What all engines of a run have in common."""

    max_model_len: int
    max_num_batched_tokens: int
    num_kv_blocks: int


def write_model(folder: Path) -> Path:
    """Write a checkpoint with random weights, and the embedded model's tokenizer."""
    folder.mkdir(parents=True)
    write_shape("llama-1m", folder)
    return llama_checkpoint(folder, SHAPE)


class Ports:
    """Ports of loopback that nobody listens on, each given once; below those that the system gives to connections."""

    def __init__(self) -> None:
        self._next = random.randrange(10_000, 30_000)

    def take(self, count: int = 1) -> int:
        """Return the first of so many in a row."""
        while True:
            first = self._next
            self._next += count
            with ExitStack() as stack:
                try:
                    for port in range(first, first + count):
                        stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                except OSError:
                    continue
                return first


class Process:
    """A server in a process of its own, its output in a file."""

    def __init__(self, name: str, command: Sequence[str], port: int, folder: Path) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self._output = folder / f"{name}.log"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def get(self, path: str) -> bytes:
        """Return what it answers."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return bytes(answer.read())

    def metrics(self) -> dict[str, float]:
        """Return its series by name; those that differ in labels alone are added up."""
        found: dict[str, float] = {}
        for sample in self._samples():
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def metric_by(self, label: str, name: str) -> dict[str, float]:
        """Return one metric's values by one of its labels."""
        return {sample.labels[label]: sample.value for sample in self._samples() if sample.name == name}

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
        """Wait for something of this process.

        Raises:
            RuntimeError: it ended, or it takes too long.
        """
        give_up_at = time.monotonic() + timeout_s
        while not self._holds(condition):
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError(f"{self.name} {what} not; it said:\n{self._output.read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _samples(self) -> Iterator[Sample]:
        for family in text_string_to_metric_families(self.get("/metrics").decode()):
            yield from family.samples

    @staticmethod
    def _holds(condition: Callable[[], bool]) -> bool:
        try:
            return condition()
        except (urllib.error.URLError, OSError):
            return False  # it is still starting


class Fleet:
    """Engines, and a router where one is wanted, until the `with` ends.

    Args:
        folder: of this fleet alone.
        model: folder of the checkpoint.
        specs: the engines.
        limits: of all of them.
        ports: where they listen.
    """

    def __init__(
        self, folder: Path, model: Path, specs: Sequence[EngineSpec], limits: EngineLimits, ports: Ports
    ) -> None:
        folder.mkdir(parents=True)
        self._ports = ports
        self._folder = folder
        self.key_file = folder / "fleet.key"
        self.key_file.write_text(os.urandom(32).hex())
        self._kv_ports = {spec.name: ports.take(2) for spec in specs}
        self._kv_peers = ",".join(f"127.0.0.1:{self._kv_ports[one.name]}" for one in specs if one.role == "prefill")
        self._stack = ExitStack()
        self.engines: dict[str, Process] = {}
        for spec in specs:
            port = ports.take()
            command = [
                *_bound_to(range(spec.core, spec.core + spec.ranks)),
                *self._engine_command(model, spec, limits, port),
            ]
            engine = self.engines[spec.name] = Process(spec.name, command, port, folder)
            self._stack.callback(engine.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def wait_ready(self) -> None:
        """Wait for all engines."""
        for engine in self.engines.values():
            engine.wait_until(lambda engine=engine: bool(engine.get("/readyz")), "became ready")  # type: ignore[misc]

    def facts(self, engine: str) -> EngineFacts:
        """Return what an engine says of itself."""
        return decode_facts(self.engines[engine].get(FACTS_PATH))

    def start_router(self) -> Process:
        """Start a router over all engines; returns when it sends to each of them."""
        file = self._folder / "endpoints.json"
        file.write_bytes(encode_endpoints(tuple(Endpoint(name, one.url, MODEL) for name, one in self.engines.items())))
        port = self._ports.take()
        program = str(Path(sys.executable).with_name("pagefleet-route"))
        files = ("--endpoints-file", str(file), "--fleet-key-file", str(self.key_file))
        router = Process("router", [program, *files, "--port", str(port)], port, self._folder)
        self._stack.callback(router.stop)
        router.wait_until(
            lambda: router.metrics().get("pagefleet_router_kv_engines_followed") == len(self.engines), "followed all"
        )
        return router

    def _engine_command(self, model: Path, spec: EngineSpec, limits: EngineLimits, port: int) -> list[str]:
        settings: dict[str, object] = {
            "port": port,
            "served-model-name": MODEL,
            "dtype": "float32",
            "num-threads": spec.ranks,
            "tensor-parallel-size": spec.ranks,
            "max-model-len": limits.max_model_len,
            "max-num-batched-tokens": limits.max_num_batched_tokens,
            "num-kv-blocks": limits.num_kv_blocks,
            "kv-events-port": self._ports.take(2),
            "fleet-key-file": self.key_file,
        }
        if spec.role is not None:
            settings |= {"kv-connector": "p2p", "kv-role": spec.role, "kv-data-plane": "tcp"}
            settings |= {"kv-send-type": spec.send_type}
            settings |= {"kv-port": self._kv_ports[spec.name], "kv-peers": self._kv_peers}
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        return [sys.executable, "-m", "pagefleet_engine.cli", str(model), *words]


def _bound_to(cores: Iterable[int]) -> tuple[str, ...]:
    return ("taskset", "-c", ",".join(map(str, cores)))
