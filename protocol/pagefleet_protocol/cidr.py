"""Blocks of IP addresses, as NetworkPolicies have them: the network and the length of its prefix."""

from __future__ import annotations

from typing import Annotated

from pagefleet_protocol.resource_base import matching

_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    (
        f"({_GROUP}:){{7}}{_GROUP}",
        f"({_GROUP}:){{1,7}}:",
        *(f"({_GROUP}:){{1,{7 - after}}}(:{_GROUP}){{1,{after}}}" for after in range(1, 7)),
        f":(:{_GROUP}){{1,7}}",
        "::",
    )
)
# As a pattern: isCIDR() of CEL needs Kubernetes 1.31.
_CIDR = rf"^({_BYTE}(\.{_BYTE}){{3}}/(3[0-2]|[12]?[0-9])|({_IPV6})/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$"

Cidr = Annotated[str, *matching(_CIDR, "must be addresses such as 10.0.0.0/8 or fd00::/8", 49)]
