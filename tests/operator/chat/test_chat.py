"""`pagefleet chat` in a pipe, against a scripted OpenAI server over real sockets."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest
from pagefleet_operator.chat.cli import CHAT
from pagefleet_operator.chat.client import ChatClient, Piece
from pagefleet_operator.chat.conversation import Conversation
from pagefleet_operator.chat.session import converse_by_line
from pagefleet_operator.chat.view import PlainView, printable
from pagefleet_operator.errors import ChatError
from pagefleet_protocol.pasted_command import pasted

from tests.fakes.chat_server import DONE, Script, chunk, event

COMMAND = [sys.executable, "-m", "pagefleet_operator.chat.cli"]


def talk(script: Script, text: str, system: str | None = None) -> tuple[int, str]:
    out = io.StringIO()
    client = ChatClient(script.url, None)
    status = converse_by_line(Conversation(client, client.models()[0], system), io.StringIO(text), out, CHAT)
    return status, out.getvalue()


def test_answers_are_streamed_and_the_conversation_is_kept(server: Script) -> None:
    assert talk(server, "hi\n\nand now?\n", system="Be short.") == (0, "Hello there\nHello there\n")
    assert server.asked[0]["stream"] is True
    assert server.asked[1] == {
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello there"},
            {"role": "user", "content": "and now?"},
        ],
    }


def test_reset_forgets_and_quit_ends(server: Script) -> None:
    status, out = talk(server, "one\n/reset\ntwo\n/quit\nthree\n")
    assert (status, out.count("\n")) == (0, 2)
    assert server.asked[1]["messages"] == [{"role": "user", "content": "two"}]


def test_a_path_is_a_question(server: Script) -> None:
    assert talk(server, "/etc/hosts: what is it?\n")[0] == 0
    assert server.asked[0]["messages"][0]["content"] == "/etc/hosts: what is it?"


def test_calls_are_answers_too_and_thoughts_are_none(server: Script) -> None:
    calls = [{"index": 0, "function": {"name": "add", "arguments": '{"a"'}}]
    more = [{"index": 0, "function": {"arguments": ": 1}"}}]
    thought = event({"reasoning_content": "Let me add."})
    server.stream = [thought, event({"tool_calls": calls}), event({"tool_calls": more}), DONE]
    assert talk(server, "add\n") == (0, 'calls add({"a": 1})\n')


@pytest.mark.parametrize(
    ("status", "stream", "said"),
    [
        (404, [b'{"error": {"message": "no such model"}}'], "the server answers 404: no such model"),
        (401, [b'{"error": {"message": "bad key"}}'], "the server answers 401: bad key; set OPENAI_API_KEY"),
        (
            503,
            [b'{"error": {"message": "not ready yet", "code": "engine_loading"}}'],
            "the server answers 503: not ready yet; ask again in a moment",
        ),
        (502, [b"<html>"], "the server answers 502: <html>"),
        (502, [b"[]"], "the server answers 502: []"),
        (
            200,
            [chunk("He"), b'data: {"error": {"message": "engine died"}}\n\n'],
            "the server ended the answer: engine died",
        ),
        (200, [chunk("He")], "the answer broke off: the server closed the connection"),
        (200, [b"data: {broken\n\n"], "the server sent something that is not a chat completion"),
        (200, [b"data: []\n\n"], "the server sent something that is not a chat completion"),
        (200, [event({"tool_calls": [{}]})], "the server sent something that is not a chat completion"),
    ],
)
def test_what_went_wrong_is_told_in_one_line(
    server: Script, capsys: pytest.CaptureFixture[str], status: int, stream: list[Any], said: str
) -> None:
    server.status, server.stream = status, stream
    assert talk(server, "hi\n")[0] == 1
    assert capsys.readouterr().err == f"pagefleet chat: error: {said}\n"


def test_a_question_without_a_full_answer_is_forgotten(server: Script) -> None:
    whole, server.stream = server.stream, [chunk("He")]
    conversation = Conversation(ChatClient(server.url, None), "tiny")
    with pytest.raises(ChatError):
        conversation.ask("first", PlainView(io.StringIO()))
    server.stream = whole
    conversation.ask("second", PlainView(io.StringIO()))
    assert [message["content"] for message in server.asked[1]["messages"]] == ["second"]


def test_the_key_is_sent_only_when_there_is_one(server: Script) -> None:
    for key, sent in (("sk-1", "Bearer sk-1"), (None, None)):
        list(ChatClient(server.url + "/v1/", key).answer("tiny", []))
        assert server.headers[-1].get("Authorization") == sent


@pytest.mark.parametrize("models", [{"data": []}, [], {"data": [{}]}])
def test_a_server_without_models_is_told(server: Script, models: Any) -> None:
    server.models = models
    with pytest.raises(ChatError, match="names no model; is it an OpenAI-compatible server"):
        ChatClient(server.url, None).models()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x:99999"])
def test_a_url_that_is_none_is_told(url: str) -> None:
    with pytest.raises(ChatError):
        ChatClient(url, None)


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\tc\nd é 漢") == "a[2Jb\tc\nd é 漢"


def test_a_thought_is_told_apart_where_it_is_shown() -> None:
    out = io.StringIO()
    view = PlainView(out, with_thoughts=True)
    for piece in (Piece(thought="so "), Piece(thought="it is"), Piece(text="Yes"), Piece(text=".")):
        view.show(piece)
    view.end()
    assert out.getvalue() == "(thinks: so it is)\nYes.\n"


def test_the_command_works_in_a_pipe(server: Script) -> None:
    result = subprocess.run(
        [*COMMAND, server.url], input="hi\n", capture_output=True, text=True, check=False, timeout=120
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello there\n", "")


def test_nothing_that_answers_is_told_with_the_remedy() -> None:
    result = subprocess.run(
        [*COMMAND, "127.0.0.1:1"], input="hi\n", capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 1
    assert result.stderr == (
        "pagefleet chat: error: nothing answers at http://127.0.0.1:1 (Connection refused); "
        f"start it with: {pasted('up', 'FILE')}\n"
    )
