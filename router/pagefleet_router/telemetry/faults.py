"""What can go wrong at a router, in words for whoever looks at the console, with what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pagefleet_protocol.fault_book import FaultKind

from pagefleet_router.errors import Failure

_ITS_LOG = "Its log says why: the most frequent reason is a lack of memory."
_NO_KV = "The prompt was computed again. If it lasts, look at the network between the two and at their fleet keys."

FAILURES: Mapping[Failure, FaultKind] = {
    Failure.REFUSED: FaultKind("Nothing listens at the address of engine {engine}.", f"See if it runs. {_ITS_LOG}"),
    Failure.UNREACHABLE: FaultKind(
        "Engine {engine} took no connection in time.",
        "Look at the network between router and engine, and at the load of the engine's machine.",
    ),
    Failure.RESET: FaultKind("Engine {engine} was lost while it had a request.", _ITS_LOG),
    Failure.SILENT: FaultKind(
        "Engine {engine} said nothing for longer than --gap-timeout or --first-byte-timeout allows.",
        "Look whether it hangs; where long prompts are usual, allow more time.",
    ),
    Failure.STUCK: FaultKind("Engine {engine} has work but makes no progress.", "Its log says at what; restart it."),
    Failure.GARBAGE: FaultKind(
        "What engine {engine} answered is not HTTP.", "See what listens at its address: it may be another program."
    ),
    Failure.STATUS: FaultKind("Engine {engine} failed to answer a request.", _ITS_LOG),
    Failure.OWN: FaultKind(
        "Engine {engine} says that a request itself makes it fail.",
        "Its log has the request's id and the error; it is worth a report.",
    ),
    Failure.ENDING: FaultKind("Engine {engine} ended while it had a request.", _ITS_LOG),
    Failure.STOPPING: FaultKind(
        "Engine {engine} was told to stop while it had a request.", "Nothing, if you stopped it; the request went on."
    ),
    Failure.DECLINED: FaultKind(
        "Engine {engine} had no room for a stream that was to go on there.", "Add engines: the fleet is full."
    ),
    Failure.STRANGER: FaultKind(
        "An engine of another model answers at the address of {engine}.", "Correct the list of engines."
    ),
    Failure.KV_LOST: FaultKind("K/V of prompts did not come from, or to, engine {engine}.", _NO_KV),
    Failure.HANDOFF: FaultKind(
        "Engine {engine} does not believe what this router says of a transfer.",
        "Give the router and all engines the same --fleet-key-file and restart them.",
    ),
    Failure.REJECTED: FaultKind(
        "Prefill engine {engine} rejected a prompt.", "Nothing: the engine that answers tells the client what is wrong."
    ),
}
EJECTED: Final = FaultKind(
    "Engine {engine} failed several requests in a row and gets none for a while.", f"It is tried again. {_ITS_LOG}"
)
NOT_READY: Final = FaultKind(
    "Engine {engine} is not ready any more: {detail}.", "See its log; a drain or a rollout needs nothing."
)
NOT_A_NUMBER: Final = FaultKind(
    "Engine {engine} ended requests because the model's output was not a number.",
    "Use another --dtype or other weights: these numbers do not fit the type.",
)
OUT_OF_MEMORY: Final = FaultKind(
    "Engine {engine} had no memory left in a step, and its requests ended with an error.",
    "Lower --max-num-batched-tokens, --max-num-seqs or --gpu-memory-utilization.",
)
REFUSED: Mapping[str, FaultKind] = {
    "queue_full": FaultKind(
        "Requests were turned away: too many wait already.", "Add engines, or let more wait by --queue-size."
    ),
    "queue_timeout": FaultKind(
        "Requests were turned away: they waited too long for an engine with room.",
        "Add engines, or let them wait longer by --queue-timeout.",
    ),
    "rate_limit_exceeded": FaultKind(
        "Requests were turned away: a key's limit of requests or tokens per minute is reached.",
        "Raise rpm= or tpm= in the key file, if the limit is not meant.",
    ),
    "no_engine_ready": FaultKind(
        "Requests were turned away: no engine is ready.",
        "See the engines' phases; `pagefleet up` and kubectl say more.",
    ),
}
UNLISTED: Final = FaultKind("The engines are not known: {detail}.", "See the router's log; it tries again by itself.")
