"""How many ranks one model is spread over, and which is which. Knows no torch, as configuration does not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pagefleet_protocol.model_config.stages import stage_sizes
from pagefleet_protocol.settings.fields import Between, HostName, Port, Seconds, Spellings, Words, check_limits

from pagefleet_engine.errors import ConfigError

ExecutorBackend = Annotated[Literal["mp", "ray"], Spellings({"uni": "mp"})]
All2All = Literal["allgather_reducescatter", "all2allv"]
# More than any machine has devices; a rank is a process.
_Ranks = Annotated[int, Between(1, 1024)]


@dataclass(frozen=True, slots=True)
class RankPart:
    """Which part of the model a rank has: of which stage of the pipeline, and as which of its tensor ranks."""

    stage: int = 0
    num_stages: int = 1
    tensor: int = 0
    tensor_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it is in the stage that takes tokens in."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it is in the stage that samples."""
        return self.stage == self.num_stages - 1

    @property
    def tells(self) -> bool:
        """Whether it is the one of those that sample which tells of the tokens."""
        return self.is_last and self.tensor == 0


WHOLE = RankPart()
"""Of a rank that is alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The ranks of one engine."""

    tensor_parallel_size: _Ranks = 1
    """Ranks that each layer is divided among, a process with a GPU of its own each, or with its share of the
    processor."""
    enable_sequence_parallelism: bool = False
    """Tensor ranks normalise and add up tokens of their own only, and gather them before each product: for long
    prompts."""
    enable_expert_parallel: bool = False
    """Ranks have some experts of a mixture whole, not a part of each; data ranks then have each expert once among them,
    and step together."""
    all2all_backend: All2All = "allgather_reducescatter"
    """How tokens get to experts of other data ranks: allgather_reducescatter has every rank see all tokens, all2allv
    sends a rank those that want its experts."""
    enable_eplb: bool = False
    """Experts move between ranks as they are wanted, so that all have as much to compute."""
    num_redundant_experts: Annotated[int, Between(0, 4096)] = 0
    """Second places of experts in each layer, for those that are wanted most, shared out among the ranks."""
    eplb_window_size: Annotated[int, Between(1, 1_000_000)] = 1000
    """Latest steps that tell how much each expert is wanted."""
    eplb_step_interval: Annotated[int, Between(1, 1_000_000)] = 3000
    """Steps from one time that experts move to the next."""
    enable_dbo: bool = False
    """With experts that data ranks share, compute large steps as two halves: one computes while tokens of the other
    travel between ranks."""
    dbo_decode_token_threshold: Annotated[int, Between(1, 1_000_000)] = 32
    """Tokens from which on a step that only decodes is computed so, where all ranks have as many."""
    dbo_prefill_token_threshold: Annotated[int, Between(1, 1_000_000)] = 512
    """The same for steps with tokens of prompts."""
    pipeline_parallel_size: _Ranks = 1
    """Stages of consecutive layers, through which batches of requests pass one behind another: a process each, times
    tensor_parallel_size."""
    pipeline_layers: Annotated[str, Words()] | None = None
    """How many layers each stage has, e.g. 10,12,10; default: as equal as can be, what is over not to the last."""
    data_parallel_size: _Ranks = 1
    """Copies of the model behind one port, each on GPUs of its own, or with its share of the processor: a request goes
    to the one that has its beginning cached, or has least to do. --max-num-seqs and the like are for each."""
    data_parallel_multi_port_external_lb: bool = False
    """Each copy serves on a port of its own instead: port, the next one, and so on, for a router that chooses."""
    data_parallel_rank: Annotated[int, Between(0, 1023)] | None = None
    """Serve this one of data_parallel_size copies alone, on the GPUs that are seen first, with its share of the
    processor: you start the others. Default: all copies."""
    nnodes: _Ranks = 1
    """Machines that the ranks of all copies are on, as many on each, in their order; one runs the server, the others
    --headless."""
    node_rank: Annotated[int, Between(0, 1023)] = 0
    """Which of nnodes machines this is; 0 is the one with the server."""
    master_addr: HostName | None = None
    """Name or address of machine 0, by which the others reach it."""
    master_port: Annotated[Port, Between(1, 65535)] = 29500
    """Port of machine 0 where the others come; of each further copy of the model the next one."""
    rank_wait_timeout: Annotated[Seconds, Between(0, over=True)] = 600.0
    """Seconds that machine 0 waits for the others to come, before it gives up."""
    distributed_executor_backend: ExecutorBackend = "mp"
    """mp: ranks are processes that this program starts; ray: each is an actor that Ray places."""

    def __post_init__(self) -> None:
        check_limits(self, ConfigError)
        if self.enable_sequence_parallelism and self.tensor_parallel_size == 1:
            raise ConfigError(
                "enable_sequence_parallelism divides tokens among tensor ranks, and tensor_parallel_size is 1: raise "
                "it, or leave enable_sequence_parallelism out"
            )
        if self.enable_expert_parallel and self.tensor_parallel_size == self.data_ranks == 1:
            raise ConfigError(
                "enable_expert_parallel divides experts among ranks, and there is one: raise tensor_parallel_size, or "
                "data_parallel_size of copies behind one port, or leave enable_expert_parallel out"
            )
        if self.enable_eplb and not self.enable_expert_parallel:
            raise ConfigError(
                "enable_eplb moves whole experts between ranks: give enable_expert_parallel, or leave it out"
            )
        if self.num_redundant_experts and not self.enable_eplb:
            raise ConfigError(
                f"num_redundant_experts is {self.num_redundant_experts}, and experts stay where they are: give "
                "enable_eplb, or leave it out"
            )
        if self.enable_dbo and not self.shares_experts:
            raise ConfigError(
                "enable_dbo computes while tokens travel to experts of other data ranks: give enable_expert_parallel "
                "and data_parallel_size of copies behind one port, or leave enable_dbo out"
            )
        self._check_copies()
        self._check_nodes()
        if self.pipeline_layers is not None:
            self._given_layers()

    @property
    def world_size(self) -> int:
        """Ranks of one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def data_ranks(self) -> int:
        """Copies of the model behind one port."""
        alone = self.data_parallel_multi_port_external_lb or self.data_parallel_rank is not None
        return 1 if alone else self.data_parallel_size

    @property
    def shares_experts(self) -> bool:
        """Whether copies behind one port have each expert once among them."""
        return self.enable_expert_parallel and self.data_ranks > 1

    @property
    def is_networked(self) -> bool:
        """Whether there are ranks that are reached over the network."""
        return self.nnodes > 1 or self.distributed_executor_backend == "ray"

    @property
    def is_alone(self) -> bool:
        """Whether one rank computes all, in the engine core's own process."""
        return self.world_size == 1 and not self.is_networked

    def describe(self) -> str:
        """Return what makes it several ranks, for an error."""
        if self.tensor_parallel_size > 1:
            return f"tensor_parallel_size is {self.tensor_parallel_size}"
        return f"pipeline_parallel_size is {self.pipeline_parallel_size}"

    @property
    def copies_a_node(self) -> int:
        """Copies of the model that have ranks on one machine."""
        return max(1, self.data_parallel_size // self.nnodes)

    def copies_on(self, node: int) -> range:
        """The copies that have ranks on a machine: of those behind one port, if there are several machines."""
        first = node * self.data_parallel_size // self.nnodes
        return range(first, first + self.copies_a_node)

    def nodes_of(self, copy: int) -> range:
        """The machines that a copy's ranks are on."""
        first = copy * self.nnodes // self.data_parallel_size
        return range(first, first + max(1, self.nnodes // self.data_parallel_size))

    def ranks_of(self, node: int, copy: int = 0) -> range:
        """The numbers of a copy's ranks on a machine."""
        nodes = self.nodes_of(copy)
        if node not in nodes:
            return range(0)
        each = self.world_size // len(nodes)
        return range((node - nodes.start) * each, (node - nodes.start + 1) * each)

    def index_on_node(self, copy: int) -> int:
        """Which of the copies on one of several machines a copy is; 0 where there is one machine, whose copies see
        nothing of each other's devices."""
        return 0 if self.nnodes == 1 else copy - self.copies_on(self.nodes_of(copy).start).start

    def port_of(self, copy: int) -> int:
        """Port of machine 0 where other machines come for a copy's ranks."""
        return self.master_port + copy

    def part(self, rank: int) -> RankPart:
        """Of a rank, by its number: those of the first stage come first."""
        stage, tensor = divmod(rank, self.tensor_parallel_size)
        return RankPart(stage, self.pipeline_parallel_size, tensor, self.tensor_parallel_size)

    def name(self, rank: int, copy: int | None = None) -> str:
        """What a rank is called in the log: by its number, and by its copy, stage and node where there are several."""
        part, more = self.part(rank), []
        if (copy := self.data_parallel_rank if copy is None else copy) is not None:
            more.append(f"copy {copy}")
        if part.num_stages > 1:
            more.append(f"stage {part.stage}")
            if part.tensor_size > 1:
                more.append(f"tensor rank {part.tensor}")
        if self.nnodes > 1:
            nodes = self.nodes_of(copy or 0)
            more.append(f"node {nodes[rank * len(nodes) // self.world_size]}")
        return f"rank {rank} ({', '.join(more)})" if more else f"rank {rank}"

    def check_experts(self, num_experts: int) -> None:
        """Raises ConfigError where these cannot be divided as was asked for; 0: the model has none."""
        if not self.enable_expert_parallel:
            return
        if not num_experts:
            raise ConfigError("enable_expert_parallel divides experts, and the model has none: leave it out")
        ranks = self.tensor_parallel_size * self.data_ranks
        if num_experts < ranks:
            raise ConfigError(
                f"{num_experts} experts cannot be divided among {ranks} ranks (tensor_parallel_size times "
                "data_parallel_size): give fewer ranks, or leave enable_expert_parallel out"
            )
        if self.num_redundant_experts > num_experts * (ranks - 1):
            raise ConfigError(
                f"num_redundant_experts is {self.num_redundant_experts}, and {num_experts} experts on each of {ranks} "
                f"ranks are {num_experts * (ranks - 1)} more: give that at most"
            )

    def stage_layers(self, num_layers: int, latest_start: int) -> Sequence[range]:
        """Each stage's of a model's layers; none begins behind `latest_start`.

        Raises:
            ConfigError: there are fewer layers than stages, or the numbers that were given do not add up, or part
                layers that have to be together.
        """
        stages = self.pipeline_parallel_size
        if latest_start < stages - 1:
            together = num_layers - latest_start
            which = f", the last {together} of which have to be together" if together > 1 else ""
            raise ConfigError(
                f"pipeline_parallel_size is {stages}, and the model has {num_layers} layers{which}: "
                f"give {latest_start + 1} at most"
            )
        if self.pipeline_layers is None:
            sizes = stage_sizes(num_layers, stages, latest_start)
        else:
            sizes = self._given_layers()
            if sum(sizes) != num_layers:
                raise ConfigError(
                    f"pipeline_layers {self.pipeline_layers} are {sum(sizes)} layers, and the model has {num_layers}: "
                    "give numbers that add up to it"
                )
            if num_layers - sizes[-1] > latest_start:
                raise ConfigError(
                    f"pipeline_layers is {self.pipeline_layers}, and the last {num_layers - latest_start} layers read "
                    "what some of them keep: give the last stage as many at least"
                )
        ends = [0, *itertools.accumulate(sizes)]
        return [range(start, stop) for start, stop in itertools.pairwise(ends)]

    def _check_copies(self) -> None:
        size, rank = self.data_parallel_size, self.data_parallel_rank
        if rank is not None and rank >= size:
            raise ConfigError(f"data_parallel_rank is {rank}, and data_parallel_size {size}: give 0 to {size - 1}")
        if self.data_parallel_multi_port_external_lb and (size == 1 or rank is not None):
            given = "data_parallel_size is 1" if rank is None else "data_parallel_rank names one copy"
            raise ConfigError(
                f"data_parallel_multi_port_external_lb starts all of several copies, and {given}: change either"
            )

    def _check_nodes(self) -> None:
        nodes = self.nnodes
        if self.node_rank >= nodes:
            raise ConfigError(f"node_rank is {self.node_rank}, and nnodes {nodes}: give 0 to {nodes - 1}")
        if nodes == 1:
            return
        if self.distributed_executor_backend == "ray":
            raise ConfigError("Ray finds the machines by itself: leave nnodes out, or distributed_executor_backend")
        if self.master_addr is None:
            raise ConfigError(f"nnodes is {nodes}: name machine 0 by master_addr, as the others reach it")
        copies = self.data_parallel_size
        if copies % nodes and (nodes % copies or self.world_size * copies % nodes):
            raise ConfigError(
                f"{self.world_size * copies} ranks (tensor_parallel_size times pipeline_parallel_size times "
                f"data_parallel_size) cannot be divided among {nodes} nodes: give a number of nodes that divides them, "
                "and that divides data_parallel_size or is a multiple of it"
            )
        if self.port_of(copies - 1) > 65535:
            raise ConfigError(
                f"other nodes come to port {self.port_of(copies - 1)} for the last of {copies} copies, and ports end "
                "at 65535: give a lower master_port"
            )

    def _given_layers(self) -> list[int]:
        words, stages = (self.pipeline_layers or "").split(","), self.pipeline_parallel_size
        if len(words) != stages or not all(word.strip().isdecimal() and int(word) > 0 for word in words):
            raise ConfigError(
                f"pipeline_layers is {self.pipeline_layers}: give {stages} numbers of layers with commas between them, "
                "one for each of pipeline_parallel_size stages"
            )
        return [int(word) for word in words]
