"""What is kept of a conversation, what may be set, how fast an answer came, where Markdown may be cut."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_operator.chat.client import ChatClient, Piece
from pagefleet_operator.chat.conversation import Conversation, Speed
from pagefleet_operator.chat.view import MarkdownView, PlainView, split_blocks
from pagefleet_operator.errors import ChatError
from rich.console import Console

from tests.fakes.chat_server import Script


def conversation(url: str = "http://127.0.0.1:1") -> Conversation:
    return Conversation(ChatClient(url, None), "tiny")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.2", 0.2),
        ("max_tokens", "100", 100),
        ("stop", "END", "END"),
        ("stop", '["a", "b"]', ["a", "b"]),
        ("stop", "[1", "[1"),
        ("seed", "-4", -4),
    ],
)
def test_what_may_be_set(name: str, text: str, value: object) -> None:
    talk = conversation()
    talk.set(name, text)
    assert talk.settings == {name: value}
    talk.set(name, "default")
    assert talk.settings == {}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("temperature", "hot", "temperature"),
        ("temperature", "3", "a value <= 2"),
        ("max_tokens", "0", "max_tokens"),
        ("max_tokens", "1.5", "max_tokens"),
        ("messages", "[]", "cannot be set; there are temperature"),
    ],
)
def test_what_may_not(name: str, text: str, told: str) -> None:
    talk = conversation()
    with pytest.raises(ChatError, match=told):
        talk.set(name, text)
    assert talk.settings == {}


def test_a_conversation_can_be_kept(server: Script, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk = conversation(server.url)
    talk.system = "Be brief."
    talk.set("top_k", "5")
    talk.ask("hi", PlainView(io.StringIO()))
    talk.save(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    other = conversation()
    other.load(file)
    assert (other.system, other.settings, other.messages) == (talk.system, talk.settings, talk.messages)
    other.save(file)  # over one of ours


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "\x00",
        json.dumps({"kind": "pagefleet chat", "system": None, "settings": {"url": 1}, "messages": []}),
        json.dumps({"kind": "pagefleet chat", "system": None, "settings": {}, "messages": [{"role": "tool"}]}),
        json.dumps({"kind": "pagefleet chat", "system": 3, "settings": {}, "messages": []}),
    ],
)
def test_a_file_that_holds_something_else_is_neither_read_nor_overwritten(tmp_path: Path, content: str) -> None:
    file = tmp_path / "notes"
    file.write_text(content)
    for action in (conversation().load, conversation().save):
        with pytest.raises(ChatError, match="holds no conversation"):
            action(file)
    assert file.read_text() == content


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match=r"cannot be written \(No such file or directory\)"):
        conversation().save(tmp_path / "none" / "talk.json")


class Times:
    """A client whose pieces come at given times."""

    def __init__(self, pieces: list[tuple[float, Piece]]) -> None:
        self.now = 0.0
        self._pieces = pieces

    def answer(self, *_: Any) -> Iterator[Piece]:
        for at, piece in self._pieces:
            self.now = at
            yield piece


def test_speed_is_of_the_time_after_the_first_token() -> None:
    pieces = Times([(0.5, Piece(text="a")), (2.5, Piece(text="b")), (3.5, Piece(num_tokens=21))])
    talk = Conversation(pieces, "m", clock=lambda: pieces.now)  # type: ignore[arg-type]
    speed = talk.ask("?", PlainView(io.StringIO()))
    assert speed == Speed(21, 0.5, 2.0)
    assert speed.describe() == "21 tokens, 10.0 tokens/s, the first after 0.50 s"
    assert Speed(1, 0.5, 0.0).describe() == "1 tokens, the first after 0.50 s"
    assert Speed(None, 0.5, 1.0).describe() == ""


@given(st.lists(st.sampled_from(["a", "# b", "- c", "    d", "```", "", "| e |", "|---|", "> f", "1. g"]), max_size=12))
def test_blocks_are_cut_without_a_loss(lines: list[str]) -> None:
    text = "\n".join(lines)
    whole, rest = split_blocks(text)
    assert whole + rest == text


def test_a_block_that_may_still_grow_is_not_cut() -> None:
    assert split_blocks("```\na\n\nb\n") == ("", "```\na\n\nb\n")
    assert split_blocks("- a\n\n- b\n") == ("", "- a\n\n- b\n")
    assert split_blocks("a\n\nb") == ("a\n\n", "b")


def test_a_growing_answer_is_drawn_a_few_times_a_second_and_within_the_screen() -> None:
    now, drawn = 0.0, 0
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, height=10)
    view = MarkdownView(console, lambda: now)
    for number in range(200):
        now += 0.01
        before = len(out.getvalue())
        view.show(Piece(text=f"- line {number}\n"))
        written = out.getvalue()[before:]
        drawn += bool(written)
        assert written.count("\n") <= 10
    view.end()
    assert 15 <= drawn <= 25
    assert "line 199" in out.getvalue()
    assert out.getvalue().count("line 0\x1b") + out.getvalue().count("line 0 ") >= 1
