"""`pagefleet chat` against a scripted OpenAI server over real sockets."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pagefleet_operator.chat import ChatClient, Conversation, converse, printable
from pagefleet_operator.errors import ChatError


def chunk(text: str | None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Script:
    """What the server answers next, and what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.stream: list[bytes] = [chunk("Hello"), b": keep-alive\n\n", chunk(None), chunk(" there"), DONE]
        self.models: Any = {"data": [{"id": "tiny"}]}
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""


@pytest.fixture
def server() -> Iterator[Script]:
    script = Script()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            self._reply(200, [json.dumps(script.models).encode()])

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            script.headers.append(dict(self.headers.items()))
            script.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._reply(script.status, script.stream)

        def _reply(self, status: int, pieces: list[bytes]) -> None:
            self.send_response(status)
            self.end_headers()
            for piece in pieces:
                self.wfile.write(piece)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Quiet."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield script
    http.shutdown()
    thread.join()
    http.server_close()


def talk(script: Script, text: str, system: str | None = None) -> tuple[int, str]:
    out = io.StringIO()
    client = ChatClient(script.url, None)
    status = converse(Conversation(client, client.first_model(), system), io.StringIO(text), out, interactive=False)
    return status, out.getvalue()


def test_answers_are_streamed_and_the_conversation_is_kept(server: Script) -> None:
    assert talk(server, "hi\n\nand now?\n", system="Be short.") == (0, "Hello there\nHello there\n")
    assert server.asked[0]["stream"] is True
    assert server.asked[1] == {
        "model": "tiny",
        "stream": True,
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


@pytest.mark.parametrize(
    ("status", "stream", "said"),
    [
        (404, [b'{"error": {"message": "no such model"}}'], "the server answers 404: no such model"),
        (401, [b'{"error": {"message": "bad key"}}'], "the server answers 401: bad key; set OPENAI_API_KEY"),
        (502, [b"<html>"], "the server answers 502: <html>"),
        (
            200,
            [chunk("He"), b'data: {"error": {"message": "engine died"}}\n\n'],
            "the server ended the answer: engine died",
        ),
        (200, [chunk("He")], "the answer broke off: the server closed the connection"),
        (200, [b"data: {broken\n\n"], "the server sent something that is not a chat completion"),
        (200, [b"data: []\n\n"], "the server sent something that is not a chat completion"),
    ],
)
def test_what_went_wrong_is_told_in_one_line(
    server: Script, capsys: pytest.CaptureFixture[str], status: int, stream: list[bytes], said: str
) -> None:
    server.status, server.stream = status, stream
    assert talk(server, "hi\n")[0] == 1
    assert capsys.readouterr().err == f"pagefleet chat: error: {said}\n"


def test_a_question_without_a_full_answer_is_forgotten(server: Script) -> None:
    whole, server.stream = server.stream, [chunk("He")]
    conversation = Conversation(ChatClient(server.url, None), "tiny")
    with pytest.raises(ChatError):
        conversation.ask("first", io.StringIO())
    server.stream = whole
    conversation.ask("second", io.StringIO())
    assert [message["content"] for message in server.asked[1]["messages"]] == ["second"]


def test_the_key_is_sent_only_when_there_is_one(server: Script) -> None:
    for key, sent in (("sk-1", "Bearer sk-1"), (None, None)):
        list(ChatClient(server.url + "/v1/", key).answer("tiny", []))
        assert server.headers[-1].get("Authorization") == sent


@pytest.mark.parametrize("models", [{"data": []}, [], {"data": [{}]}])
def test_a_server_without_models_is_told(server: Script, models: Any) -> None:
    server.models = models
    with pytest.raises(ChatError, match="names no model; is it an OpenAI-compatible server"):
        ChatClient(server.url, None).first_model()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x:99999"])
def test_a_url_that_is_none_is_told(url: str) -> None:
    with pytest.raises(ChatError):
        ChatClient(url, None)


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\tc\nd é 漢") == "a[2Jb\tc\nd é 漢"


def test_the_command_works_in_a_pipe(server: Script) -> None:
    command = [sys.executable, "-m", "pagefleet_operator.chat", server.url]
    result = subprocess.run(command, input="hi\n", capture_output=True, text=True, check=False, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "Hello there\n", "")


def test_the_command_works_in_a_terminal(server: Script) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "pagefleet_operator.chat", server.url]
    environment = {**os.environ, "TERM": "dumb"}  # no control sequences between prompt and text
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    text = ""
    try:
        # Each prompt is waited for: what is typed before it may be discarded.
        for expected, typed in (("> ", b"hi\n"), ("Hello there\r\n> ", b"/help\n"), ("answer\r\n> ", b"\x04")):
            while expected not in text:
                text += os.read(controller, 4096).decode()
            text = text.partition(expected)[2]
            os.write(controller, typed)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def test_nothing_that_answers_is_told_with_the_remedy() -> None:
    command = [sys.executable, "-m", "pagefleet_operator.chat", "127.0.0.1:1"]
    result = subprocess.run(command, input="hi\n", capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 1
    assert result.stderr == (
        "pagefleet chat: error: nothing answers at http://127.0.0.1:1 (Connection refused); "
        "start it with: pagefleet up FILE\n"
    )
