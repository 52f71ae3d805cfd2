"""The two legs of a request whose prompt one engine computes and another goes on from, as HTTP has them.

A router sends the same body to both, with a signed header. The prefill leg computes the prompt and one token that
nobody reads; its K/V goes to the decode leg's engine, which waits for it and then answers the client.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kv_handoff import KV_TRANSFER, KvHandoffError, KvTransfer, decode_kv_transfer
from pagefleet_protocol.sampling_params import SamplingParams
from starlette.datastructures import Headers

from pagefleet_engine.client.stream import Chunks, Generation
from pagefleet_engine.errors import InvalidRequest
from pagefleet_engine.server.request_ids import new_id
from pagefleet_engine.server.responses import WholeResponse
from pagefleet_engine.server.service import Service
from pagefleet_engine.server.tracing import Arrival

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)


@dataclass(frozen=True, slots=True)
class TransferReader:
    """Reads the header for one incarnation of an engine of the fleet."""

    key: FleetKey
    incarnation: str

    def read(self, headers: Headers) -> KvTransfer | None:
        """Return what the header says; None where there is none.

        Raises:
            KvHandoffError: it comes twice, or no router of this fleet wrote it for this engine.
        """
        values = headers.getlist(KV_TRANSFER)
        if len(values) > 1:
            raise KvHandoffError(f"{KV_TRANSFER} comes more than once")
        return decode_kv_transfer(values[0], self.key, self.incarnation) if values else None


class PrefillAnswer(msgspec.Struct, frozen=True):
    """What the prefill leg answers once the prompt is computed."""

    transfer_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of them, found in this engine's cache."""


def check_one_prompt(transfer: KvTransfer | None, num_prompts: int) -> None:
    """Refuse a leg for several prompts: a transfer has the K/V of one.

    Raises:
        InvalidRequest: there are more.
    """
    if transfer is not None and num_prompts != 1:
        raise InvalidRequest(f"{KV_TRANSFER} goes with one prompt.", None, "invalid_handoff")


def prefill_response(service: Service, asked: Generation, arrival: Arrival) -> WholeResponse:
    """Return the answer of a prefill leg, which computes the prompt when it is sent."""
    leg = replace(asked, request_id=new_id("prefill"), sampling=ONE_TOKEN)
    return WholeResponse(_answer(leg, service.generate(leg, arrival)), service.open_requests)


async def _answer(leg: Generation, chunks: Chunks) -> AsyncGenerator[bytes, None]:
    num_cached = 0
    async with aclosing(chunks):
        async for _, chunk in chunks:
            num_cached += chunk.num_cached_tokens or 0
    assert leg.transfer is not None
    yield msgspec.json.encode(PrefillAnswer(leg.transfer.transfer_id, leg.num_prompt_tokens, num_cached))
