"""How much text and how many items a chat template may make: told before an operation where it could be much at once.

jinja2's sandbox bounds `range` and nothing else: a few characters of a template, or a user's words in one that means no
harm, would take gigabytes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_AT_ONCE = 16 * 1024 * 1024
"""Characters or items of one result."""
MAX_IN_ALL = 512 * 1024 * 1024
"""Over all results of a rendering: text that grows message by message is copied each time."""
MAX_NUMBER = 2**20
"""Of a width, a count or an indent; what it does once it may do for every line."""
_MAX_BITS = 65_536
_WIDTH = re.compile(r"[0-9]{7}|\*|\{[^}]*\{")

_SIZED = (str, bytes, list, tuple)


class TemplateTooLargeError(Exception):
    """A result would be larger than a template's may be."""


def size_of(value: object) -> int:
    """Return the size of a result; 0 of one that is no text and no list."""
    return len(value) if isinstance(value, _SIZED) else 0


def check_operator(operator: str, left: object, right: object) -> None:
    """Refuse `left operator right` where it would be too large.

    Raises:
        TemplateTooLargeError: it would.
    """
    if operator == "*":
        for value, count in ((left, right), (right, left)):
            if isinstance(count, int) and isinstance(value, _SIZED):
                _check(len(value) * max(count, 0))
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        _check(MAX_AT_ONCE + 1 if bits > _MAX_BITS else 0)
    if operator == "+":
        _check(size_of(left) + size_of(right))
    if operator == "%" and isinstance(left, str):
        _check_format(left)


def check_call(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Refuse a filter, or a method (its text being the first argument), where its result would be too large.

    Raises:
        TemplateTooLargeError: it would.
    """
    values = [*arguments, *keywords.values()]
    numbers = [value for value in values if isinstance(value, int)]
    most = max(numbers, default=0)
    if most > MAX_NUMBER:
        raise TemplateTooLargeError
    text = arguments[0] if arguments else ""
    added = max((len(value) for value in values[1:] if isinstance(value, str)), default=0)
    if name in ("format", "format_map") and isinstance(text, str):
        _check_format(text)
    elif name in ("replace", "translate", "wordwrap", "expandtabs", "indent") and isinstance(text, str):
        if name == "translate" and len(values) > 1 and isinstance(values[1], Mapping):
            added = max(map(size_of, values[1].values()), default=0)
        places = text.count("\n") + 1 if name == "indent" else len(text) + 1
        if name == "replace" and isinstance(values[1], str):
            places = text.count(values[1])
        _check(len(text) + places * max(added, most if name in ("expandtabs", "indent") else 0))
    elif name == "join":
        pieces, between = (text, added) if isinstance(text, list | tuple) else (values[-1], size_of(text))
        if isinstance(pieces, _SIZED):
            _check(sum(map(size_of, pieces)) + between * len(pieces))
    elif name == "tojson" and most > 64:
        raise TemplateTooLargeError


def bounded_filter(name: str, function: Callable[..., Any], spend: Callable[[object], None]) -> Callable[..., Any]:
    """Return a filter that refuses what would be too large, and tells `spend` of its results."""
    passed = hasattr(function, "jinja_pass_arg")  # context or environment, before the value

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        own = list(args[1:] if passed else args)
        if name == "join" and own and not isinstance(own[0], _SIZED):  # a generator: it is looked at twice
            own[0] = list(own[0])
            args = (*args[:1], *own) if passed else tuple(own)
        check_call(name, own, kwargs)
        result = function(*args, **kwargs)
        spend(result)
        return result

    return bounded


def _check_format(text: str) -> None:
    """Refuse widths of seven digits and more, and those that come from arguments."""
    if _WIDTH.search(text):
        raise TemplateTooLargeError


def _check(size: int) -> None:
    if size > MAX_AT_ONCE:
        raise TemplateTooLargeError
