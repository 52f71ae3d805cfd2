"""Reads values as programs write them, and writes them as JSON while they come: Python's literals, and Gemma's.

Quotation marks may be any string that the family uses; a word without them that is no number and no constant is a
string.
"""

from __future__ import annotations

import json
import re

from pagefleet_engine.parsers.reading import Emit, Malformed, Scan, Steps, markers
from pagefleet_engine.parsers.values import no_number

MAX_DEPTH = 64
_WORD = re.compile(r"""[^\s,:=()\[\]{}"'<]*""")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", '"': '\\"', "'": "'", "/": "/"}
_HEX = re.compile(r"[0-9a-fA-F]")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class LiteralReader:
    """Reads from `scan` and hands JSON text to `emit`.

    Args:
        quotes: strings around a text that has no escapes, besides Python's quotation marks.
    """

    def __init__(self, scan: Scan, emit: Emit, quotes: tuple[str, ...] = ()) -> None:
        self._scan = scan
        self._emit = emit
        self._quotes = quotes

    def value(self, depth: int = 0) -> Steps[None]:
        """Read a value.

        Raises:
            Malformed: none stands here, or it breaks off; what was read of it is written.
        """
        if depth > MAX_DEPTH:
            raise Malformed
        opening = yield from self._scan.peek()
        if opening == "{":
            yield from self.members(depth)
        elif opening in ("[", "("):
            yield from self._items(depth)
        else:
            yield from self._scalar()

    def members(self, depth: int = 0) -> Steps[None]:
        """Read an object, whose keys may have no quotation marks."""
        yield from self._scan.expect("{")
        self._emit("{")
        yield from self._scan.blank()
        while not (yield from self._scan.maybe("}")):
            yield from self._key()
            yield from self._scan.blank()
            yield from self._scan.expect(":")
            self._emit(": ")
            yield from self._scan.blank()
            yield from self.value(depth + 1)
            yield from self._separator("}")
        self._emit("}")

    def _items(self, depth: int) -> Steps[None]:
        closing = _CLOSING[(yield from self._scan.next())]
        self._emit("[")
        yield from self._scan.blank()
        while not (yield from self._scan.maybe(closing)):
            yield from self.value(depth + 1)
            yield from self._separator(closing)
        self._emit("]")

    def _separator(self, closing: str) -> Steps[None]:
        """Read the comma behind a member, unless none follows it."""
        yield from self._scan.blank()
        if (yield from self._scan.maybe(",")):
            yield from self._scan.blank()
            if (yield from self._scan.peek()) != closing:
                self._emit(", ")
        elif (yield from self._scan.peek()) != closing:
            raise Malformed

    def _key(self) -> Steps[None]:
        if not (yield from self._quoted()):
            self._emit(json.dumps((yield from self._word()), ensure_ascii=False))

    def _scalar(self) -> Steps[None]:
        if not (yield from self._quoted()):
            self._emit(_json_of((yield from self._word())))

    def _word(self) -> Steps[str]:
        word = yield from self._scan.run(_WORD)
        if not word:
            raise Malformed
        return word

    def _quoted(self) -> Steps[bool]:
        """Read a string in quotation marks, if there is one."""
        quote = yield from self._scan.maybe(*self._quotes, '"', "'")
        if not quote:
            return False
        self._emit('"')
        if quote in self._quotes:
            yield from self._plain(quote)
        else:
            yield from self._escaped(quote)
        self._emit('"')
        return True

    def _plain(self, quote: str) -> Steps[None]:
        found = yield from self._scan.until(markers(quote), self._text)
        self._scan.release()
        if not found:
            raise Malformed

    def _escaped(self, quote: str) -> Steps[None]:
        ends = markers(quote, "\\")
        while True:
            found = yield from self._scan.until(ends, self._text)
            self._scan.release()
            if found == quote:
                return
            if not found:
                raise Malformed
            yield from self._escape()

    def _escape(self) -> Steps[None]:
        """Read what follows a backslash."""
        char = yield from self._scan.next()
        if char in _HEX_DIGITS:
            yield from self._code_point(char)
        elif char != "\n":  # Python joins the lines
            self._emit(_ESCAPES.get(char) or json.dumps(f"\\{char}", ensure_ascii=False)[1:-1])

    def _code_point(self, kind: str) -> Steps[None]:
        digits = ""
        while len(digits) < _HEX_DIGITS[kind] and _HEX.match((yield from self._scan.peek())):
            digits += yield from self._scan.next()
        if len(digits) < _HEX_DIGITS[kind] or int(digits, 16) > 0x10FFFF:
            self._text(f"\\{kind}{digits}")
        elif int(digits, 16) > 0xFFFF:
            self._text(chr(int(digits, 16)))
        else:
            self._emit(f"\\u{int(digits, 16):04x}")

    def _text(self, text: str) -> None:
        self._emit(json.dumps(text, ensure_ascii=False)[1:-1])


def _json_of(word: str) -> str:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    try:
        json.loads(word, parse_constant=no_number)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return word
