"""One request inside the scheduler: its tokens, how far it is computed, and where it stands.

There is no prefill and no decode state: a running request is behind by some tokens, and each step lets it catch up with
some of them. Steps overlap, so a token may be counted (`num_pending`) and computed before it is known here which it is:

    tokens            |<------------ token_ids ------------>|<- num_pending ->|
    K/V in pages      |<------- num_computed_tokens ------->|                       once the launched steps have run
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from pagefleet_protocol.block_hash import BlockHash, PrefixScope, root_hash
from pagefleet_protocol.kv_handoff import KvTransfer
from pagefleet_protocol.sampling_params import SamplingParams

from pagefleet_engine.grammars.port import Matcher


class RequestStatus(enum.Enum):
    """WAITING -> RUNNING -> FINISHED, with RUNNING -> PREEMPTED -> RUNNING as often as memory demands.

    From WAITING or PREEMPTED it may go by PARKED, for what it needs before it can run, and back.
    """

    WAITING = enum.auto()
    PARKED = enum.auto()
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
    resumed_token_ids: InitVar[Sequence[int]] = ()
    """Output that it comes with: another engine has told it already, and this one goes on from there."""
    transfer: KvTransfer | None = None
    """The leg of a P/D transfer that this request is, if any."""

    token_ids: list[int] = field(init=False)
    """Prompt, then output."""
    num_prompt_tokens: int = field(init=False)
    num_given_tokens: int = field(init=False)
    """Tokens that it came with: the prompt, and the output that it resumes."""
    num_computed_tokens: int = field(init=False, default=0)
    """Tokens whose K/V is in this request's blocks as soon as the steps launched so far have run."""
    num_pending: int = field(init=False, default=0)
    """Tokens that launched steps sample and that are not in `token_ids` yet."""
    room: int = field(init=False, default=0)
    """Tokens up to which its blocks need no change; kept by the KV cache."""
    ends_at: int = field(init=False, default=0)
    """Number of tokens at which it has to end; given by the scheduler, which never goes beyond."""
    ending_token_ids: frozenset[int] = field(init=False)
    """Tokens that may end it before that."""
    num_cached_tokens: int = field(init=False, default=0)
    """Prompt tokens that came from the prefix cache on the first admission."""
    num_preemptions: int = field(init=False, default=0)
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    arrival: int = field(init=False, default=0)
    """Counter given by the scheduler: unique, and rising in order of `add`."""
    kv_wait_s: float = field(init=False, default=0.0)
    """Seconds that it was parked for K/V from elsewhere, over all times but one that goes on."""
    parked_at: float = field(init=False, default=0.0)
    """Monotonic seconds."""
    queued_at: float = field(init=False, default=0.0)
    """Monotonic seconds at `add`."""
    scheduled_at: float = field(init=False, default=0.0)
    """Monotonic seconds at its first admission to the running set."""
    queued_tokens_ahead: int = field(init=False, default=0)
    """Tokens in the queue at `add`, this request's own included."""

    prefix_root: BlockHash = field(init=False)
    block_hashes: list[BlockHash] = field(init=False, default_factory=list)
    """Of the first full blocks of `token_ids`; extended by the KV cache when it needs more."""

    matcher: Matcher | None = field(init=False, default=None)
    """Follows the output through its form; None where it has none, or waits for it."""
    untold: list[int] = field(init=False, default_factory=list)
    """The last of the known tokens, as far as the worker has not heard of them."""
    unshared: Sequence[int] = field(init=False, default=())
    """The last of the known tokens, as far as the stages that did not sample them have not heard of them."""

    num_prompt_logprobs: int = field(init=False, default=0)
    """Prompt positions whose log-probabilities were reported."""
    num_repeated_prompt_logprobs: int = field(init=False, default=0)
    """Of those, how many a recomputation has still to produce again, to be dropped."""

    def __post_init__(self, prompt_token_ids: Sequence[int], resumed_token_ids: Sequence[int]) -> None:
        self.token_ids = [*prompt_token_ids, *resumed_token_ids]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_given_tokens = len(self.token_ids)
        self.prefix_root = root_hash(self.scope)
        eos_token_ids = () if self.sampling.ignore_eos else self.eos_token_ids
        self.ending_token_ids = frozenset((*eos_token_ids, *self.sampling.stop_token_ids))

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens put out so far, here or by another engine."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """False when prompt log-probabilities are asked for: a cached position has no logits, so all are computed."""
        return self.sampling.prompt_logprobs is None

    def limit(self, max_model_len: int) -> None:
        """Set where it has to end: `max_tokens` after the prompt (None: no limit), but not past the context."""
        wanted = self.sampling.max_tokens
        self.ends_at = max_model_len if wanted is None else min(max_model_len, self.num_prompt_tokens + wanted)

    def park(self, now: float) -> None:
        """Wait off the queue; it may be there already."""
        if self.status is not RequestStatus.PARKED:
            self.parked_at = now
        self.status = RequestStatus.PARKED

    def unpark(self) -> None:
        """Need nothing more; as what it was before."""
        self.status = RequestStatus.PREEMPTED if self.num_preemptions else RequestStatus.WAITING

    def start(self) -> None:
        """Enter the running set."""
        self.status = RequestStatus.RUNNING

    def preempt(self) -> None:
        """Lose the blocks; what is known will be computed again, and what is pending sampled again."""
        self.status = RequestStatus.PREEMPTED
        self.num_computed_tokens = 0
        self.num_pending = 0
        self.room = 0
        self.untold.clear()
        self.unshared = ()
        self.num_preemptions += 1
        self.num_repeated_prompt_logprobs = self.num_prompt_logprobs

    def finish(self) -> None:
        """End, for whatever reason."""
        self.status = RequestStatus.FINISHED
