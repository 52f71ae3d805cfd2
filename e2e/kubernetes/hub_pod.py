"""Runs in a pod: a Hugging Face hub with one repository, the embedded model, on port 8000. Prints the commit."""

import asyncio
import importlib.util
import sys
from pathlib import Path
from urllib.parse import urlsplit

from e2e.kubernetes.relay import serve
from tests.fakes.hub_server import HubServer, Repository


def main(name: str) -> None:
    spec = importlib.util.find_spec("pagefleet_engine")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "builtin" / "tiny"
    with HubServer() as hub:
        repository = hub.repositories[name] = Repository()
        print(
            repository.commit({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}), flush=True
        )
        there = urlsplit(hub.url)
        asyncio.run(serve(str(there.hostname), int(there.port or 0)))


if __name__ == "__main__":
    main(sys.argv[1])
