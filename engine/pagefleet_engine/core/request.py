"""One request inside the scheduler: its tokens, how far it is computed, and where it stands.

There is no prefill and no decode state: a running request is behind by `num_tokens - num_computed_tokens` tokens, and
each step lets it catch up with some of them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from pagefleet_protocol.block_hash import BlockHash, PrefixScope, root_hash

from pagefleet_engine.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """WAITING -> RUNNING -> FINISHED, with RUNNING -> PREEMPTED -> RUNNING as often as memory demands."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are those of the OpenAI API, `abort` and `error` added."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of one request; owned by the scheduler from `add` until it ends."""

    request_id: str
    prompt_token_ids: InitVar[Sequence[int]]
    sampling: SamplingParams
    eos_token_ids: Sequence[int]
    scope: PrefixScope
    """Cached blocks are shared only within one scope."""
    priority: int = 0

    token_ids: list[int] = field(init=False)
    """Prompt, then output."""
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False, default=0)
    """Tokens whose K/V is in this request's blocks."""
    num_cached_tokens: int = field(init=False, default=0)
    """Prompt tokens that came from the prefix cache on the first admission."""
    num_preemptions: int = field(init=False, default=0)
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    arrival: int = field(init=False, default=0)
    """Counter given by the scheduler: unique, and rising in order of `add`."""
    queued_at: float = field(init=False, default=0.0)
    """Monotonic seconds at `add`."""
    queued_tokens_ahead: int = field(init=False, default=0)
    """Tokens in the queue at `add`, this request's own included."""

    prefix_root: BlockHash = field(init=False)
    block_hashes: list[BlockHash] = field(init=False, default_factory=list)
    """Of the first full blocks of `token_ids`; extended by the KV cache when it needs more."""

    num_prompt_logprobs: int = field(init=False, default=0)
    """Prompt positions whose log-probabilities were reported."""
    num_repeated_prompt_logprobs: int = field(init=False, default=0)
    """Of those, how many a recomputation has still to produce again, to be dropped."""

    def __post_init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.prefix_root = root_hash(self.scope)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """False when prompt log-probabilities are asked for: a cached position has no logits, so all are computed."""
        return self.sampling.prompt_logprobs is None

    def start(self) -> None:
        """Enter the running set."""
        self.status = RequestStatus.RUNNING

    def preempt(self) -> None:
        """Lose the blocks; everything known will be computed again."""
        self.status = RequestStatus.PREEMPTED
        self.num_computed_tokens = 0
        self.num_preemptions += 1
        self.num_repeated_prompt_logprobs = self.num_prompt_logprobs

    def finish(self) -> None:
        """End, for whatever reason."""
        self.status = RequestStatus.FINISHED
