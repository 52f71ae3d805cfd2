"""What all resources of pagefleet.dev share: strictness, metadata, references to other objects, the form of rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")
_OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
_LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"


def wrong(message: str) -> PydanticCustomError:
    """Return the error for a value that a person has to change; the message says how."""
    # Braces would be read as a template's fields; the message is finished already.
    return PydanticCustomError("not_allowed", "{message}", {"message": message})


def matching(pattern: str, message: str, max_length: int) -> tuple[AfterValidator, Any]:
    """Return what makes a string match: for us with a message that helps, for the API server as a pattern.

    Rules of the API server may cost no more than the longest string allows, so each has its `max_length`.

    `pattern` means the same to Python and to Go: it is anchored, and says `[^\\x00-\\x20]` rather than `\\S`.
    """
    assert pattern.startswith("^"), "patterns are anchored"
    assert pattern.endswith("$"), "patterns are anchored"
    compiled = re.compile(pattern[1:-1])

    def check(text: str) -> str:
        if len(text) > max_length or not compiled.fullmatch(text):
            raise wrong(message)
        return text

    return AfterValidator(check), Field(json_schema_extra={"maxLength": max_length, "pattern": pattern})


def all_different(key: str = "") -> AfterValidator:
    """Return what refuses a list with equal entries, or with entries whose `key` is equal."""

    def check(entries: Sequence[Any]) -> Sequence[Any]:
        seen = set()
        for entry in entries:
            value = getattr(entry, key) if key else entry
            if value in seen:
                raise wrong(f"has {value!a} twice; every {key or 'entry'} must be there once")
            seen.add(value)
        return entries

    return AfterValidator(check)


def _check_namespace(namespace: str) -> str:
    if not _NAMESPACE.match(namespace):
        raise wrong("must be at most 63 lower-case letters, digits and '-', with neither end a '-'")
    return namespace


ObjectName = Annotated[
    str,
    *matching(_OBJECT_NAME, "must be a Kubernetes object's name: at most 253 lower-case letters, digits, - and .", 253),
]
"""Name of an object that others made: a Secret, claim, profile or gateway."""
_LabelValue = Annotated[
    str, *matching(_LABEL_VALUE, "must be a label's value: at most 63 letters, digits and - _ .", 63)
]


def _without_empty_entries(value: object) -> object:
    return {key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value


Labels = Annotated[dict[str, _LabelValue], Field(max_length=16), BeforeValidator(_without_empty_entries)]
"""Labels that objects of ours get or have to have."""


class Object(BaseModel):
    """Strict: no unknown field, no conversion between types. YAML's camelCase, Python's snake_case."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        strict=True,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
        validate_by_name=True,
        validate_by_alias=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, value: Any) -> Any:
        """A field without a value counts as not written, as the API server has it."""
        if not isinstance(value, dict):
            return value
        required = {field.alias or name for name, field in cls.model_fields.items() if field.is_required()}
        return {key: one for key, one in value.items() if one is not None or key in required}


class ObjectMeta(Object):
    """Name and labels, as every Kubernetes object has."""

    name: str
    """The object's name."""
    namespace: Annotated[str, AfterValidator(_check_namespace)] = "default"
    """Where it lives in a cluster."""
    labels: dict[str, str] = Field(default_factory=dict)
    """For selecting."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Notes of other tools."""
    uid: str = ""
    """The API server's own name of it; empty outside a cluster."""
    generation: int = 1
    """Counts changes of the spec."""


class NameRef(Object):
    """Names an object of the same namespace."""

    name: ObjectName
    """Its name."""


ITEMS = "[]"
"""In a rule's place: every entry of the list."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What has to hold at one place of a resource."""

    at: tuple[str, ...]
    """The node that the rule looks at, from the resource on: `spec`, `engine`, ..."""
    cel: str
    """True where `self`, the node with its defaults, is right."""
    message: str
    """What is wrong, and so what to change."""
    holds: Callable[[Any], bool]
    """The same as `cel`, of the node as our types have it."""
    field: str = ""
    """Field below the node that has to change, with dots; empty: the node itself."""
