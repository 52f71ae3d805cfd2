"""Messages through a ring in shared memory."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.executor.ring import RingHandles, RingReader, RingWriter, make_ring

from tests.example_counts import examples


@pytest.fixture
def handles() -> Iterator[RingHandles]:
    made = make_ring(2, 4096)
    yield made
    for fd in made.fds:
        os.close(fd)


def nothing_wrong() -> None:
    pass


def read(reader: RingReader) -> list[bytes] | None:
    parts = reader.receive(0)
    return None if parts is None else [bytes(part) for part in parts]


def test_every_reader_gets_every_message_in_order(handles: RingHandles) -> None:
    writer, readers = RingWriter(handles), [RingReader(handles, index) for index in range(2)]
    writer.send([b"one"], nothing_wrong)
    writer.send([b"two", b"", b"three"], nothing_wrong)
    for reader in readers:
        assert [read(reader), read(reader), read(reader)] == [[b"one"], [b"two", b"", b"three"], None]


def test_a_part_of_one_frame_is_not_copied(handles: RingHandles) -> None:
    writer, reader = RingWriter(handles), RingReader(handles)
    writer.send([b"abc", b"12345678"], nothing_wrong)
    parts = reader.receive(0)
    assert parts is not None
    os.pwrite(handles.memory, b"X", 24)
    assert bytes(parts[1]) == b"X2345678"


@settings(max_examples=examples(100))
@given(st.lists(st.lists(st.integers(0, 9000), min_size=1, max_size=3), max_size=20), st.integers(0, 99))
def test_messages_of_any_size_arrive(sizes: list[list[int]], seed: int) -> None:
    handles = make_ring(2, 4096)
    writer, readers = RingWriter(handles), [RingReader(handles, index) for index in range(2)]
    rng = random.Random(seed)
    sent = [[bytes([n % 251]) * size for size in parts] for n, parts in enumerate(sizes)]

    def send() -> None:
        for parts in sent:
            writer.send(parts, nothing_wrong)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    got: list[list[list[bytes]]] = [[], []]
    while any(len(each) < len(sent) for each in got):
        index = rng.choice([i for i in range(2) if len(got[i]) < len(sent)])
        parts = readers[index].receive(0.001)
        if parts is not None:
            got[index].append([bytes(part) for part in parts])
    thread.join()
    assert got == [sent, sent]
    for fd in handles.fds:
        os.close(fd)


def test_who_waits_for_room_in_vain_can_give_up(handles: RingHandles) -> None:
    writer, reader = RingWriter(handles), RingReader(handles, 0)

    def give_up() -> None:
        raise TimeoutError

    for _ in range(4):
        writer.send([b"x" * 1000], give_up)
        reader.receive(0)  # one of the two readers is not enough
    with pytest.raises(TimeoutError):
        writer.send([b"x" * 1000], give_up)


def test_another_process_reads_it(handles: RingHandles) -> None:
    script = (
        "import sys, msgspec; from pagefleet_engine.executor.ring import *;"
        "reader = RingReader(msgspec.json.decode(sys.argv[1], type=RingHandles), 1);"
        "print(len(reader.receive(60)[0]), reader.receive(60)[0].tobytes().decode())"
    )
    text = msgspec.json.encode(handles).decode()
    child = subprocess.Popen(
        [sys.executable, "-c", script, text], pass_fds=handles.fds, stdout=subprocess.PIPE, text=True
    )
    writer, reader = RingWriter(handles), RingReader(handles)
    writer.send([b"x" * 3000], nothing_wrong)
    reader.receive(0)
    writer.send([b"hello"], nothing_wrong)
    assert child.communicate(timeout=60)[0].split() == ["3000", "hello"]
