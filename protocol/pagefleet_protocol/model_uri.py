"""Which model somebody means: `Qwen/Qwen3-0.6B`, a path, or a URI such as `hf://`, `s3://`, `file://`, `builtin://`.

Of a repository of GGUF files one is named behind it: `org/name:Q4_K_M` by its type, `org/name/file.gguf` by itself.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import quote, unquote

from pydantic import AfterValidator, Field

from pagefleet_protocol.resource_base import wrong

Scheme = Literal["hf", "modelscope", "s3", "gs", "https", "http", "pvc", "oci", "file", "builtin"]

_MAX_LENGTH = 1024
_SHORTEST_BUCKET = 3
_NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"
_REPOSITORY = rf"{_NAME}/{_NAME}(:[A-Za-z0-9_]+|(/{_NAME})+[.]gguf)?"
# Part of a path that is neither `.` nor `..`: those could leave the bucket's folder or the claim.
_PART = r"(\.{0,2}[^/.\x00-\x20][^/\x00-\x20]*|\.{3}[^/\x00-\x20]*)"
_WORD = "[A-Za-z0-9_~%+=,-]"
_WEB = rf"[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?(/\.{{0,2}}{_WORD}[A-Za-z0-9._~%+=,-]*)*/?"
_FORMS: Mapping[Scheme, tuple[str, str]] = {
    "hf": (_REPOSITORY, "hf://organization/name"),
    "modelscope": (_REPOSITORY, "modelscope://organization/name"),
    "s3": (rf"[a-z0-9][a-z0-9.-]{{2,}}(/{_PART})+/?", "s3://bucket/path"),
    "gs": (rf"[a-z0-9][a-z0-9._-]{{2,}}(/{_PART})+/?", "gs://bucket/path"),
    "https": (_WEB, "https://host/folder"),
    "http": (_WEB, "http://host/folder"),
    "pvc": (rf"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/{_PART})*/?", "pvc://claim/path"),
    "oci": (
        r"[a-z0-9][A-Za-z0-9._-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)+(:[A-Za-z0-9._-]+)?(@sha256:[0-9a-f]{64})?",
        "oci://registry/repository:tag",
    ),
    "file": (r"/[^\x00]+", "file:///absolute/path"),
    "builtin": (r"tiny", "builtin://tiny"),
}
PATTERN = "^(" + "|".join([_REPOSITORY, *(f"{scheme}://{form}" for scheme, (form, _) in _FORMS.items())]) + ")$"
"""Of every URI, and of names of the hub; means the same to Python and to Go."""
HUB_PAGE = r"^https?://(www[.])?(huggingface|hf)[.]co(:[0-9]+)?(/|$)"
"""How the address of a model's page begins, which has no files."""
EXAMPLES = ", ".join(["organization/name", *(example for _, example in _FORMS.values())])
REMOTE: tuple[Scheme, ...] = ("hf", "modelscope", "s3", "gs", "https", "http")
"""Of stores that are asked over the network."""
_PATH_BEGINS = ("/", "./", "../", "~")


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
    def repository(self) -> str:
        """Its `organization/name`, of what has revisions."""
        assert self.has_revisions
        return "/".join(self.path.split(":")[0].split("/")[:2])

    @property
    def gguf(self) -> str | None:
        """The file of a repository that is meant, or its type as in `Q4_K_M`; None: the repository is one model."""
        return (self.path.removeprefix(self.repository)[1:] or None) if self.has_revisions else None

    @property
    def remote(self) -> bool:
        """Whether the model has to be downloaded from a store over the network."""
        return self.scheme in REMOTE

    @property
    def fetchable(self) -> bool:
        """Whether it can be downloaded; an image of a registry need not be, where somebody mounts it."""
        return self.remote or self.scheme == "oci"

    @property
    def has_revisions(self) -> bool:
        """Whether it is a repository of a hub."""
        return self.scheme in ("hf", "modelscope")

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
    if re.match(HUB_PAGE, uri):
        name = "/".join(uri.split("/")[3:5]) or "organization/name"
        raise wrong(f"write {name[:200]!a}, which is the model's name on the hub, not the address of its page")
    scheme, separator, path = uri.partition("://")
    for name, (form, example) in _FORMS.items():
        if not separator or scheme != name:
            continue
        if re.fullmatch(form, path):
            return ModelUri(name, path)
        is_short = name in ("s3", "gs") and 0 < len(path.partition("/")[0]) < _SHORTEST_BUCKET
        why = f", a bucket's name having at least {_SHORTEST_BUCKET} letters" if is_short else ""
        raise wrong(f"write {example}{why}, not {uri[:80]!a}")
    raise wrong(f"give one of {EXAMPLES}; not {uri[:60]!a}")


def model_named(text: str, exists: Callable[[str], bool]) -> ModelUri:
    """Decide what a person means who names a model where paths are possible.

    A path is what is there, or begins with `/`, `./`, `../` or `~`; `organization/name` is a model of the hub.

    Args:
        text: as it was typed.
        exists: whether there is something at a path.

    Raises:
        PydanticCustomError: it can be none of this; the message says what to write.
    """
    if "://" in text:
        return parse_model_uri(text)
    path = os.path.expanduser(text)
    if text in (".", "..") or text.startswith(_PATH_BEGINS) or (text and exists(path)):
        return ModelUri("file", quote(os.path.abspath(path)))
    if re.fullmatch(_REPOSITORY, text):
        return ModelUri("hf", text)
    raise wrong(f"{text[:80]!a}: no such folder, and no name of a model: give a folder, or one of {EXAMPLES}")


def _with_scheme(text: str) -> str:
    """Write a name of the hub as its URI: `hf://organization/name`; anything else stays as it is."""
    return f"hf://{text}" if re.fullmatch(_REPOSITORY, text) else text


ModelUriText = Annotated[str, Field(max_length=_MAX_LENGTH), AfterValidator(_with_scheme)]
"""A rule of the resource sees to its form: it says how to write it, where a pattern would only show itself."""
