"""The few calls of the OpenAI API that a chat needs. One connection per call; nothing is kept open."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pagefleet_protocol.load_progress import LOADING
from pagefleet_protocol.pasted_command import pasted

from pagefleet_operator.errors import ChatError

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 600.0
_MAX_ERROR_BYTES = 65_536

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a tool call."""

    index: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of a stream brings."""

    text: str = ""
    thought: str = ""
    calls: tuple[CallPiece, ...] = ()
    num_tokens: int | None = None
    """Of the whole answer, where the event tells."""


class ChatClient:
    """One server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """`url` is the server's base URL, with or without `/v1`.

        Raises:
            ChatError: it is not an HTTP URL.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise ChatError(f"{url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"{url} is not a URL such as {DEFAULT_URL}")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """Return the names of the models that the server has, at least one.

        Raises:
            ChatError: it cannot be asked, or has none.
        """
        connection, response = self._request("GET", "/v1/models", None)
        with contextlib.closing(connection):
            try:
                names = [str(one["id"]) for one in json.loads(response.read())["data"]]
            except (OSError, http.client.HTTPException) as error:
                raise ChatError(f"{self.url} broke off: {error}") from error
            except (ValueError, LookupError, TypeError):
                names = []
        if not names:
            raise ChatError(f"{self.url} names no model; is it an OpenAI-compatible server?")
        return names

    def answer(
        self, model: str, messages: Sequence[Message], settings: Mapping[str, Any] | None = None
    ) -> Iterator[Piece]:
        """Yield the answer piece by piece.

        Raises:
            ChatError: the server refuses, or the answer breaks off.
        """
        body = {"model": model, "messages": list(messages), "stream": True, **(settings or {})}
        body["stream_options"] = {"include_usage": True}
        connection, response = self._request("POST", "/v1/chat/completions", body)
        with contextlib.closing(connection):
            try:
                yield from read_events(response)
            except (OSError, http.client.HTTPException) as error:
                raise ChatError(f"the answer broke off: {error}; ask again") from error

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connect(self._host, self._port, timeout=_TIMEOUT_S)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._prefix + path, body=data, headers=self._headers)
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            text = response.read(_MAX_ERROR_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            start = pasted("up", "FILE")
            raise ChatError(f"nothing answers at {self.url} ({reason}); start it with: {start}") from error
        except BaseException:
            connection.close()
            raise
        connection.close()
        raise ChatError(_refusal(response.status, text))


def read_events(lines: Iterable[bytes]) -> Iterator[Piece]:
    """Read server-sent events of chat completion chunks (OpenAI API reference, "Streaming").

    Raises:
        ChatError: the server tells of an error, sends something else, or ends too early.
    """
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
            if "error" in event:
                raise ChatError(f"the server ended the answer: {event['error']['message']}")
            yield _piece(event)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ChatError("the server sent something that is not a chat completion") from error
    raise ChatError("the answer broke off: the server closed the connection")


def _piece(event: Mapping[str, Any]) -> Piece:
    text, thought = "", ""
    calls: list[CallPiece] = []
    for choice in event["choices"]:
        delta = choice["delta"]
        text += delta.get("content") or ""
        thought += delta.get("reasoning_content") or delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            calls.append(CallPiece(int(call["index"]), function.get("name") or "", function.get("arguments") or ""))
    usage = event.get("usage") or {}
    return Piece(text, thought, tuple(calls), usage.get("completion_tokens"))


_HINTS = {401: "; set OPENAI_API_KEY", 403: "; set OPENAI_API_KEY to a key that may", 429: "; ask again soon"}


def _refusal(status: int, text: bytes) -> str:
    code = None
    try:
        error = json.loads(text)["error"]
        message, code = str(error["message"]), error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        message = text.decode("utf-8", "replace").strip()[:200]
    hint = "; ask again in a moment" if code == LOADING else _HINTS.get(status, "")
    return f"the server answers {status}: {message}{hint}"
