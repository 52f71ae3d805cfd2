"""What both engines of a pair are told of a transfer of K/V between them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kv_handoff import KvTransfer, OnFailure

from pagefleet_router.endpoints import EngineView
from pagefleet_router.scheduling.policy import Choice


@dataclass(frozen=True, slots=True)
class Transfer:
    """One attempt to answer a request with two engines."""

    id: str
    prefill: str
    """Header's value for the prefill engine."""
    decode: str
    """The same for the decode engine."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Makes transfers that engines believe in.

    Args:
        key: of the fleet.
        fallback: what a decode engine does in the end without the K/V.
    """

    key: FleetKey
    fallback: OnFailure

    def make(self, choice: Choice, on_failure: OnFailure) -> Transfer:
        """Return a new transfer between the engines of a choice.

        Args:
            choice: of two engines whose facts are known.
            on_failure: what the decode engine does without the K/V.
        """
        assert choice.prefill is not None
        prefill, decode = choice.prefill.engine, choice.engine
        assert prefill.facts is not None
        assert decode.facts is not None
        number = secrets.token_hex(16)
        asked = KvTransfer("prefill", number, decode.facts.incarnation)
        asks = KvTransfer("decode", number, prefill.facts.incarnation, control_address(prefill), on_failure)
        return Transfer(
            number,
            asked.encode(self.key, prefill.facts.incarnation),
            asks.encode(self.key, decode.facts.incarnation),
        )


def control_address(engine: EngineView) -> str:
    """Return HOST:PORT of an engine's control socket, which is on the host of its HTTP address."""
    assert engine.facts is not None
    assert engine.facts.kv_transfer is not None
    host = engine.endpoint.url.removeprefix("http://").rpartition(":")[0]
    return f"{host}:{engine.facts.kv_transfer.port}"
