"""Kubernetes quantities: `2`, `500m`, `8Gi`; and numbers of tokens: `4096`, `32k`.

Source: Kubernetes documentation, "Quantity" of k8s.io/apimachinery/pkg/api/resource.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
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


def scaled(text: str, factor: Fraction) -> str:
    """Return a quantity `factor` times as large, in its own unit, rounded up to thousandths of it."""
    number = text.rstrip("mkKMGTPi")
    thousandths = math.ceil(Fraction(number) * factor * 1000)
    whole, rest = divmod(thousandths, 1000)
    return f"{whole}{f'.{rest:03}'.rstrip('0') if rest else ''}{text[len(number) :]}"


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


_TOKENS = r"^[1-9][0-9]{0,3}(k|K|Ki)$"


def _in_full(value: object) -> object:
    """Write `32k` as 32,000, and `32K` or `32Ki` as 32,768; anything else stays as it is."""
    if not isinstance(value, str) or not re.fullmatch(_TOKENS[1:-1], value):
        return value
    number = value.rstrip("kKi")
    return int(number) * (1000 if value.endswith("k") else 1024)


TokenCount = Annotated[
    int,
    Field(
        ge=1,
        le=2**24,
        json_schema_extra={
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": 6,
            "pattern": _TOKENS,
            "x-kubernetes-int-or-string": True,
        },
    ),
    BeforeValidator(_in_full),
]
"""As flags and vLLM read them: a small letter is a power of 1000."""
