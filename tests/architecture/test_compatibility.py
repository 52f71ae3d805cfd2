"""docs/compatibility.md says what is so: refusals are produced anew, and whatever works has its test."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pagefleet_engine import LLM, SamplingParams
from pagefleet_engine.cli import read_configuration
from pagefleet_engine.engine_core.build import build_core
from pagefleet_engine.errors import ConfigError, InvalidRequest
from pagefleet_protocol.field_errors import InvalidDocument
from pagefleet_protocol.openai_chat import read_chat_request
from pagefleet_protocol.openai_completions import read_completion_request
from pagefleet_protocol.resource_documents import parse_inference_service

from tests.fakes.resource_documents import service_document

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "compatibility.md").read_text()
PLACES = ("offline `LLM`", "engine's server", "router", "stream after a lost engine", "`pagefleet up`, cluster")
CAPABILITIES = {
    "Structured output", "Tools", "Thoughts and their budget", "Beam search", "Log-probabilities", "`n`", "`seed`",
    "Stop strings", "Logits processors", "Prefix cache", "Preemption", "Chunked prefill", "Prefill and decode apart",
    "K/V in host memory and on disk", "K/V in a shared folder", "KV events", "Quantization",
    "Windows (Gemma, Mistral), chunks (Llama 4)",
    "Speculative decoding", "Tensor ranks", "Pipeline stages", "Behind a gateway, as endpoint picker",
    "Ranks on several machines", "Ranks placed by Ray (tests: 2.60)",
}  # fmt: skip
"""That each have a row at least."""
WORKS = re.compile(r"\[works\]\[(test_\w+)\]")
REFUSED = re.compile(r"refused: `(.+)`")
NOWHERE = "—"
TESTS = dict(re.findall(r"^\[(test_\w+)\]: (\S+)$", TEXT, re.MULTILINE))
MODEL = "builtin://tiny"


def table() -> dict[str, dict[str, str]]:
    lines = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| ")]
    places, *rows = lines
    assert tuple(places) == PLACES
    return {name: dict(zip(PLACES, cells, strict=True)) for name, *cells in rows}


TABLE = table()
CELLS = [(name, place, cell) for name, row in TABLE.items() for place, cell in row.items()]


def serve(*arguments: str) -> None:
    engine, _ = read_configuration([*arguments, "--device", "cpu"], {})
    build_core(engine)


def function(body: dict[str, Any]) -> None:
    read_chat_request({"model": "m", "messages": [{"role": "user", "content": "x"}], **body})


def unknown_flag(flag: str) -> Callable[[Path], object]:
    return lambda _: serve(MODEL, flag, "2")


OFFLINE, SERVER, ROUTER, STREAM, SERVICE = PLACES
CALLS: dict[tuple[str, str], Callable[[Path], object]] = {
    ("Beam search", STREAM): lambda _: read_completion_request(
        {"model": "m", "prompt": "x", "use_beam_search": True, "stream": True}
    ),
    ("Logits processors as functions of a request", OFFLINE): lambda _: SamplingParams(logits_processors=[print]),
    **{
        ("Logits processors as functions of a request", place): lambda _: function({"logits_processors": ["x"]})
        for place in (SERVER, ROUTER)
    },
    ("Prefill and decode apart", OFFLINE): lambda _: LLM(MODEL, kv_connector="p2p", kv_role="prefill"),
    ("KV events", OFFLINE): lambda _: LLM(MODEL, kv_events_port=5557),
    ("Speculative decoding", OFFLINE): lambda _: LLM(MODEL, speculative_config={"method": "ngram"}),
    ("Several copies, each on a port of its own", OFFLINE): lambda _: LLM(
        MODEL, data_parallel_size=2, data_parallel_multi_port_external_lb=True
    ),
    ("Tensor ranks with torch.compile", OFFLINE): lambda _: LLM(MODEL, tensor_parallel_size=2, compile=True),
    **dict.fromkeys(
        product(["Tensor ranks with torch.compile"], (SERVER, SERVICE)), lambda _: serve(MODEL, "-tp", "2", "--compile")
    ),
    ("Pipeline stages with torch.compile", OFFLINE): lambda _: LLM(MODEL, pipeline_parallel_size=2, compile=True),
    **dict.fromkeys(
        product(["Pipeline stages with torch.compile"], (SERVER, SERVICE)),
        lambda _: serve(MODEL, "-pp", "2", "--compile"),
    ),
    ("Ranks on several machines", OFFLINE): lambda _: LLM(MODEL, tensor_parallel_size=2, nnodes=2),
    ("Copies of a model on several machines", OFFLINE): lambda _: LLM(MODEL, data_parallel_size=2, nnodes=2),
    ("Behind a gateway, with prefill and decode apart", SERVICE): lambda _: parse_inference_service(
        service_document(disaggregation={}, router={"inferencePool": {}})
    ),
    **dict.fromkeys(product(["Speculative decoding"], (SERVER, SERVICE)), unknown_flag("--speculative-config")),
}
"""What asks for what is refused; a service's engines are started with such a command."""


def test_no_capability_is_left_out() -> None:
    assert TABLE.keys() >= CAPABILITIES


@pytest.mark.parametrize(("name", "place", "cell"), CELLS, ids=lambda value: str(value)[:30])
def test_every_cell_says_something(name: str, place: str, cell: str) -> None:
    if cell == NOWHERE:
        return
    if refused := REFUSED.fullmatch(cell):
        assert (name, place) in CALLS, f"nothing here is refused by {refused[1]!r}"
        return
    works = WORKS.fullmatch(cell)
    assert works is not None, f"neither works, nor is refused in one line: {cell}"
    file = DOCS / TESTS[works[1]]
    assert re.search(rf"^def {works[1]}\(", file.read_text(), re.MULTILINE), f"{file} has no {works[1]}"


@pytest.mark.parametrize("at", CALLS, ids=" ".join)
def test_a_refusal_is_said_in_these_words(at: tuple[str, str], tmp_path: Path) -> None:
    said = REFUSED.fullmatch(TABLE[at[0]][at[1]])
    assert said is not None, f"{at} is refused, and the table says otherwise"
    with pytest.raises((TypeError, ConfigError, InvalidDocument, InvalidRequest)) as caught:
        CALLS[at](tmp_path)
    assert str(caught.value) == said[1]


def test_no_test_is_named_in_vain() -> None:
    assert set(WORKS.findall(TEXT)) == TESTS.keys()
