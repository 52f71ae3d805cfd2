"""Whole engine cores in this process that pass K/V to each other over loopback, stepped by the test."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pagefleet_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagefleet_engine.engine_core.build import build_core
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.messages import AddRequest, RequestOutput
from pagefleet_engine.errors import EngineDead
from pagefleet_engine.nodes.follower import Follower, LeaderAddress
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_engine.ranks.together import TogetherHandles, make_together
from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.curve import load_fleet_key
from pagefleet_kv.p2p.connector import METRIC, P2PConnector
from pagefleet_kv.p2p.peers import AllowedPeers
from pagefleet_kv.port import EngineIdentity
from pagefleet_protocol.kv_handoff import KvTransfer, OnFailure
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.bells import rings
from tests.fakes.free_ports import free_ports

PATIENCE_S = 300.0
NUM_BLOCKS = 64
FULL_BLOCKS = 10
"""Of `prompt_of`, before its last token."""
ANSWER = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def prompt_of(number: int, num_tokens: int = 165) -> list[int]:
    """Tokens that no other number's begin with."""
    return [40 + (number * 31 + place * place) % 200 for place in range(num_tokens)]


@dataclass(eq=False)
class FleetEngine:
    """One core, and all that it said."""

    core: EngineCore
    incarnation: str
    address: str
    """Of its control socket."""
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)

    def add(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams = ANSWER,
        transfer: KvTransfer | None = None,
    ) -> None:
        """Give it a request."""
        self.outputs[request_id] = []
        refused = self.core.add(AddRequest(request_id, prompt, sampling, (1,), transfer=transfer))
        assert not refused

    def step(self) -> None:
        """Do what is to be done now."""
        for output in self.core.step() if self.core.has_work else self.core.settle():
            self.outputs[output.request_id].append(output)

    def tokens(self, request_id: str) -> list[int]:
        """What it answered."""
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def ended(self, request_id: str) -> bool:
        """Whether the request is over."""
        return any(output.finish_reason is not None for output in self.outputs[request_id])

    def num_cached(self, request_id: str) -> int | None:
        """Prompt tokens that it need not compute."""
        return self.outputs[request_id][0].num_cached_tokens

    def figure(self, name: str) -> float:
        """One of the connector's figures, as of now."""
        stats = self.core._scheduler.connector.stats()  # the core's own copy is up to a quarter second old
        return {**stats.counters, **stats.gauges}.get(f"{METRIC}_{name}", 0.0)

    @property
    def bell(self) -> int:
        """Readable when a transfer has ended."""
        bell = self.core._scheduler.connector.bell
        assert bell is not None
        return bell

    @property
    def peers(self) -> AllowedPeers:
        """Whom it may ask."""
        return self._connector._parts.peers

    def skip(self, seconds: float) -> None:
        """Have its transfers wake as if they had been stopped for so long."""
        self._connector._agent._clock._clock = lambda: time.monotonic() + seconds

    @property
    def _connector(self) -> P2PConnector:
        connector = self.core._scheduler.connector
        assert isinstance(connector, P2PConnector)
        return connector

    @property
    def num_held_blocks(self) -> int:
        """Blocks of the pool that are no one's to take."""
        cache = self.core._scheduler._kv_cache
        return cache.num_blocks - cache.num_available_blocks


@dataclass(eq=False)
class SteppingEngine(FleetEngine):
    """One that steps in a thread of its own."""

    def __post_init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._is_over = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def call(self, call: Callable[[], None]) -> None:
        """Have its thread do something between two steps."""
        self._calls.append(call)

    def stop(self) -> None:
        """Step no more once there is nothing to do."""
        self._is_over = True

    def _run(self) -> None:
        while not (self._is_over and not self.core.has_work):
            while self._calls:
                self._calls.popleft()()
            self.step()
            if self.core.is_stalled or not self.core.has_work:
                rings(self.core.bells, 0.01)


class Fleet:
    """Makes engines with one key, and lets them run together."""

    def __init__(self, model: Path, key_file: Path) -> None:
        self.engines: list[FleetEngine] = []
        self._stepping: list[tuple[list[SteppingEngine], TogetherHandles]] = []
        self.model = model
        self._key_file = key_file

    def engine(
        self,
        name: str,
        block_size: int = 16,
        key_file: Path | None = None,
        num_tokens: int = NUM_BLOCKS * 16,
        tensor: int = 1,
        stages: int = 1,
        nodes: int = 1,
        backend: Literal["mp", "ray"] = "mp",
        **kv: Any,
    ) -> FleetEngine:
        """Start one.

        Args:
            name: a hexadecimal digit, of which its incarnation is made.
            block_size: tokens per block.
            key_file: of another fleet.
            num_tokens: room in its pool.
            tensor: its ranks in each stage.
            stages: of its pipeline.
            nodes: machines that they are on; threads of this process play the others.
            backend: that starts them.
            kv: of `KVTransferConfig`.
        """
        identity = EngineIdentity(name * 32, str(key_file or self._key_file))
        config = _config(self.model, CacheConfig(num_kv_blocks=num_tokens // block_size, block_size=block_size))
        transfer = KVTransferConfig(**{"kv_connector": "p2p", **kv})
        parallel = Parallelism(
            tensor_parallel_size=tensor,
            pipeline_parallel_size=stages,
            nnodes=nodes,
            master_addr="127.0.0.1" if nodes > 1 else None,
            master_port=free_ports(),
            distributed_executor_backend=backend,
        )
        config = dataclasses.replace(config, kv_transfer=transfer, parallel=parallel)
        for node in range(1, nodes):
            threading.Thread(target=self._follow, args=(config, node), daemon=True).start()
        core, ready = build_core(config, identity=identity)
        assert ready.kv_transfer is not None
        made = FleetEngine(core, identity.incarnation, f"127.0.0.1:{ready.kv_transfer.port}")
        self.engines.append(made)
        return made

    def copies(self, names: str, model: Path, **kv: Any) -> list[SteppingEngine]:
        """Start copies of a model that share its experts, an engine with a digit of `names` each, of one rank. They run
        by themselves, as each step waits for all of them."""
        transfer = KVTransferConfig(**{"kv_connector": "p2p", **kv})
        parallel = Parallelism(data_parallel_size=len(names), enable_expert_parallel=True)
        config = _config(model, CacheConfig(num_kv_blocks=NUM_BLOCKS))
        config = dataclasses.replace(config, kv_transfer=transfer, parallel=parallel)
        handles = make_together(parallel)

        def build(copy: int) -> SteppingEngine:
            identity = EngineIdentity(names[copy] * 32, str(self._key_file))
            core, ready = build_core(config, identity=identity, together=handles, data_rank=copy)
            assert ready.kv_transfer is not None
            return SteppingEngine(core, identity.incarnation, f"127.0.0.1:{ready.kv_transfer.port}")

        with ThreadPoolExecutor(len(names)) as pool:
            made = [*pool.map(build, range(len(names)))]
        self._stepping.append((made, handles))
        for engine in made:
            engine.thread.start()
        return made

    def _follow(self, config: EngineConfig, node: int) -> None:
        """Be another machine of an engine's, until it ends."""
        leader = LeaderAddress("127.0.0.1", config.parallel.master_port, load_fleet_key(str(self._key_file)))
        own = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, node_rank=node))
        follower = Follower(own, node, leader)
        follower.bring(self.model)
        with contextlib.suppress(EngineDead):
            follower.run()

    def until(self, holds: Callable[[], bool], *engines: FleetEngine) -> None:
        """Let engines (default: all) run until something holds."""
        engines = engines or tuple(self.engines)
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, "it never happens"
            for engine in engines:
                engine.step()
            if all(engine.core.is_stalled or not engine.core.has_work for engine in engines):
                rings((engine.bell for engine in engines), 0.01)

    def stop(self, engine: FleetEngine) -> None:
        """End one; its sockets close as if its process were gone."""
        self.engines.remove(engine)
        engine.core.shutdown()

    def close(self) -> None:
        """Check and end all."""
        stepping = [copy for copies, _ in self._stepping for copy in copies]
        for copy in stepping:
            copy.stop()
        for copy in stepping:
            copy.thread.join(PATIENCE_S)
            assert not copy.thread.is_alive()
        for engine in (*self.engines, *stepping):
            engine.core.check_integrity()
            engine.core.shutdown()
        for _, handles in self._stepping:
            handles.close()


@contextlib.contextmanager
def running_fleet(model: Path, key_file: Path) -> Iterator[Fleet]:
    """A fleet that ends with the block."""
    fleet = Fleet(model, key_file)
    try:
        yield fleet
    finally:
        fleet.close()


def answers_alone(model: Path, numbers: Iterable[int], sampling: SamplingParams = ANSWER) -> dict[int, list[int]]:
    """What an engine answers that computes all itself, and has room for all."""
    core, _ = build_core(_config(model, CacheConfig(num_kv_blocks=256)))
    alone = FleetEngine(core, "", "")
    for number in numbers:
        alone.add(str(number), prompt_of(number), sampling)
    while core.has_work:
        alone.step()
    core.shutdown()
    return {int(name): alone.tokens(name) for name in alone.outputs}


def _config(model: Path, cache: CacheConfig) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), load_format="dummy", dtype="float32", num_threads=1, max_model_len=256),
        cache=cache,
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=48),
    )


def pass_on(fleet: Fleet, prefill: FleetEngine, decode: FleetEngine, number: int) -> list[int]:
    """One request in two legs, to its end; return its tokens."""
    one, two = legs(number, prefill, decode)
    prefill.add(f"p{number}", prompt_of(number), FIRST_TOKEN, one)
    decode.add(f"d{number}", prompt_of(number), transfer=two)
    fleet.until(lambda: decode.ended(f"d{number}") and prefill.ended(f"p{number}"))
    return decode.tokens(f"d{number}")


def legs(
    number: int, prefill: FleetEngine, decode: FleetEngine, on_failure: OnFailure = "recompute"
) -> tuple[KvTransfer, KvTransfer]:
    """What the router tells each of two engines."""
    transfer_id = f"{number:032x}"
    return (
        KvTransfer("prefill", transfer_id, decode.incarnation),
        KvTransfer("decode", transfer_id, prefill.incarnation, prefill.address, on_failure),
    )
