"""One step per keyword of JSON Schema: what becomes of it in a lowered schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pagefleet_engine.errors import InvalidRequest

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
OBJECT_WORDS = frozenset(
    {"properties", "required", "patternProperties", "additionalProperties", "minProperties", "maxProperties"}
    | {"propertyNames", "dependentRequired", "dependencies", "unevaluatedProperties"}
)
REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
IN_PLACE = REFERENCES | {"allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies"}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_HELD_FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""RFC 3339 without leap seconds and the year 0. The backends' own let 29 February through in any year."""
_OTHER_FORMATS = frozenset(
    {"idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"}
    | {"relative-json-pointer", "regex"}
)

Schema = dict[str, Any] | bool


class Lowering(Protocol):
    """What the steps need of the whole."""

    def node(self, value: Any, at: str, closed: bool) -> Schema:
        """Lower one subschema. `closed`: no other subschema speaks of the same object."""
        ...

    def refer(self, word: str, value: Mapping[str, Any], at: str, closed: bool) -> str:
        """Return the reference to the lowered definition that a reference in `value` means."""
        ...

    def referred(self, value: Mapping[str, Any], at: str) -> tuple[Any, str]:
        """Return the client's schema that `$ref` of `value` means, and its place."""
        ...

    def negated(self, beside: Mapping[str, Any], value: Any, at: str) -> Schema:
        """Return what is not `value`, lowered, within what `beside` says of the same thing."""
        ...


def refusal(place: str, why: str) -> InvalidRequest:
    """Build the error of a schema that cannot be held; `place` is a JSON pointer."""
    message = f"Invalid schema at '{place}': {why}."
    return InvalidRequest(message, "structured_outputs.json", "invalid_json_schema")


def escaped(name: str) -> str:
    """Return a name as a JSON pointer has it."""
    return name.replace("~", "~0").replace("/", "~1")


def names_of(value: Any, at: str) -> list[str]:
    """Return an array of strings.

    Raises:
        InvalidRequest: it is something else.
    """
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refusal(at, "it takes an array of strings")
    return value


Step = Callable[[Lowering, Mapping[str, Any], str, dict[str, Any], list[Schema], bool], None]
"""(lowering, the client's schema, its place, what comes out, what must hold too, alone): `alone` says that subschemas
in place of this one may be closed."""


def _keep(word: str, kinds: tuple[type, ...], what: str) -> Step:
    def step(_: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
        argument = value[word]
        if not isinstance(argument, kinds) or isinstance(argument, bool):
            raise refusal(f"{at}/{word}", f"'{word}' takes {what}")
        out[word] = argument

    return step


def _type(_: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
    names = [value["type"]] if isinstance(value["type"], str) else value["type"]
    if not isinstance(names, list) or not names or not all(name in TYPES for name in names):
        raise refusal(f"{at}/type", f"'type' takes {', '.join(TYPES)}, or an array of them")
    out["type"] = value["type"]


def _count(word: str) -> Step:
    def step(_: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
        number = value[word]
        if isinstance(number, bool) or not isinstance(number, int | float) or number != int(number) or number < 0:
            raise refusal(f"{at}/{word}", f"'{word}' takes an integer of at least 0")
        out[word] = int(number)

    return step


def _bound(word: str) -> Step:
    def step(_: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
        number = value[word]
        if isinstance(number, bool) and word.startswith("exclusive"):  # as draft 4 has it
            plain = word.removeprefix("exclusive").lower()
            if number and plain in value:
                out[word] = value[plain]
            return
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise refusal(f"{at}/{word}", f"'{word}' takes a number")
        if word == "multipleOf" and number <= 0:
            raise refusal(f"{at}/{word}", "'multipleOf' takes a number over 0")
        out[word] = number

    return step


def _enum(_: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
    if not isinstance(value["enum"], list) or not value["enum"]:
        raise refusal(f"{at}/enum", "'enum' takes an array of one value at least")
    out["enum"] = value["enum"]


def _const(_: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
    out["const"] = value["const"]


def _format(
    _: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], also: list[Schema], alone: bool
) -> None:
    name = value["format"]
    if name in _OTHER_FORMATS:
        raise refusal(f"{at}/format", f"the format {name!r} is not supported")
    if name in _PATTERNS:
        also.append({"pattern": _PATTERNS[name]})
    elif name in _HELD_FORMATS:  # any other is a note that JSON Schema knows nothing of
        out["format"] = name


# --- in place ---


def _reference(word: str) -> Step:
    def step(
        low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], also: list[Schema], alone: bool
    ) -> None:
        also.append({"$ref": low.refer(word, value, at, alone)})

    return step


def _ref(
    low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], also: list[Schema], alone: bool
) -> None:
    out["$ref"] = low.refer("$ref", value, at, alone)


def _several(word: str) -> Step:
    def step(
        low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], also: list[Schema], alone: bool
    ) -> None:
        parts = value[word]
        if not isinstance(parts, list) or not parts:
            raise refusal(f"{at}/{word}", f"'{word}' takes an array of one schema at least")
        closed = alone and (word != "allOf" or len(parts) == 1)
        out[word] = [low.node(part, f"{at}/{word}/{i}", closed) for i, part in enumerate(parts)]

    return step


def _if(low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], also: list[Schema], alone: bool) -> None:
    """`if` with `then` and `else`: either the condition and the one, or not the condition and the other."""
    if "then" not in value and "else" not in value:
        return
    condition = low.node(value["if"], f"{at}/if", False)
    otherwise = low.negated(value, value["if"], f"{at}/if")
    branches: list[Schema] = []
    for first, word in ((condition, "then"), (otherwise, "else")):
        second = low.node(value.get(word, True), f"{at}/{word}", False)
        if first is not False and second is not False:
            branches.append({"allOf": [first, second]})
    also.append({"anyOf": branches} if branches else False)


def _not(
    low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], also: list[Schema], alone: bool
) -> None:
    also.append(low.negated(value, value["not"], f"{at}/not"))


# --- objects ---


def _named(word: str) -> Step:
    def step(low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
        parts = _object(value[word], word, at)
        lowered = {name: low.node(part, f"{at}/{word}/{escaped(name)}", True) for name, part in parts.items()}
        out[word] = {**lowered, **out.get(word, {})}

    return step


def _object(value: Any, word: str, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refusal(f"{at}/{word}", f"'{word}' takes an object")
    return value


def _dependent(word: str) -> Step:
    """Where the property is there, something holds: either it is not there, or that holds."""

    def step(
        low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], also: list[Schema], alone: bool
    ) -> None:
        for name, part in _object(value[word], word, at).items():
            place = f"{at}/{word}/{escaped(name)}"
            needs = isinstance(part, list)
            then: Schema = {"required": names_of(part, place)} if needs else low.node(part, place, False)
            without: Schema = {"properties": {name: False}}
            also.append({"anyOf": [without, then]} if then is not False else without)

    return step


def _property_names(low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
    rule = value["propertyNames"]
    place = f"{at}/propertyNames"
    if rule is True or rule in ({}, {"type": "string"}):
        return
    others = value.get("additionalProperties", True)
    if {"patternProperties", "unevaluatedProperties"} & value.keys() or IN_PLACE & value.keys():
        raise refusal(place, "'propertyNames' beside 'patternProperties' or other schemas is not supported")
    listed = value.get("properties", {})
    if rule is False:
        out["maxProperties"] = 0
        return
    allowed = rule.get("enum") or ([rule["const"]] if "const" in rule else None) if isinstance(rule, dict) else None
    if allowed is not None and rule.keys() <= {"type", "enum", "const"}:
        names = [name for name in allowed if isinstance(name, str)]
        out["properties"] = {
            **{name: low.node(listed.get(name, others), place, True) for name in names},
            **{name: False for name in listed if name not in names},
        }
        out["additionalProperties"] = False
        return
    pattern = _name_pattern(rule)
    if pattern is None or listed:
        raise refusal(place, "'propertyNames' takes 'enum', 'const' or, where no property is named, 'pattern'")
    out["patternProperties"] = {pattern: low.node(others, place, True)}
    out["additionalProperties"] = False


def _unevaluated_properties(low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
    rule = value["unevaluatedProperties"]
    place = f"{at}/unevaluatedProperties"
    if rule is True or rule == {} or "additionalProperties" in value:
        return
    found = _evaluated(low, value, at) if IN_PLACE & value.keys() else {}
    if found is None:
        raise refusal(place, "which properties it is about depends on the answer")
    for word, names in found.items():
        known = out.setdefault(word, {})
        for name in names:
            known.setdefault(name, {})
    out["additionalProperties"] = low.node(rule, place, True)


def _evaluated(low: Lowering, value: Any, at: str, depth: int = 0) -> dict[str, set[str]] | None:
    """Return the properties that a schema and those in its place speak of; None where the answer decides that."""
    found: dict[str, set[str]] = {"properties": set(), "patternProperties": set()}
    if not isinstance(value, dict):
        return found
    if depth > 32 or (IN_PLACE | {"additionalProperties"}) & value.keys() - {"$ref", "allOf"}:
        return None
    inner = [(part, f"{at}/allOf/{i}") for i, part in enumerate(value.get("allOf", ()))]
    if "$ref" in value:
        inner.append(low.referred(value, at))
    if depth and "unevaluatedProperties" in value:
        return None
    for word, names in found.items():
        names.update(value.get(word, ()))
    for part, place in inner:
        more = _evaluated(low, part, place, depth + 1)
        if more is None:
            return None
        for word, names in found.items():
            names.update(more[word])
    return found


def _name_pattern(rule: Any) -> str | None:
    """Write a rule for names as one pattern."""
    if not isinstance(rule, dict) or not rule.keys() <= {"type", "pattern", "minLength", "maxLength"}:
        return None
    if "pattern" in rule:
        return str(rule["pattern"]) if rule.keys() <= {"type", "pattern"} else None
    return f"^[\\s\\S]{{{int(rule.get('minLength', 0))},{rule.get('maxLength', '')}}}$"


def _required(_: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
    out["required"] = list(dict.fromkeys(names_of(value["required"], f"{at}/required")))


def _additional_properties(low: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
    out.setdefault("additionalProperties", low.node(value["additionalProperties"], f"{at}/additionalProperties", True))


def _min_properties(_: Lowering, value: Mapping[str, Any], at: str, out: dict[str, Any], *rest: Any) -> None:
    """Names that the schema does not give may be written twice, and count once."""
    _count("minProperties")(_, value, at, out, [], False)
    needed = value.get("required", [])
    if isinstance(needed, list) and out["minProperties"] > len(needed) + 1:
        raise refusal(f"{at}/minProperties", "it may be one more than the properties that are 'required', no more")


def _draft_3(word: str) -> Step:
    def step(_: Lowering, value: Mapping[str, Any], at: str, *rest: Any) -> None:
        raise refusal(f"{at}/{word}", f"'{word}' is of draft 3, and drafts from 4 on are supported")

    return step


STEPS: Mapping[str, Step] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "format": _format,
    "pattern": _keep("pattern", (str,), "a string"),
    **{word: _count(word) for word in _COUNTS},
    **{word: _bound(word) for word in _BOUNDS},
    "$ref": _ref,
    **{word: _draft_3(word) for word in ("disallow", "divisibleBy", "extends")},
    **{word: _reference(word) for word in ("$dynamicRef", "$recursiveRef")},
    **{word: _several(word) for word in ("allOf", "anyOf", "oneOf")},
    "not": _not,
    "if": _if,
    "minProperties": _min_properties,
    "properties": _named("properties"),
    "patternProperties": _named("patternProperties"),
    "required": _required,
    "additionalProperties": _additional_properties,
    "propertyNames": _property_names,
    **{word: _dependent(word) for word in ("dependentRequired", "dependentSchemas", "dependencies")},
    "unevaluatedProperties": _unevaluated_properties,
}
