"""What a file or a client says, in a line of ours."""

from __future__ import annotations


def escape_control(text: str) -> str:
    r"""Return `text` with control characters, line and paragraph separators written as `\x1b` or `\u2028`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
