"""What the hub's answers other than success mean to a person, and which of them are worth another attempt. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagefleet_operator.download.errors import AccessDenied, BadSettings, DownloadError, Interrupted, ModelNotFound

_TOKEN = "HF_TOKEN (in a cluster: a key of that name in the Secret that spec.model.secretRef names)"  # noqa: S105


@dataclass(frozen=True, slots=True)
class HubModel:
    """What was asked for."""

    repository: str
    revision: str
    endpoint: str
    has_token: bool


def hub_refusal(model: HubModel, status: int, headers: Mapping[str, str]) -> DownloadError | Interrupted:
    """The error for an answer with `status` of 400 or more; header names in lower case.

    The hub names its reasons in the header X-Error-Code; a mirror may not.
    """
    code = headers.get("x-error-code", "")
    if code in ("GatedRepo", "RevisionNotFound", "RepoNotFound") or status == 404:
        return _missing_or_closed(model, code)
    if status in (401, 403):
        return AccessDenied(f"{model.endpoint} refuses to give {model.repository}: {_token_remedy(model)}")
    if status == 429:
        remedy = "use a mirror (--endpoint)" if model.has_token else "a token in HF_TOKEN raises the limit"
        return Interrupted(f"{model.endpoint} answers 429 Too Many Requests; {remedy}", _retry_after(headers))
    if status >= 500 or status == 408:
        return Interrupted(f"{model.endpoint} answers {status}", _retry_after(headers))
    return BadSettings(f"{model.endpoint} answers {status} for {model.repository}: is it the URL of a hub?")


def _missing_or_closed(model: HubModel, code: str) -> DownloadError:
    match code:
        case "GatedRepo":
            return AccessDenied(f"the repository {model.repository} is gated: {_gated_remedy(model)}")
        case "RevisionNotFound":
            return ModelNotFound(
                f"the repository {model.repository} has no revision {model.revision}: give one of its branches, tags "
                "or commits"
            )
        case "EntryNotFound":
            return ModelNotFound(f"{model.repository} at {model.revision} has lost a file that it listed: start again")
        case _:
            return ModelNotFound(
                f"the repository {model.repository} does not exist on {model.endpoint}, or is private: check the name; "
                f"if it is private, put a token that may read it into {_TOKEN}"
            )


def _gated_remedy(model: HubModel) -> str:
    page = f"{model.endpoint}/{model.repository}"
    if model.has_token:
        return f"the account of the given token has no access; accept the licence at {page}, or give another token"
    return f"accept the licence at {page}, then put a token of that account into {_TOKEN}"


def _token_remedy(model: HubModel) -> str:
    if model.has_token:
        return f"the token is wrong, has expired or may not read it; put another one into {_TOKEN}"
    return f"put a token that may read it into {_TOKEN}"


def _retry_after(headers: Mapping[str, str]) -> float | None:
    value = headers.get("retry-after", "").strip()
    return float(value) if value.isascii() and value.isdecimal() and len(value) < 10 else None
