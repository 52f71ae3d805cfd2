import asyncio
import contextlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.engine_core.messages import AbortRequests, AddRequest, ResetPrefixCache, StartFailed
from pagefleet_engine.engine_core.transport import (
    MAX_TURN_BYTES,
    BadMessage,
    ClientSocket,
    CoreSocket,
    decode_from_core,
    decode_to_core,
    socket_address,
)
from pagefleet_protocol.sampling_params import SamplingParams

REQUEST = AddRequest("r", [1, 2], SamplingParams(temperature=0.5, stop=("x",), logit_bias={3: 1.5}), (7,), 1, "salt")


@pytest.mark.parametrize("message", [REQUEST, AbortRequests(["a", "b"]), ResetPrefixCache()])
def test_messages_survive_the_wire(message: Any) -> None:
    assert decode_to_core(msgspec.msgpack.encode(message)) == message


@given(st.binary(max_size=200))
def test_garbage_is_never_anything_but_a_bad_message(data: bytes) -> None:
    for decode in (decode_to_core, decode_from_core):
        with contextlib.suppress(BadMessage):
            assert isinstance(decode(data), msgspec.Struct)


def test_deep_nesting_is_a_bad_message() -> None:
    with pytest.raises(BadMessage):
        decode_to_core(b"\x91" * 100_000)


def test_a_request_with_parameters_out_of_range_names_its_id() -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(REQUEST))
    fields[3] = {"temperature": 9.0}
    with pytest.raises(BadMessage, match="temperature") as caught:
        decode_to_core(msgspec.msgpack.encode(fields))
    assert caught.value.request_id == "r"


@pytest.mark.parametrize("token", [True, "1", 1.5, None])
def test_a_token_that_is_no_integer_is_refused(token: object) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(REQUEST))
    fields[2] = [token]
    with pytest.raises(BadMessage):
        decode_to_core(msgspec.msgpack.encode(fields))


def test_both_ends_talk(tmp_path: Path) -> None:
    async def talk() -> None:
        client = ClientSocket(f"ipc://{tmp_path / 's'}")
        core = CoreSocket([f"ipc://{tmp_path / 's'}"])
        client.send(ResetPrefixCache())
        client.send_bytes(b"\xc1")
        received: list[tuple[int, bytes]] = []
        while len(received) < 2:
            received += await asyncio.to_thread(core.receive, 5.0)
        assert decode_to_core(received[0][1]) == ResetPrefixCache()
        assert received[1] == (0, b"\xc1")
        core.send(StartFailed("why"))
        assert decode_from_core(await client.receive()) == StartFailed("why")
        assert core.receive(0.0) == []
        core.close()
        client.close()

    asyncio.run(talk())


def test_several_processes_talk_to_one_core_and_one_may_be_replaced(tmp_path: Path) -> None:
    async def receive(core: CoreSocket, num: int) -> list[tuple[int, bytes]]:
        received: list[tuple[int, bytes]] = []
        while len(received) < num:
            received += await asyncio.to_thread(core.receive, 5.0)
        return received

    async def talk() -> None:
        core = CoreSocket([socket_address(tmp_path, asker) for asker in range(2)])
        first, second = (ClientSocket(socket_address(tmp_path, asker)) for asker in range(2))
        first.send_bytes(b"one")
        second.send_bytes(b"two")
        assert sorted(await receive(core, 2)) == [(0, b"one"), (1, b"two")]
        core.send(StartFailed("to the second"), 1)
        core.send(StartFailed("to the first"))
        assert decode_from_core(await first.receive()) == StartFailed("to the first")
        assert decode_from_core(await second.receive()) == StartFailed("to the second")
        second.close()
        third = ClientSocket(socket_address(tmp_path, 1))
        third.send_bytes(b"three")
        assert await receive(core, 1) == [(1, b"three")]
        core.send(StartFailed("to the third"), 1)
        assert decode_from_core(await third.receive()) == StartFailed("to the third")
        core.close()
        for client in (first, third):
            client.close()

    asyncio.run(talk())


def test_a_flood_is_taken_in_parts(tmp_path: Path) -> None:
    async def talk() -> list[int]:
        client = ClientSocket(f"ipc://{tmp_path / 's'}")
        core = CoreSocket([f"ipc://{tmp_path / 's'}"])
        for _ in range(5):
            client.send_bytes(bytes(MAX_TURN_BYTES // 2))
        parts: list[int] = []
        while sum(parts) < 5:
            parts.append(len(await asyncio.to_thread(core.receive, 5.0)))
        core.close()
        client.close()
        return parts

    # One at a time where the sender is slower than the receiver; never all that wait.
    assert max(asyncio.run(talk())) <= 2
