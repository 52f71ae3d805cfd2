"""What all resources of pagefleet.dev share: strictness, metadata, and references to other objects."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

MAX_NAME_LENGTH = 40
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")
OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
"""Names of objects that others made: Secrets, claims, profiles, gateways."""


def wrong(message: str) -> PydanticCustomError:
    """Return the error for a value that a person has to change; the message says how."""
    # Braces would be read as a template's fields; the message is finished already.
    return PydanticCustomError("not_allowed", "{message}", {"message": message})


def _check_name(name: str) -> str:
    if len(name) > MAX_NAME_LENGTH or not _NAME.match(name):
        raise wrong(
            f"must be at most {MAX_NAME_LENGTH} lower-case letters, digits and '-', starting with a letter and not "
            "ending with '-' (names of pods are made from it)"
        )
    return name


def _check_namespace(namespace: str) -> str:
    if not _NAMESPACE.match(namespace):
        raise wrong("must be at most 63 lower-case letters, digits and '-', with neither end a '-'")
    return namespace


def _check_object_name(name: str) -> str:
    if not re.match(OBJECT_NAME, name) or name.endswith("\n"):
        raise wrong("must be the name of a Kubernetes object: lower-case letters, digits, '-' and '.'")
    return name


ObjectName = Annotated[
    str, AfterValidator(_check_object_name), Field(json_schema_extra={"pattern": OBJECT_NAME, "maxLength": 253})
]


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


class ObjectMeta(Object):
    """Name and labels, as every Kubernetes object has."""

    name: Annotated[str, AfterValidator(_check_name)]
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
