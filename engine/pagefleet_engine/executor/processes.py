"""The executor for several devices of one machine: a worker process for each rank, in lockstep.

All ranks are sent the same plans, through one ring in shared memory; each computes its part, and those of the last
stage all sample the same tokens, of which the first of them tells. The stages of a pipeline work on a plan each, one
behind another. What goes wrong on one rank alone cannot be mended: then all are ended.

The first rank has a process too. In the core's it would save one message a step, and a core that computes could not see
that another rank is gone, nor plan and fill masks while it does.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pagefleet_kv.port import KVPages, KVShard

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.core.step import ExpertLoad, StepMasks, StepPlan, StepResult
from pagefleet_engine.errors import ConfigError, EngineDead, ModelLoadError, StepOutOfMemory
from pagefleet_engine.executor.executor import CacheFacts, PendingStep
from pagefleet_engine.executor.hang_watch import LOOK_S, HangWatch
from pagefleet_engine.executor.local_rank import RANK_COMMAND
from pagefleet_engine.executor.machines import Machines, ThisMachine, check_ranks
from pagefleet_engine.executor.messages import (
    Computed,
    Launch,
    Loaded,
    Reply,
    StartFailed,
    StartTrace,
    StepFailed,
    StopTrace,
    Take,
    Taken,
    Traced,
    digest,
    encode,
    encode_sample,
)
from pagefleet_engine.executor.node import Commands, RankNode
from pagefleet_engine.executor.rank_loop import describe
from pagefleet_engine.executor.rank_memory import may_open_planes
from pagefleet_engine.executor.rank_pages import RankPages, StepFence, kv_shards
from pagefleet_engine.executor.rank_traces import RankTraces
from pagefleet_engine.executor.rank_turns import RankTurns
from pagefleet_engine.executor.ring import Buffer
from pagefleet_engine.executor.vital_signs import least_progress
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.ranks.together import TurnBoard
from pagefleet_engine.startup import StartupTimes
from pagefleet_engine.worker.device import resolve_device

LOAD_LOOK_S = 0.1
END_S = 3.0
"""That ranks get to end by themselves."""
TRACE_S = 120.0
"""That ranks get to begin a profile, or to write it."""
AGREE_S = 1.0
"""Between the failures of the same step on several ranks."""

MakeMachines = Callable[[EngineConfig, torch.device], Machines]
"""Of an engine, by the device that its ranks compute on."""

_KILLED = "was killed by signal 9"
_log = logging.getLogger(__name__)


class ProcessExecutor:
    """Implements `Executor` over rank processes. A rank that ends or hangs is an `EngineDead` of whatever is called.

    Args:
        config: of the engine.
        folder: of the model.
        arch: its shape.
        times: learns what the first rank's loading takes, and how far all are.
        command: of a rank's process.
        machines: that the ranks are on; by default this one.

    Attributes:
        dtype: name of the type that the model computes in.
        cache_dtype: name of the type of the KV pool.
        context_length: what the model is served for, whatever the KV pool holds.
        max_model_len: longest prompt plus output that fits the model and the KV pool.

    Raises:
        ModelLoadError: a rank cannot load its weights.
        ConfigError: the settings do not fit the model, the devices or this machine.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        arch: ModelArch,
        times: StartupTimes | None = None,
        command: Sequence[str] = RANK_COMMAND,
        machines: MakeMachines = ThisMachine,
    ) -> None:
        device = resolve_device(config.model.device)
        check_ranks(config, device, arch)
        self._size = config.parallel.world_size
        self.num_stages = config.parallel.pipeline_parallel_size
        """See Executor."""
        self._asks_to_take = not config.takes_unasked
        self._abreast = config.parallel.tensor_parallel_size
        self._watch = HangWatch(self._abreast)
        self._poll = select.poll()
        self._loaded: dict[int, Loaded] = {}
        self._computed = self._newest_taken = self._newest_returned = -1
        self._taken: dict[int, StepResult] = {}
        self._traced: dict[int, Traced] | None = None
        """While ranks are asked for traces: the answers."""
        self._failed: dict[int, dict[int, StepFailed]] = {}
        """Step -> rank -> what it told."""
        self.idle_seconds = 0.0
        """See Executor."""
        self.expert_load: ExpertLoad | None = None
        """See Executor; of the last stage."""
        self._over = ""
        """Why no rank is there any more. Descriptors that were closed may be somebody else's by now."""
        self._board: TurnBoard | None = None
        self._machines = machines(config, device)
        self._commands = Commands(self._nodes)
        try:
            self._machines.start(folder, command)
            for node in self._nodes:
                self._poll.register(node.bell, select.POLLIN)
            self._wait_until_loaded(times or StartupTimes())
            first = self._agreed(digest(config))
            groups = group_layers(arch.for_length(first.context_length).kept_windows, chunked=arch.chunked)
            self._fence = StepFence(self._wait_for_steps, first.max_in_flight)
            self._pages: RankPages | None = None
            if config.kv_transfer.connectors:
                self._pages = self._make_pages(config, device, kv_shards(arch, config.parallel, groups))
        except BaseException as error:
            self._end(0.0, str(error) or type(error).__name__)
            raise
        self.dtype, self.cache_dtype = first.dtype, first.cache_dtype
        self.context_length, self.max_model_len = first.context_length, first.max_model_len
        self.max_in_flight = first.max_in_flight
        """See Executor."""
        self.cache = CacheFacts(first.num_blocks, first.block_size, first.bytes_per_block, groups)
        """See Executor."""

    def _make_pages(self, config: EngineConfig, device: torch.device, shards: Sequence[KVShard]) -> RankPages:
        pools = [pool for node in self._nodes for pool in node.pools(shards, self._loaded, self._is_over)]
        asked = self._nodes if may_open_planes(config, on_cpu=device.type == "cpu") else ()
        devices = [one for node in asked for one in node.devices(self._fence, self._is_over)]
        return RankPages(pools, self._fence, devices, self._turns)

    def _turns(self, plane: str) -> RankTurns:
        return RankTurns(self._commands, self._is_over, self._board, plane)

    def step_together(self, board: TurnBoard) -> None:
        """From now on ranks step with those of other copies of the model."""
        self._board = board

    @property
    def pages(self) -> KVPages:
        """The ranks' KV pools as bytes of the whole model. There are some where the configuration has a connector."""
        assert self._pages is not None, "pages without a connector"
        return self._pages

    @property
    def bells(self) -> Sequence[int]:
        """See Executor."""
        return [] if self._over else [node.bell for node in self._nodes]

    def check(self) -> None:
        """See Executor."""
        self._take_in(0.0)
        self._raise_disagreement()

    def launch(self, plan: StepPlan) -> PendingStep:
        """See Executor."""
        self._send(encode(Launch(plan)), self._commands.launch)
        self._fence.num_launched += 1  # not before: one that was not sent is finished by nobody
        self._watch.num_given += 1
        return _RankStep(self, plan.step_id)

    def sample(self, masks: StepMasks) -> None:
        """Sample the masked rows of the newest step.

        Raises:
            EngineDead: the ranks cannot be told. They have the step, so their queues would be one ahead from now on.
        """
        try:
            self._send(encode_sample(masks))
        except EngineDead:
            raise
        except Exception as error:
            self._die(f"the masks of a step could not be sent to the ranks: {describe(error)}")

    def is_computed(self, step_id: int) -> bool:
        """Whether the ranks have but masked rows to sample in a step."""
        if self._computed < step_id or self._over:
            self._take_in(0.0)
        return self._computed >= step_id or step_id in self._failed

    def take(self, step_id: int) -> StepResult:
        """Wait for the oldest step.

        Raises:
            StepOutOfMemory: no rank of a stage had room for it.
            RuntimeError: it failed on all ranks of a stage.
            EngineDead: it failed on some, or ranks are gone or at another step.
        """
        if self._asks_to_take:
            self._send(encode(Take()))
        try:
            return self._await(step_id)
        finally:
            self._fence.num_taken += 1

    def _await(self, step_id: int) -> StepResult:
        failed_at = None
        while True:
            failed = self._failed.get(step_id, {})
            if self._has_ended(step_id):
                if failed and self._is_joint(failed):
                    self._taken.pop(step_id, None)
                    raise self._failure(step_id)
                break
            if self._taken and min(self._taken) < step_id:
                self._die(f"the ranks are not at step {step_id} but at {min(self._taken)}: report this as an error")
            if failed and failed_at is None:
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > AGREE_S:
                self._raise_disagreement(but_now=step_id)
            self._take_in(AGREE_S / 4 if failed else LOOK_S)
        self._raise_disagreement(but_now=step_id)
        self._newest_returned = step_id
        return self._taken.pop(step_id)

    @property
    def trace(self) -> RankTraces:
        """See Executor."""
        return RankTraces(self._ask_for_traces)

    def shutdown(self, because: str = "") -> None:
        """End the ranks; may be called twice. `because`: of a fault, after which none is waited for."""
        self._end(0.0 if because else END_S, because or "the ranks were ended")

    # --- the ranks' life

    def _wait_for_steps(self, num_steps: int) -> None:
        for node in self._nodes:
            node.wait_for_steps(num_steps, self._is_over)

    @property
    def _nodes(self) -> Sequence[RankNode]:
        return self._machines.nodes

    def _wait_until_loaded(self, times: StartupTimes) -> None:
        while len(self._loaded) < self._size:
            self._take_in(LOAD_LOOK_S)
            times.relay(*least_progress([rank for node in self._nodes for rank in node.progress()]))
        times.include(self._loaded[0].seconds)

    def _agreed(self, own: str) -> Loaded:
        """What the ranks loaded.

        Raises:
            ConfigError: one of them has other code or another configuration, or another pool.
        """
        first = self._loaded[0]
        for number, loaded in self._loaded.items():
            if loaded.digest != own:
                raise ConfigError(
                    f"{self._name(number)} runs other code or has another configuration than the engine: install one "
                    "version of pagefleet, and start the engine again"
                )
            if (loaded.num_blocks, loaded.max_model_len) != (first.num_blocks, first.max_model_len):
                raise ConfigError(
                    f"{self._name(number)} has {loaded.num_blocks} KV blocks where rank 0 has {first.num_blocks}: give "
                    "--num-kv-blocks"
                )
        return first

    def _end(self, within_s: float, why: str) -> None:
        if self._over:
            return
        self._over = why
        for node in self._nodes:
            node.leave(why) if within_s else node.kill(why)
        self._commands.close()
        deadline = time.monotonic() + within_s
        for node in self._nodes:
            node.end(max(0.0, deadline - time.monotonic()))
        self._machines.close()

    # --- what they tell

    def _is_over(self) -> bool:
        """Whether a rank is gone; of any thread. That which else sees it may be the one that waits, or wait for it."""
        return bool(self._over) or any(node.ended() is not None for node in self._nodes)

    def _raise_over(self) -> None:
        if self._over:
            raise EngineDead(self._over)

    def _send(self, parts: Sequence[Buffer], by: Callable[..., None] | None = None) -> None:
        self._raise_over()
        now = time.monotonic()
        if self._watch.is_due(now):
            self._look(now)
        (by or self._commands.send)(parts, self.check)

    def _take_in(self, timeout_s: float) -> None:
        """Wait for the ranks, and take in what they told.

        Raises:
            EngineDead: one is gone, or hangs.
        """
        self._raise_over()
        ready = {fd for fd, _ in self._poll.poll(timeout_s * 1000)}
        rung = [node for node in self._nodes if node.bell in ready]
        for node in rung:
            for number, reply in node.receive():
                self._hear(number, reply)
        for node in rung:
            if (ended := node.ended()) is not None:
                self._raise_ended(*ended)
        now = time.monotonic()
        if self._watch.is_due(now):
            self._look(now)

    def _hear(self, number: int, reply: Reply) -> None:
        match reply:
            case Taken(step_id, result, idle_seconds, expert_load):
                self._taken[step_id], self.idle_seconds = result, idle_seconds
                self.expert_load = expert_load
                self._newest_taken = step_id
            case Computed(step_id):
                self._computed = step_id
            case StepFailed(step_id):
                self._failed.setdefault(step_id, {})[number] = reply
            case Loaded():
                self._loaded[number] = reply
            case Traced() if self._traced is not None:
                self._traced[number] = reply
            case StartFailed():
                raise reply.error(self._name(number))

    def _ask_for_traces(self, command: StartTrace | StopTrace) -> Mapping[str, Traced]:
        answers: dict[int, Traced] = {}
        self._traced = answers
        try:
            self._send(encode(command))
            until = time.monotonic() + TRACE_S
            while len(answers) < self._size:
                if time.monotonic() > until:
                    late = min(set(range(self._size)) - answers.keys())
                    self._die(f"{self._name(late)} did not answer about its profile: the engine must be started again")
                self._take_in(LOOK_S)
        finally:
            self._traced = None
        return {self._name(number): answer for number, answer in sorted(answers.items())}

    def _look(self, now: float) -> None:
        if len(self._loaded) < self._size or self._traced is not None:
            return  # a library that is imported, or writes, may keep the interpreter for itself
        if (found := self._watch.look([one for node in self._nodes for one in node.signs()], now)) is not None:
            number, how = found
            self._die(f"{self._name(number)} {how}: the engine must be started again")

    def _raise_ended(self, number: int, status: str) -> None:
        if len(self._loaded) < self._size:
            remedy = "the machine's memory did not suffice, probably" if status == _KILLED else "its log says why"
            raise ModelLoadError(f"{self._name(number)} {status} while it loaded: {remedy}")
        remedy = "; where nobody did that, the machine's memory did not suffice" if status == _KILLED else ""
        self._die(f"{self._name(number)} {status}{remedy}: the engine must be started again")

    def _has_ended(self, step_id: int) -> bool:
        """Whether the last stage is done with a step, and all has been heard that others told before."""
        sampling = range(self._size - self._abreast, self._size)
        if step_id not in self._taken and not self._failed.get(step_id, {}).keys() >= set(sampling):
            return False
        if self.num_stages > 1:
            self._take_in(0.0)
        return True

    def _is_joint(self, failed: Mapping[int, StepFailed]) -> bool:
        """Whether a step failed on all ranks of each stage where it failed on one."""
        stages = [rank // self._abreast for rank in failed]
        return all(stages.count(stage) == self._abreast for stage in stages)

    def _raise_disagreement(self, but_now: int | None = None) -> None:
        """Raises EngineDead where a step failed on some ranks of a stage, which therefore know other tokens or K/V than
        the rest, or on a stage that had sent on what it computed, so that its tokens are out."""
        for step_id, failed in self._failed.items():
            is_heard = step_id <= self._newest_taken or step_id == but_now
            if step_id <= self._newest_returned or (is_heard and not self._is_joint(failed)):
                number, reply = min(failed.items())
                before = "lower --gpu-memory-utilization or --max-num-batched-tokens; " if reply.out_of_memory else ""
                self._die(
                    f"{self._name(number)} could not compute a step that others could ({reply.message}): {before}the "
                    "engine must be started again"
                )

    def _failure(self, step_id: int) -> Exception:
        failed = self._failed.pop(step_id)
        number, first = min(failed.items())
        if all(one.out_of_memory for one in failed.values()):
            return StepOutOfMemory(first.message)
        return RuntimeError(f"{self._name(number)}: {first.message}")

    def _die(self, message: str) -> None:
        """End all ranks.

        Raises:
            EngineDead: always.
        """
        self._end(0.0, message)
        raise EngineDead(message)

    def _name(self, number: int) -> str:
        host = next(node.host for node in self._nodes if number in node.ranks)
        return f"rank {number} on {host}"


@dataclass(frozen=True, slots=True)
class _RankStep:
    """A step that the ranks are working on; implements `PendingStep`."""

    executor: ProcessExecutor
    step_id: int

    @property
    def is_computed(self) -> bool:
        """See PendingStep."""
        return self.executor.is_computed(self.step_id)

    def sample(self, masks: StepMasks) -> None:
        """See PendingStep. That a device had no room for it shows in the result."""
        self.executor.sample(masks)

    def result(self) -> StepResult:
        """See PendingStep."""
        return self.executor.take(self.step_id)
