"""Whose request it is, by its API key. Keys come from a file that is re-read when it changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from pagefleet_protocol.key_file import KeyFile, KeyFileError, read_bearer_key
from pagefleet_protocol.tenants import Tenant

from pagefleet_router.errors import ConfigError

__all__ = ["ApiKeys", "Tenant"]

logger = logging.getLogger(__name__)


class ApiKeys:
    """Says whose key a request carries.

    Raises:
        ConfigError: at the start the file cannot be used or has no key.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            self._file = KeyFile(file, logger, clock)
        except KeyFileError as error:
            raise ConfigError(f"api_key_file {file} {error}") from error

    def tenant(self, authorization: bytes) -> Tenant | None:
        """Return the tenant of an `Authorization` header's value; None when it holds no valid key."""
        key = read_bearer_key(authorization)
        return None if key is None else self._file.tenant_of(key)

    def named(self, name: str) -> Tenant | None:
        """Return a tenant with the attributes that it has now; None when it has left."""
        return self._file.tenant_named(name)
