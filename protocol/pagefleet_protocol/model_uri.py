"""Where a model is: `hf:// s3:// gs:// pvc:// oci:// file:// builtin://tiny`, taken apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import unquote

from pydantic import Field

from pagefleet_protocol.resource_base import wrong

Scheme = Literal["hf", "s3", "gs", "pvc", "oci", "file", "builtin"]

_MAX_LENGTH = 1024
# Part of a path that is neither `.` nor `..`: those could leave the bucket's folder or the claim.
_PART = r"(\.{0,2}[^/.\x00-\x20][^/\x00-\x20]*|\.{3}[^/\x00-\x20]*)"
_FORMS: Mapping[Scheme, tuple[str, str]] = {
    "hf": (r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*", "hf://organization/name"),
    "s3": (rf"[a-z0-9][a-z0-9.-]+(/{_PART})+/?", "s3://bucket/path"),
    "gs": (rf"[a-z0-9][a-z0-9._-]+(/{_PART})+/?", "gs://bucket/path"),
    "pvc": (rf"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/{_PART})*/?", "pvc://claim/path"),
    "oci": (
        r"[a-z0-9][A-Za-z0-9._-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)+(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]{64})?",
        "oci://registry/repository:tag",
    ),
    "file": (r"/[^\x00]+", "file:///absolute/path"),
    "builtin": (r"tiny", "builtin://tiny"),
}
PATTERN = "^(" + "|".join(f"{scheme}://{form}" for scheme, (form, _) in _FORMS.items()) + ")$"
"""Of every URI; means the same to Python and to Go."""
EXAMPLES = ", ".join(example for _, example in _FORMS.values())


@dataclass(frozen=True, slots=True)
class ModelUri:
    """A checked URI; `path` is what follows `://`."""

    scheme: Scheme
    path: str

    @property
    def text(self) -> str:
        """The URI as it was written."""
        return f"{self.scheme}://{self.path}"

    @property
    def remote(self) -> bool:
        """Whether the model has to be downloaded from a store over the network."""
        return self.scheme in ("hf", "s3", "gs")

    @property
    def local_path(self) -> str:
        """Path on this machine, of file:// alone."""
        assert self.scheme == "file"
        return unquote(self.path)

    @property
    def claim(self) -> str:
        """Name of the claim, of pvc:// alone."""
        assert self.scheme == "pvc"
        return self.path.partition("/")[0]

    @property
    def sub_path(self) -> str:
        """Path within the claim, of pvc:// alone; empty for the whole claim."""
        assert self.scheme == "pvc"
        return self.path.partition("/")[2].rstrip("/")


def parse_model_uri(uri: str) -> ModelUri:
    """Take a URI apart.

    Raises:
        PydanticCustomError: it is none of the forms above; the message names the right one.
    """
    scheme, separator, path = uri.partition("://")
    for name, (form, example) in _FORMS.items():
        if not separator or scheme != name:
            continue
        if re.fullmatch(form, path):
            return ModelUri(name, path)
        raise wrong(f"write {example}, not {uri[:80]!a}")
    raise wrong(f"give one of {EXAMPLES}; not {uri[:60]!a}")


ModelUriText = Annotated[str, Field(max_length=_MAX_LENGTH)]
"""A rule of the resource sees to its form: it says how to write it, where a pattern would only show itself."""
