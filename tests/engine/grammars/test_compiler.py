"""Compiling apart from the loop: tickets and the bell, limits, what is remembered in memory and on disk."""

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pagefleet_engine
import pytest
from pagefleet_engine.errors import GrammarFailed, InvalidRequest, QueueFull
from pagefleet_engine.grammars.compile_process import CompileProcess
from pagefleet_engine.grammars.compiler import GrammarCompiler, GrammarLimits
from pagefleet_engine.grammars.disk_cache import DiskCache
from pagefleet_engine.grammars.guidance_backend import GuidanceBackend, GuidanceGrammar
from pagefleet_engine.grammars.port import Grammar, Ticket
from pagefleet_engine.grammars.vocabulary import VocabularyFiles
from pagefleet_engine.text.model_files import load_tokenizer
from pagefleet_protocol.structured_outputs import StructuredOutputsParams

from tests.fakes.grammars import random_answer
from tests.fakes.many_descriptors import many_descriptors

TINY = Path(pagefleet_engine.__file__).parent / "builtin" / "tiny"
FILES = VocabularyFiles(str(TINY), str(TINY), load_tokenizer(TINY).vocab_size + 40)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["n"]}


def wait(compiler: GrammarCompiler, ticket: Ticket[Grammar]) -> Grammar:
    """Wait for a ticket as the core does: on the bell."""
    while not ticket.done():
        bell = select.poll()
        bell.register(compiler.bell, select.POLLIN)
        assert bell.poll(120_000), "nobody rang"
        compiler.silence()
    return ticket.result()


def made(folder: Path | None, limits: GrammarLimits | None = None) -> GrammarCompiler:
    """Make a compiler over the builtin model's vocabulary; a form has the time that a busy machine takes."""
    return GrammarCompiler(FILES, "auto", folder, limits or GrammarLimits(seconds=120), 1)


@dataclass
class Compiling:
    """Nothing is compiled before `begin`."""

    arrived: threading.Event = field(default_factory=threading.Event)
    may_begin: threading.Event = field(default_factory=threading.Event)
    order: list[str | None] = field(default_factory=list)
    """The expressions, as they came to it."""

    def begin(self) -> None:
        assert self.arrived.wait(120), "what is submitted has had the start of a process to get into line"
        self.may_begin.set()


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Compiling:
    found, compile_now = Compiling(), CompileProcess.compile

    def held(process: CompileProcess, backend: str, params: StructuredOutputsParams) -> bytes:
        found.arrived.set()
        assert found.may_begin.wait(120)
        found.order.append(params.regex)
        return compile_now(process, backend, params)

    monkeypatch.setattr(CompileProcess, "compile", held)
    return found


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    """One without a folder."""
    one = made(None, GrammarLimits(seconds=20))
    yield one
    one.close()


def test_forms_are_compiled_in_a_process_with_more_than_a_thousand_descriptors() -> None:
    with many_descriptors():
        compiler = made(None)
        wait(compiler, compiler.submit(StructuredOutputsParams(json=SCHEMA)))
        compiler.close()


def test_a_form_is_compiled_once_and_then_known(compiler: GrammarCompiler) -> None:
    params = StructuredOutputsParams(json=SCHEMA)
    first, second = compiler.submit(params), compiler.submit(params)
    grammar = wait(compiler, first)
    assert wait(compiler, second) is grammar
    third = compiler.submit(StructuredOutputsParams(json=SCHEMA))
    assert third.done()
    assert third.result() is grammar
    vocabulary = FILES.load()
    texts = {random_answer(grammar, vocabulary, seed) for seed in range(5)}
    assert all(text is not None and text.startswith(b"{") for text in texts)


def test_what_cannot_be_held_is_refused_by_its_path_and_known_too(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a/b": {"type": "array", "uniqueItems": True}}}
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="#/properties/a~1b/uniqueItems"):
            wait(compiler, compiler.submit(StructuredOutputsParams(json=schema)))
    assert compiler.submit(StructuredOutputsParams(json=schema)).done()
    assert compiler.stats()["grammars_refused_total"] == 3


@pytest.mark.parametrize(
    "params",
    [
        StructuredOutputsParams(regex="(((((a{1,1000}){1,1000}){1,1000}b){1,1000}c){1,1000}d){1,1000}"),
        StructuredOutputsParams(grammar="root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
        StructuredOutputsParams(grammar="start: " + "(" * 5000 + '"a"' + ")" * 5000),
        StructuredOutputsParams(grammar="root ::= (a{1,100000}){1,100000}\na ::= [a-z]{1,100000}"),
        StructuredOutputsParams(json={"$ref": "https://example.com/schema.json"}),
        StructuredOutputsParams(
            json={"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
        ),
    ],
)
def test_an_explosive_form_ends_by_itself_and_harms_no_other(
    compiler: GrammarCompiler, params: StructuredOutputsParams
) -> None:
    with contextlib.suppress(InvalidRequest):  # or it is held, within the limits
        wait(compiler, compiler.submit(params))
    assert wait(compiler, compiler.submit(StructuredOutputsParams(choice=("a", str(params.form))))) is not None


def test_a_form_that_takes_too_long_is_killed_with_its_process() -> None:
    compiler = made(None, GrammarLimits(seconds=0.01))
    slow = StructuredOutputsParams(choice=tuple(f"{i:0300}" for i in range(3000)))
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.01 seconds"):
        wait(compiler, compiler.submit(slow))
    assert not compiler.submit(slow).done(), "another time there may be time"
    compiler.close()


def test_a_form_that_takes_too_much_memory_is_refused_and_the_next_is_not() -> None:
    # Threads' stacks and heaps count too, and of them a process has more where there are more cores.
    compiler = made(None, GrammarLimits(seconds=120, memory=192 * 2**20))
    large = StructuredOutputsParams(choice=tuple(f"{i:01500}" for i in range(15_000)))
    with pytest.raises(InvalidRequest, match="takes too much memory"):
        wait(compiler, compiler.submit(large))
    assert not compiler.submit(large).done(), "another time there may be memory"
    assert wait(compiler, compiler.submit(StructuredOutputsParams(regex="ab"))) is not None
    compiler.close()


def test_too_many_waiting_forms_are_turned_away_and_others_find_room(compiling: Compiling) -> None:
    compiler = made(None, GrammarLimits(waiting=4, seconds=120))
    tickets = [compiler.submit(StructuredOutputsParams(regex=f"a{i}"), "a") for i in range(2)]
    with pytest.raises(QueueFull, match="2 of them yours") as refused:
        compiler.submit(StructuredOutputsParams(regex="another"), "a")
    assert refused.value.retry_after_s > 0
    tickets.append(compiler.submit(StructuredOutputsParams(regex="another"), "b"))
    with pytest.raises(QueueFull):
        compiler.submit(StructuredOutputsParams(regex="one more"), "b")
    tickets.append(compiler.submit(StructuredOutputsParams(regex="one more"), "c"))
    with pytest.raises(QueueFull):
        compiler.submit(StructuredOutputsParams(regex="the last"), "d")
    tickets.append(compiler.submit(StructuredOutputsParams(regex="a0"), "d"))
    compiling.begin()
    for ticket in tickets:
        wait(compiler, ticket)
    compiler.close()


def test_a_flood_of_one_tenants_forms_delays_anothers_by_a_turn(compiling: Compiling) -> None:
    compiler = made(None)
    flood = [compiler.submit(StructuredOutputsParams(regex=f"a{i}"), "a") for i in range(40)]
    own = compiler.submit(StructuredOutputsParams(regex="b"), "b")
    shared = compiler.submit(StructuredOutputsParams(regex="a39"), "b")
    compiling.begin()
    for ticket in (own, shared, *flood):
        wait(compiler, ticket)
    assert compiling.order.index("b") <= 5
    assert compiling.order.index("a39") <= 10
    assert compiler.stats()["grammars_waiting"] == 0
    compiler.close()


def test_forms_that_nobody_waits_for_are_not_compiled(compiling: Compiling) -> None:
    compiler = made(None, GrammarLimits(waiting=4, seconds=120))
    first = compiler.submit(StructuredOutputsParams(regex="a"))
    for i in range(5):
        compiler.submit(StructuredOutputsParams(regex=f"b{i}"))
    kept = compiler.submit(StructuredOutputsParams(regex="c"))
    with pytest.raises(QueueFull):
        compiler.submit(StructuredOutputsParams(regex="d"))
    compiling.begin()
    for ticket in (first, kept):
        wait(compiler, ticket)
    stats = compiler.stats()
    assert (stats["grammars_compiled_total"], stats["grammars_waiting"]) == (2, 0)
    compiler.close()


def test_a_second_replica_finds_on_disk_what_the_first_has_compiled(tmp_path: Path) -> None:
    forms = [StructuredOutputsParams(json=SCHEMA), StructuredOutputsParams(grammar='root ::= "a" [b-d]+ | "éx"')]
    for how in ("compiled", "disk"):
        compiler = made(tmp_path / "grammars")
        vocabulary = FILES.load()
        texts = [random_answer(wait(compiler, compiler.submit(form)), vocabulary, 3) for form in forms]
        assert None not in texts
        stats = compiler.stats()
        assert stats[f"grammars_{how}_total"] == 2
        assert stats["grammars_compiled_total"] + stats["grammars_disk_total"] == 2
        compiler.close()


@pytest.mark.parametrize("how", ["compiled", "disk"])
def test_none_waits_for_the_loading_of_a_large_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    large = StructuredOutputsParams(choice=tuple(f"{i:0100}" for i in range(1000)))
    small, new = StructuredOutputsParams(regex="a"), StructuredOutputsParams(regex="b")
    if how == "disk":
        first = made(tmp_path)
        for form in (large, small):
            wait(first, first.submit(form))
        first.close()
    gate, arrived, load = threading.Event(), threading.Event(), GuidanceBackend.load

    def gated(backend: GuidanceBackend, compiled: bytes) -> GuidanceGrammar:
        if len(compiled) > 100_000:
            arrived.set()
            assert gate.wait(60)
        return load(backend, compiled)

    monkeypatch.setattr(GuidanceBackend, "load", gated)
    compiler = made(tmp_path)
    try:
        ticket = compiler.submit(large)
        assert arrived.wait(60)
        for form in (small, new):
            assert wait(compiler, compiler.submit(form)) is not None
        again = compiler.submit(large)
        assert not ticket.done()
        assert not again.done()
        gate.set()
        assert wait(compiler, ticket) is wait(compiler, again)
        assert compiler.stats()[f"grammars_{how}_total"] == (2 if how == "disk" else 3)
    finally:
        gate.set()
        compiler.close()


def test_a_large_form_on_disk_that_cannot_be_loaded_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = StructuredOutputsParams(choice=tuple(f"{i:0100}" for i in range(1000)))
    first = made(tmp_path)
    wait(first, first.submit(large))
    first.close()
    faults, load = [ValueError("another version")], GuidanceBackend.load

    def faulty(backend: GuidanceBackend, compiled: bytes) -> GuidanceGrammar:
        if faults:
            raise faults.pop()
        return load(backend, compiled)

    monkeypatch.setattr(GuidanceBackend, "load", faulty)
    second = made(tmp_path)
    wait(second, second.submit(large))
    assert second.stats()["grammars_compiled_total"] == 1
    faults.append(ValueError("damaged"))
    with pytest.raises(GrammarFailed):
        wait(second, second.submit(StructuredOutputsParams(choice=("a", "b"))))
    second.close()


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 10**6)
    cache.store(b"\x01\x02", b"content")
    assert cache.load(b"\x01\x02") == b"content"
    assert cache.load(b"\x01\x03") is None
    (file,) = tmp_path.glob("??/*")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert cache.load(b"\x01\x02") is None
    assert not file.exists()


def test_a_folder_stays_within_its_size_and_loses_what_was_used_least(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 5_000)
    for number in range(8):
        cache.store(bytes([number]), bytes(900))
        file = tmp_path / f"{number:02x}" / f"{number:02x}"
        if file.exists():
            stamp = time.time() - 100 + number
            os.utime(file, (stamp, stamp))
        cache.load(b"\x00")
    kept = [number for number in range(8) if cache.load(bytes([number])) is not None]
    assert sum(file.stat().st_size for file in tmp_path.glob("??/*")) <= 5_000
    assert 0 in kept
    assert 7 in kept
    assert 1 not in kept


def test_a_folder_that_cannot_be_written_costs_the_time_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    cache = DiskCache(tmp_path / "file", 10**6)
    cache.store(b"\x01", b"content")
    assert cache.load(b"\x01") is None


def test_memory_holds_so_many_bytes_and_lets_go_of_the_oldest() -> None:
    compiler = made(None, GrammarLimits(cached_bytes=200_000, seconds=120))
    for index in range(6):
        wait(compiler, compiler.submit(StructuredOutputsParams(regex=f"x{index}")))
    assert compiler.stats()["grammars_cached_bytes"] <= 200_000
    assert compiler.submit(StructuredOutputsParams(regex="x5")).done()
    assert not compiler.submit(StructuredOutputsParams(regex="x0")).done()
    compiler.close()
