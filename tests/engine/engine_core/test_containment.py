"""No request may harm the core or another request: whatever came before, a canary gives the same tokens."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.engine_core.messages import AbortRequests, AddRequest
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.core_wire import Wire
from tests.fakes.scripted_core import MAX_MODEL_LEN, VOCAB_SIZE

CANARY = AddRequest("canary", [40, 41, 42], SamplingParams(max_tokens=5, temperature=0), ())
EDGES = (-(2**63), -1, 0, 1, MAX_MODEL_LEN - 1, MAX_MODEL_LEN, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31, 2**63, 2**64 - 1)

edges = st.sampled_from(EDGES)
small = st.integers(0, VOCAB_SIZE - 1)
junk: st.SearchStrategy[Any] = st.one_of(
    edges, st.none(), st.booleans(), st.floats(allow_nan=True), st.text(max_size=5), st.lists(edges, max_size=3)
)
sampling = st.dictionaries(st.sampled_from([*SamplingParams.__struct_fields__, "unknown"]), junk, max_size=3)
prompts = st.one_of(st.lists(small, min_size=1, max_size=40), st.lists(edges, max_size=3), junk)
requests = st.tuples(
    st.just("add"),
    st.sampled_from(["a", "b", "", "a b", "x" * 300]),
    prompts,
    st.one_of(st.just({"max_tokens": 5}), sampling),
    st.one_of(st.just([]), st.lists(edges, max_size=2)),
    st.one_of(st.just(0), junk),
    st.one_of(st.none(), st.text(max_size=4)),
    st.one_of(st.none(), st.text(max_size=4)),
).map(msgspec.msgpack.encode)
aborts = st.lists(st.sampled_from(["a", "b", "nobody"]), max_size=3).map(
    lambda names: msgspec.msgpack.encode(AbortRequests(names))
)
traffic = st.lists(st.one_of(requests, aborts, st.binary(max_size=20), st.just(None)), max_size=25)


def finish(wire: Wire) -> None:
    """Take turns until the core is idle and has settled."""
    for _ in range(5000):
        wire.turn()
        if not wire.core.has_work:
            wire.turn()
            return
    raise AssertionError("the core never finishes")


def canary_tokens(wire: Wire) -> list[int]:
    wire.sent.clear()
    wire.turn(CANARY)
    finish(wire)
    return [token for output in wire.outputs if output.request_id == "canary" for token in output.new_token_ids]


@given(st.sampled_from([2, 1]), traffic)
def test_any_traffic_leaves_the_core_as_it_was(max_in_flight: int, messages: list[bytes | None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wire = Wire(Path(folder), max_in_flight=max_in_flight)
        for message in messages:
            wire.turn(*([] if message is None else [message]))
        finish(wire)
        ended = [output.request_id for output in wire.outputs if output.finish_reason is not None]
        started = {output.request_id for output in wire.outputs}
        assert started == set(ended), "a request that got an answer got its last one too"
        assert canary_tokens(wire) == [43, 44, 45, 46, 47]
        assert wire.core.stats().kv_usage == 0
        wire.core.check_integrity()
        wire.reader.close()


@pytest.mark.parametrize("value", EDGES)
@pytest.mark.parametrize(
    "field",
    ["max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs", "token", "priority", "eos"],
)
def test_integers_at_their_edges(tmp_path: Path, field: str, value: int) -> None:
    wire = Wire(tmp_path)
    params = {} if field in {"token", "priority", "eos"} else {field: value}
    fields: list[Any] = ["add", "edge", [5], {"max_tokens": 3, **params}, [], 0]
    if field == "token":
        fields[2] = [5, value]
    elif field == "eos":
        fields[4] = [value]
    elif field == "priority":
        fields[5] = value
    wire.turn(msgspec.msgpack.encode(fields))
    finish(wire)
    edge = [output for output in wire.outputs if output.request_id == "edge"]
    assert edge[-1].finish_reason in {"length", "stop", "error"}
    assert (edge[-1].error_kind == "invalid") == (edge[-1].finish_reason == "error")
    assert canary_tokens(wire) == [43, 44, 45, 46, 47]
