"""From a document to an InferenceService or InferenceProfile: each field by its type, then the rules about several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.alias_generators import to_snake

from pagefleet_protocol.field_errors import FieldError, InvalidDocument, Path, field_errors
from pagefleet_protocol.inference_profile import InferenceProfile
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.resource_base import ITEMS, Rule
from pagefleet_protocol.resource_rules import PROFILE_RULES, SERVICE_RULES

_Resource = TypeVar("_Resource", InferenceService, InferenceProfile)


def parse_inference_service(document: object) -> InferenceService:
    """Check a document made of dicts, lists and scalars.

    Raises:
        InvalidDocument: with every mistake in it, each with its path.
    """
    return _parse(document, InferenceService, SERVICE_RULES)


def parse_inference_profile(document: object) -> InferenceProfile:
    """As `parse_inference_service`, for a profile."""
    return _parse(document, InferenceProfile, PROFILE_RULES)


def _parse(document: object, kind: type[_Resource], rules: Sequence[Rule]) -> _Resource:
    try:
        resource = kind.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as failure:
        raise InvalidDocument(field_errors(kind, failure)) from failure
    if mistakes := _broken_rules(resource, rules):
        raise InvalidDocument(mistakes)
    return resource


def _broken_rules(resource: InferenceService | InferenceProfile, rules: Sequence[Rule]) -> tuple[FieldError, ...]:
    """Return a mistake for each rule that does not hold."""
    return tuple(
        FieldError((*path, *filter(None, rule.field.split("."))), rule.message)
        for rule in rules
        for path, node in _nodes(resource, rule.at)
        if not rule.holds(node)
    )


def _nodes(node: Any, at: tuple[str, ...], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if node is None:
        return  # nothing is written there
    if not at:
        yield path, node
    elif at[0] == ITEMS:
        for index, item in enumerate(node):
            yield from _nodes(item, at[1:], (*path, index))
    else:
        yield from _nodes(getattr(node, to_snake(at[0])), at[1:], (*path, at[0]))
