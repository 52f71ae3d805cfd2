"""A prefill and a decode engine in two processes that share a device: do they answer as one engine does, from its K/V.

A request whose K/V does not come fails here: an answer that the decode engine computed itself would prove nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import random
import select
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Literal, cast

from pagefleet_engine.bench.shapes import write_shape
from pagefleet_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagefleet_engine.engine_core.build import build_core
from pagefleet_engine.engine_core.engine_core import EngineCore
from pagefleet_engine.engine_core.messages import AddRequest, RequestOutput
from pagefleet_engine.ranks.parallelism import Parallelism
from pagefleet_kv.config import DataPlaneName, KVTransferConfig
from pagefleet_kv.port import EngineIdentity
from pagefleet_protocol.kv_handoff import KvTransfer
from pagefleet_protocol.sampling_params import SamplingParams

NUM_PROMPTS = 3
PROMPT_TOKENS = 600
BLOCK_TOKENS = 16
BLOCKS_PER_PROMPT = (PROMPT_TOKENS - 1) // BLOCK_TOKENS
"""Full ones, of which the last token is always computed."""
ANSWER_TOKENS = 16
INCARNATIONS = {"prefill": "a" * 32, "decode": "d" * 32}


@dataclass(frozen=True)
class Order:
    """What an engine's process is to answer; None instead of one: end."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    transfer: KvTransfer | None


@dataclass(frozen=True)
class Setting:
    """Of one engine's process."""

    model: Path
    key_file: Path
    role: Literal["prefill", "decode"]
    plane: str
    device: str
    port: int
    """0: any."""
    peers: str | None
    environment: Mapping[str, str]
    """For NCCL, which reads it when the first link is made."""
    ranks: int
    """Over which each layer is divided."""


@dataclass(frozen=True)
class Answer:
    """What an engine's process said."""

    request_id: str
    tokens: list[int]
    received_blocks: float
    """For this answer."""
    seconds: float
    error: str | None = None


def check_engines(
    plane: str,
    device: str,
    seconds: float,
    environments: Mapping[str, Mapping[str, str]] | None = None,
    ranks: tuple[int, int] = (1, 1),
) -> dict[str, Any]:
    """Return whether all tokens are those of the prefill engine alone, and that the blocks came from it.

    `environments`: variables of the engine's process, by its role. `ranks`: of the prefill and of the decode engine.
    """
    deadline = time.monotonic() + seconds
    prompts = [[random.Random(n).randrange(1, 250) for _ in range(PROMPT_TOKENS)] for n in range(NUM_PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            engines = _Engines(Path(folder), plane, device, environments or {}, ranks, deadline)
        except queue.Empty:
            return {"ok": False, "why": "the engines do not start"}
        try:
            alone = [engines.answer(engines.prefill, Order(f"alone-{n}", p, ANSWER_TOKENS, None))
                     for n, p in enumerate(prompts)]  # fmt: skip
            apart = [engines.in_two_legs(n, prompt) for n, prompt in enumerate(prompts)]
        except queue.Empty:
            return {"ok": False, "why": f"not done within {seconds:g} s"}
        finally:
            engines.close()
    return verdict(alone, apart)


def verdict(alone: Sequence[Answer], apart: Sequence[Answer]) -> dict[str, Any]:
    """Figures of the same prompts answered by one engine and by two; an answer counts only with all its blocks sent."""
    equal = [one.tokens == other.tokens for one, other in zip(alone, apart, strict=True)]
    sent = [answer.received_blocks >= BLOCKS_PER_PROMPT for answer in apart]
    from_blocks = sum(both == (True, True) for both in zip(equal, sent, strict=True))
    received = sum(answer.received_blocks for answer in apart)
    errors = sorted({answer.error for answer in apart if answer.error})
    return {
        "ok": from_blocks == len(apart),
        "equal_answers_from_blocks": from_blocks,
        "answers": len(apart),
        "received_blocks": received,
        "seconds_per_answer": min(answer.seconds for answer in apart),
        "why": "; ".join((f"{sum(equal)} of {len(apart)} answers equal, {received:g} blocks came", *errors)),
    }


@dataclass
class _Process:
    orders: Queue[Order | None]
    answers: Queue[Any]
    process: multiprocessing.process.BaseProcess


class _Engines:
    """Both processes."""

    def __init__(
        self,
        folder: Path,
        plane: str,
        device: str,
        environments: Mapping[str, Mapping[str, str]],
        ranks: tuple[int, int],
        deadline: float,
    ) -> None:
        self._deadline = deadline
        (folder / "model").mkdir()
        model = write_shape("llama-1m" if device == "cpu" else "llama-125m", folder / "model")
        key_file = folder / "key"
        key_file.write_bytes(random.Random(0).randbytes(32))
        self.all: list[_Process] = []
        try:
            of_prefill, of_decode = (environments.get(role, {}) for role in ("prefill", "decode"))
            port = _free_port()
            self.address = f"127.0.0.1:{port}"
            alike = Setting(model, key_file, "prefill", plane, device, port, None, of_prefill, ranks[0])
            self.prefill = self._start(alike)
            self.decode = self._start(
                replace(alike, role="decode", port=0, peers=self.address, environment=of_decode, ranks=ranks[1])
            )
            for engine in self.all:
                engine.answers.get(timeout=self._left())
        except queue.Empty:
            self.close()
            raise

    def answer(self, engine: _Process, order: Order) -> Answer:
        """Give an order and wait; queue.Empty: it took too long."""
        engine.orders.put(order)
        return cast(Answer, engine.answers.get(timeout=self._left()))

    def in_two_legs(self, number: int, prompt: list[int]) -> Answer:
        """The decode engine's answer, with a prompt that the prefill engine computes."""
        transfer_id = f"{number + 1:032x}"
        first = KvTransfer("prefill", transfer_id, INCARNATIONS["decode"])
        second = KvTransfer("decode", transfer_id, INCARNATIONS["prefill"], self.address, "fail")
        self.prefill.orders.put(Order(f"p{number}", prompt, 1, first))
        answer = self.answer(self.decode, Order(f"d{number}", prompt, ANSWER_TOKENS, second))
        self.prefill.answers.get(timeout=self._left())
        return answer

    def close(self) -> None:
        """End both, by force if need be."""
        for engine in self.all:
            engine.orders.put(None)
        for engine in self.all:
            engine.process.join(3)
            if engine.process.is_alive():
                engine.process.kill()
                engine.process.join()

    def _left(self) -> float:
        return max(0.1, self._deadline - time.monotonic())

    def _start(self, setting: Setting) -> _Process:
        context = multiprocessing.get_context("spawn")
        orders: Queue[Order | None] = context.Queue()
        answers: Queue[Any] = context.Queue()
        process = context.Process(target=_serve, args=(setting, orders, answers), daemon=True)
        process.start()
        self.all.append(_Process(orders, answers, process))
        return self.all[-1]


def _free_port() -> int:
    """Return the first of two free ones in a row."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.suppress(OSError):
            port = int(first.getsockname()[1])
            socket.create_server(("127.0.0.1", port + 1)).close()
            return port


def _serve(setting: Setting, orders: Queue[Order | None], answers: Queue[Any]) -> None:
    os.environ.update(setting.environment)
    core, ready = build_core(
        _config(setting), identity=EngineIdentity(INCARNATIONS[setting.role], str(setting.key_file))
    )
    assert ready.kv_transfer is not None
    answers.put(None)
    while True:
        try:
            order = orders.get(timeout=0.001)
        except queue.Empty:
            _step(core)
            continue
        if order is None:
            break
        answers.put(_answer(core, order))
    core.shutdown()


def _answer(core: EngineCore, order: Order) -> Answer:
    began = time.perf_counter()
    sampling = SamplingParams(temperature=0.0, max_tokens=order.max_tokens, ignore_eos=True)
    refused = core.add(AddRequest(order.request_id, order.prompt, sampling, (1,), transfer=order.transfer))
    assert not refused, f"the engine refuses: {refused}"
    before, outputs = _received_blocks(core), list[RequestOutput]()
    while not any(output.finish_reason is not None for output in outputs):
        outputs += _step(core)
    tokens = [token for output in outputs for token in output.new_token_ids]
    seconds = time.perf_counter() - began
    return Answer(order.request_id, tokens, _received_blocks(core) - before, seconds, outputs[-1].error)


def _received_blocks(core: EngineCore) -> float:
    counters = core._scheduler.connector.stats().counters
    return counters.get("pagefleet_engine_kv_transfer_received_blocks_total", 0.0)


def _step(core: EngineCore) -> list[RequestOutput]:
    if core.has_work and not core.is_stalled:
        return list(core.step())
    if core.bells:
        select.select(core.bells, [], [], 0.001)
    return list(core.step() if core.has_work else core.settle())


def _config(setting: Setting) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            model=str(setting.model),
            load_format="dummy",
            dtype="float32",
            device="cuda" if setting.device == "cuda" else "cpu",
            max_model_len=2048,
        ),
        cache=CacheConfig(num_kv_blocks=1024),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        kv_transfer=KVTransferConfig(
            kv_connector="p2p",
            kv_role=setting.role,
            kv_port=setting.port,
            kv_peers=setting.peers,
            kv_data_plane=cast(DataPlaneName, setting.plane),
        ),
        parallel=Parallelism(tensor_parallel_size=setting.ranks),
    )
