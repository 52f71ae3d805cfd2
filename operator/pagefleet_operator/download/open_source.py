"""From a URI to the store that has the model."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from pagefleet_protocol.model_uri import ModelUri, parse_model_uri
from pydantic_core import PydanticCustomError

from pagefleet_operator.download.errors import BadSettings
from pagefleet_operator.download.hub import open_hub
from pagefleet_operator.download.local_folder import open_folder
from pagefleet_operator.download.object_store import open_object_store
from pagefleet_operator.download.settings import DownloadSettings
from pagefleet_operator.download.source import ModelSource


def downloadable(uri: str) -> ModelUri:
    """Take a URI apart.

    Raises:
        BadSettings: it is none, or one of what is mounted and never downloaded.
    """
    try:
        parsed = parse_model_uri(uri)
    except PydanticCustomError as error:
        raise BadSettings(str(error)) from error
    if not parsed.remote and parsed.scheme != "file":
        raise BadSettings(f"{parsed.scheme}:// is not downloaded: give hf://, s3://, gs:// or file://")
    return parsed


def open_source(uri: ModelUri, settings: DownloadSettings) -> AbstractAsyncContextManager[ModelSource]:
    """The model's store, for as long as the context lasts.

    Raises:
        BadSettings: the settings do not fit the store.
    """
    if settings.revision and uri.scheme != "hf":
        raise BadSettings(f"a revision is of a repository; {uri.scheme}:// has none: leave it out")
    match uri.scheme:
        case "hf":
            return open_hub(uri.path, settings)
        case "s3" | "gs":
            return open_object_store(uri.scheme, uri.path, settings)
        case _:
            return open_folder(Path(uri.local_path))
