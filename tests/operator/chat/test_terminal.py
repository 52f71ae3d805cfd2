"""`pagefleet chat` in a terminal that the test owns: Markdown, keys, commands, interruptions, ends."""

from __future__ import annotations

import contextlib
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.chat_server import DONE, Script, chunk, event, usage
from tests.fakes.screen import TerminalProgram

CTRL_C, CTRL_D, ALT_ENTER, UP = "\x03", "\x04", "\x1b\r", "\x1b[A"

Start = Callable[..., TerminalProgram]


@pytest.fixture
def chat(server: Script, tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(*flags: str, columns: int = 80, term: str = "xterm-256color") -> TerminalProgram:
            command = [sys.executable, "-m", "pagefleet_operator.chat.cli", server.url, *flags]
            environment = {"XDG_STATE_HOME": str(tmp_path), "TERM": term}
            program = stack.enter_context(TerminalProgram(command, columns, 30, environment))
            program.wait_for_prompt()
            return program

        yield start


def test_an_answer_becomes_markdown_with_its_speed(chat: Start, server: Script) -> None:
    server.stream = [chunk("# Ti"), chunk("tle\n\nsome **bold** "), chunk("words\n\n- one\n- two\n"), usage(12), DONE]
    program = chat()
    program.type("hi\r")
    text = program.wait_for("tokens")
    assert "Title" in text
    assert "# Title" not in text
    assert "some bold words" in text
    assert " • two" in text
    assert "12 tokens, " in text
    bold = next(
        line for line in program.screen.buffer.values() if any(one.bold and one.data == "b" for one in line.values())
    )
    assert "".join(one.data for one in bold.values() if one.bold).strip() == "bold"
    program.wait_for_prompt()
    program.type(CTRL_D)
    assert program.wait() == 0


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_table_and_code_fit_the_terminal(chat: Start, server: Script, columns: int) -> None:
    server.stream = [chunk("| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('x')\n```\nend"), usage(3), DONE]
    program = chat(columns=columns)
    program.type("hi\r")
    text = program.wait_for("3 tokens")
    assert "print('x')" in text
    assert "```" not in text
    assert "|---|" not in text


def test_thoughts_and_calls_are_shown(chat: Start, server: Script) -> None:
    call = {"index": 0, "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    server.stream = [
        event({"reasoning_content": "I ask."}),
        chunk("Wait."),
        event({"tool_calls": [call]}),
        usage(9),
        DONE,
    ]
    program = chat()
    program.type("hi\r")
    text = program.wait_for("9 tokens")
    assert text.index("I ask.") < text.index("Wait.") < text.index('calls weather({"city": "Rome"})')


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(chat: Start, server: Script) -> None:
    stopped = threading.Event()

    def until_stopped() -> None:
        while not server.broken.is_set() and not stopped.wait(0.02):
            pending.append(b"")
            raise_if_gone()

    pending: list[bytes] = []

    def raise_if_gone() -> None:
        if len(pending) > 3000:
            raise OSError

    server.stream = [chunk("The beginning "), until_stopped]
    program = chat()
    program.type("long\r")
    program.wait_for("The beginning")
    program.type(CTRL_C)
    program.wait_for("stopped")
    program.wait_for_prompt()
    stopped.set()
    server.stream = [chunk("Fine"), DONE]
    program.type("go on\r")
    program.wait_for("Fine")
    said = [(one["role"], one["content"]) for one in server.asked[1]["messages"]]
    assert said == [("user", "long"), ("assistant", "The beginning "), ("user", "go on")]
    program.wait_for_prompt()
    program.type(CTRL_C)
    assert program.wait() == 0


@pytest.fixture
def endless(server: Script) -> Iterator[None]:
    """An answer that begins, and goes on as long as the test."""
    over = threading.Event()
    server.stream = [chunk("The beginning "), over.wait, DONE]
    yield
    over.set()


def test_a_key_that_is_held_ends_the_answer_and_the_chat(chat: Start, endless: None) -> None:
    program = chat()
    program.type("long\r")
    program.wait_for("The beginning")

    def hold() -> None:
        while not ended.wait(0.03):
            with contextlib.suppress(OSError):  # it has just ended
                program.type(CTRL_C)

    ended = threading.Event()
    holding = threading.Thread(target=hold)
    holding.start()
    try:
        assert program.wait() in (0, 130, -signal.SIGINT), "a shell calls both of the last 130"
    finally:
        ended.set()
        holding.join()
    assert b"Traceback" not in program.written, program.text


def test_ctrl_c_ends_what_is_piped_in(server: Script, endless: None) -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "pagefleet_operator.chat.cli", server.url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(b"long\nmore\n")
    program.stdin.flush()
    assert program.stdout.read(13) == b"The beginning"
    program.send_signal(signal.SIGINT)
    _, complaints = program.communicate(timeout=60)
    assert (program.returncode, complaints) == (130, b"")
    assert len(server.asked) == 1


def test_more_than_one_line_can_be_asked(chat: Start, server: Script) -> None:
    program = chat()
    for number, keys in enumerate((f"one{ALT_ENTER}two\r", "one\\\rtwo\r", '"""one\rtwo"""\r')):
        server.stream = [chunk(f"Answer {number}"), DONE]
        program.type(keys)
        program.wait_for(f"Answer {number}")
        assert server.asked[number]["messages"][-1]["content"] == "one\ntwo"
        program.wait_for_prompt()


def test_what_was_asked_is_kept_for_its_owner_alone(chat: Start, tmp_path: Path, server: Script) -> None:
    program = chat()
    program.type("a question\r")
    program.wait_for("Hello there")
    program.wait_for_prompt()
    program.type(CTRL_D)
    assert program.wait() == 0
    kept = tmp_path / "pagefleet" / "chat-history"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    again = chat()
    again.type(UP)
    again.wait_for("> a question")


def test_commands_and_words_that_are_none(chat: Start, server: Script, tmp_path: Path) -> None:
    program = chat("--system", "Be brief.")
    for typed, told in (
        ("/hepl", "there is no /hepl; did you mean /help?"),
        ("/xyzzy", "there is no /xyzzy; /help lists what there is"),
        ("/help", "/set NAME VALUE"),
        ("/set temprature 1", "did you mean temperature?"),
        ("/set temperature 9", "Expected a value <= 2"),
        ("/set temperature", "wants a value"),
        ("/system", "Be brief."),
        ("/model", "* tiny"),
        ("/model lagre", "did you mean large?"),
        ("/load /nowhere", "cannot be read"),
    ):
        program.type(f"{typed}\r")
        program.wait_for(told)
        program.wait_for_prompt()
    for typed in ("/set temperature 0.2", "/model large", "/system off", "hi"):
        program.type(f"{typed}\r")
        program.wait_for(f"> {typed}")
        program.wait_for_prompt()
    assert server.asked[0]["temperature"] == 0.2
    assert server.asked[0]["model"] == "large"
    assert server.asked[0]["messages"] == [{"role": "user", "content": "hi"}]


def test_a_server_that_is_gone_is_told_and_the_chat_goes_on(chat: Start, server: Script) -> None:
    program = chat()
    server.status, server.stream = 500, [b'{"error": {"message": "oh no"}}']
    program.type("hi\r")
    program.wait_for("error: the server answers 500: oh no")
    program.wait_for_prompt()
    server.status, server.stream = 200, [chunk("back"), DONE]
    program.type("hi\r")
    program.wait_for("back")


def test_a_dumb_terminal_gets_no_control_sequences(chat: Start, server: Script) -> None:
    server.stream = [chunk("**as it** is"), DONE]
    program = chat(term="dumb")
    program.type("hi\r")
    program.wait_for("**as it** is")
    assert b"\x1b" not in program.written
