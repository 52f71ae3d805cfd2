"""A person's mistakes in a document, each with its path and what is allowed there.

Turns pydantic's list of errors into sentences for somebody who wrote YAML and knows nothing of Python. All mistakes of
a document are told at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pagefleet_protocol.spelling import near_words

Path = tuple[str | int, ...]

_NAME_OF_TYPE: Mapping[type, str] = {
    dict: "a mapping",
    list: "a list",
    str: "the text",
    bool: "the truth value",
    int: "the number",
    float: "the number",
}
_WANTED = {
    "string_type": "text (put it in quotes)",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of fields",
    "model_attributes_type": "a mapping of fields",
}


@dataclass(frozen=True, slots=True)
class FieldError:
    """One mistake: where, and what would be right there."""

    path: Path
    message: str

    def __str__(self) -> str:
        return f"{path_text(self.path)}: {self.message}"


class InvalidDocument(ValueError):
    """A document has mistakes; `errors` holds all of them, the message one per line."""

    def __init__(self, errors: Iterable[FieldError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))


def path_text(path: Path) -> str:
    """Write a path as people do: `spec.engine.args[2]`; the document itself is `document`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "document"


def field_errors(model: type[BaseModel], failure: ValidationError) -> tuple[FieldError, ...]:
    """Translate what pydantic found in a document of type `model`, in the order of the fields."""
    return tuple(FieldError(error["loc"], _sentence(model, error)) for error in failure.errors(include_url=False))


def closest(word: str, allowed: Iterable[str]) -> str:
    """Return ` Did you mean X?`, or nothing when no allowed word is near."""
    near = near_words(word, allowed)
    return f" Did you mean {near[0]}?" if near else ""


def _sentence(model: type[BaseModel], error: ErrorDetails) -> str:
    kind, path, given = error["type"], error["loc"], error["input"]
    limits: Mapping[str, Any] = error.get("ctx", {})
    match kind:
        case "missing":
            text = f"is required{_described(model, path)}"
        case "extra_forbidden":
            fields = _fields_at(model, path[:-1])
            text = f"unknown field.{closest(str(path[-1]), fields)} Fields here: {', '.join(fields)}"
        case "literal_error":
            allowed = str(limits["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
            text = f"must be {_either(allowed)}, not {_shown(given)}.{closest(str(given), allowed)}"
        case "greater_than_equal":
            text = f"must be at least {limits['ge']}, not {_shown(given)}"
        case "less_than_equal":
            text = f"must be at most {limits['le']}, not {_shown(given)}"
        case "too_long":
            text = f"has {limits['actual_length']} entries; at most {limits['max_length']} are allowed"
        case "string_too_short":
            text = "must not be empty"
        case "string_too_long":
            text = f"has {len(given)} characters; at most {limits['max_length']} are allowed"
        case _:
            text = f"must be {_WANTED[kind]}, not {_shown(given)}" if kind in _WANTED else error["msg"]
    return text


def _described(model: type[BaseModel], path: Path) -> str:
    parent = _model_at(model, path[:-1])
    for field in parent.model_fields.values() if parent else ():
        if (field.alias or "") == path[-1] and field.description:
            return f": {field.description.splitlines()[0]}"
    return ""


def _fields_at(model: type[BaseModel], path: Path) -> list[str]:
    found = _model_at(model, path)
    return [field.alias or name for name, field in found.model_fields.items()] if found else []


def _model_at(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """Follow a path through the fields' types to the model that it lies in."""
    current: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int):
            continue  # a list's entries have the type that the list's field named
        if current is None:
            return None
        fields = {field.alias or name: field for name, field in current.model_fields.items()}
        current = _model_in(fields[part].annotation) if part in fields else None
    return current


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for argument in get_args(annotation) if (found := _model_in(argument))), None)


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _shown(value: object) -> str:
    if value is None:
        return "empty"
    if isinstance(value, dict | list):
        return _NAME_OF_TYPE[type(value)]
    text = ascii(value)
    name = _NAME_OF_TYPE.get(type(value), "")
    return f"{name} {text if len(text) <= 60 else text[:57] + '...'}".strip()
