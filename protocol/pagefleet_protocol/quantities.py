"""Kubernetes quantities: `2`, `500m`, `8Gi`.

Source: Kubernetes documentation, "Quantity" of k8s.io/apimachinery/pkg/api/resource.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from pagefleet_protocol.resource_base import wrong

_MAX_LENGTH = 32
_MAX_WHOLE = 10**15 - 1
_PATTERN = r"^([0-9]*[1-9][0-9]*(\.[0-9]+)?|[0-9]+\.[0-9]*[1-9][0-9]*)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
_SUFFIX: Mapping[str, float] = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15} | {
    f"{letter}i": 1024**power for power, letter in enumerate("KMGTP", start=1)
}


def quantity(text: str) -> float:
    """Return the number that a quantity stands for."""
    number = text.rstrip("mkKMGTPi")
    return float(number) * _SUFFIX[text[len(number) :]]


def _check_quantity(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_WHOLE:
        return str(value)
    if isinstance(value, str) and len(value) <= _MAX_LENGTH and re.fullmatch(_PATTERN[1:-1], value):
        return value
    shown = value if isinstance(value, float) and value > 0 else 0.5
    raise wrong(f'must be a Kubernetes quantity over 0 such as 2, "500m", "{shown}" or 8Gi (fractions in quotes)')


Quantity = Annotated[
    str,
    BeforeValidator(_check_quantity),
    Field(
        json_schema_extra={
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maximum": _MAX_WHOLE,
            "maxLength": _MAX_LENGTH,
            "minimum": 1,
            "pattern": _PATTERN,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
