"""An API server for tests of handlers, on loopback, within the test's own event loop: objects, watches, faults.

kmock answers discovery, and any further path that a test gives it an answer for. Its objects know no versions,
ownership or status, and it cannot read `/api/v1/namespaces`, so requests for objects are served from kube_store.
`/apis` paths of kinds that are not served answer 404, as from a cluster that lacks them.
No test in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import kmock
import yaml
from aiohttp import web
from pagefleet_protocol.kube_names import CATEGORY, KIND, SHORT_NAME

from tests.fakes.free_ports import free_ports
from tests.fakes.kube_faults import Faults
from tests.fakes.kube_kinds import BUILT_IN, PAGEFLEET, Kind, Target, find_target
from tests.fakes.kube_selectors import Matches, selector
from tests.fakes.kube_store import Change, Document, Refused, Store, Write

VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
VERSION = {"major": "1", "minor": "36", "gitVersion": "v1.36.0", "platform": "linux/amd64"}
WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    params: Mapping[str, str]
    headers: Mapping[str, str]
    text: str

    @property
    def body(self) -> Any:
        """The body of a write: JSON, or YAML for an apply; None when it is empty."""
        if not self.text:
            return None
        try:
            return json.loads(self.text)
        except ValueError:
            return yaml.safe_load(self.text)


class Watch:
    """One open watch of a client."""

    def __init__(self, request: web.BaseRequest, target: Target) -> None:
        self.path = request.path
        self.kind = target.kind
        self.changes: asyncio.Queue[Change | Document] = asyncio.Queue()
        self.silent = False
        self._request = request

    def cut(self) -> None:
        """Break the connection without a word."""
        if (transport := self._request.transport) is not None:
            transport.abort()

    def expire(self) -> None:
        """Tell the client that its version is gone, as after a compaction."""
        self.changes.put_nowait(gone())


class KubeApi(kmock.KubernetesScaffold):
    """The server. Use as an asynchronous context manager; `url` is where it listens, also after it was away."""

    def __init__(self, kinds: Iterable[Kind] = (*BUILT_IN, *PAGEFLEET)) -> None:
        super().__init__()
        self.store = Store()
        self.faults = Faults()
        self.asked: list[Asked] = []
        self.watches: list[Watch] = []
        self._kinds: list[Kind] = []
        self._runner: web.ServerRunner | None = None
        self._port = free_ports()
        self["get /version"] << VERSION
        for kind in kinds:
            self.serve(kind)
        self.add_namespace("default")

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def serve(self, kind: Kind) -> None:
        """Know one more kind of objects, as after its definition was installed."""
        self._kinds.append(kind)
        ours = kind.name == KIND
        self.resources[kmock.resource(kind.group, kind.version, kind.plural)] = kmock.ResourceInfo(
            kind=kind.name,
            singular=kind.name.lower(),
            namespaced=kind.namespaced,
            verbs=set(VERBS),
            shortnames={SHORT_NAME} if ours else set(),
            categories={CATEGORY} if ours else set(),
            subresources={"status"} if kind.has_status else set(),
        )

    def kind(self, name: str, group: str | None = None) -> Kind:
        """Return a kind by its name, as `Deployment`; with the group where two have one name."""
        return next(kind for kind in self._kinds if kind.name == name and group in (None, kind.group))

    def add_namespace(self, name: str) -> None:
        self.add("Namespace", {"metadata": {"name": name}})

    def add(self, kind_name: str, document: Document, namespace: str | None = "default") -> Document:
        """Create an object with its status, as it would be after its controller saw it."""
        kind = self.kind(kind_name)
        made = self.store.create(kind, namespace if kind.namespaced else None, document)
        if "status" not in document:
            return made
        metadata = made["metadata"]
        return self.set_status(kind_name, metadata.get("namespace"), metadata["name"], document["status"])

    def set_status(self, kind_name: str, namespace: str | None, name: str, status: Document) -> Document:
        """Write an object's whole status, as the controller of its kind would."""
        kind = self.kind(kind_name)
        document = self.store.get(kind, namespace, name)
        document["status"] = status
        return self.store.replace(kind, namespace, name, document, Write("cluster", "status"))

    def writes(self) -> list[str]:
        """Return the requests so far that were to change something, as `PATCH /api/v1/...`, the oldest first."""
        return [f"{one.method} {one.path}" for one in self.asked if one.method in WRITES]

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self.come_back()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.go_down()
        await super().__aexit__(kind, error, trace)

    async def go_down(self) -> None:
        """Close every connection and refuse new ones. What is stored stays."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for watch in list(self.watches):
                watch.cut()
            await runner.cleanup()

    async def come_back(self) -> None:
        """Listen again, on the same port."""
        # Without cancellation, a watch whose client left would stay until the next event.
        self._runner = web.ServerRunner(web.Server(self, handler_cancellation=True), shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    def cut_watches(self, path: str = "") -> int:
        """Break the open watches whose path holds the regular expression; returns how many."""
        found = self._open(path)
        for watch in found:
            watch.cut()
        return len(found)

    def silence_watches(self, path: str = "") -> int:
        """Let open watches stay open and never say anything again; new ones do."""
        found = self._open(path)
        for watch in found:
            watch.silent = True
        return len(found)

    def expire_watches(self, path: str = "") -> int:
        """Compact the store and tell open watches that their version is gone."""
        self.store.compact()
        found = self._open(path)
        for watch in found:
            watch.expire()
        return len(found)

    def _open(self, path: str) -> list[Watch]:
        return [watch for watch in self.watches if re.search(path, watch.path)]

    async def __call__(self, raw_request: web.BaseRequest) -> web.StreamResponse:
        text = await raw_request.text()
        asked = Asked(raw_request.method, raw_request.path, dict(raw_request.query), raw_request.headers, text)
        self.asked.append(asked)
        if fault := self.faults.take(asked.method, asked.path):
            if fault.status is not None:
                return failure(fault.status, fault.reason, fault.message, fault.headers)
            await fault.released.wait()
        target = find_target(asked.path, self._kinds)
        if target is None:
            return await super().__call__(raw_request)
        if asked.method == "GET" and asked.params.get("watch", "").lower() in ("true", "1"):
            return await self._watch(raw_request, asked, target)
        try:
            status, document = self._serve(asked, target)
        except Refused as refusal:
            return failure(refusal.status, refusal.reason, str(refusal))
        return web.json_response(document, status=status)

    def _serve(self, asked: Asked, target: Target) -> tuple[int, Document]:
        kind, namespace, name = target.kind, target.namespace, target.name
        match asked.method:
            case "GET":
                return 200, self._list(asked, target) if name is None else self.store.get(kind, namespace, name)
            case "POST" if name is None:
                return 201, self.store.create(kind, namespace, asked.body, written_by(asked, target))
            case "PUT" if name is not None:
                write = written_by(asked, target)
                return 200, self.store.replace(kind, namespace, name, asked.body, write)
            case "PATCH" if name is not None:
                return self._patch(asked, target, name)
            case "DELETE":
                return 200, self._delete(asked, target)
        raise Refused(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _patch(self, asked: Asked, target: Target, name: str) -> tuple[int, Document]:
        write, body = written_by(asked, target), asked.body
        if write.content_type.startswith("application/apply-patch"):
            exists = self.store.find(target.kind, target.namespace, name) is not None
            return 200 if exists else 201, self.store.apply(target.kind, target.namespace, name, body, write)
        if write.content_type.startswith("application/json-patch"):
            return 200, self.store.json_patch(target.kind, target.namespace, name, body, write)
        return 200, self.store.merge_patch(target.kind, target.namespace, name, body, write)

    def _delete(self, asked: Asked, target: Target) -> Document:
        if target.name is not None:
            return self.store.delete(target.kind, target.namespace, target.name, asked.body)
        for document in self._matching(asked, target):
            metadata = document["metadata"]
            self.store.delete(target.kind, metadata.get("namespace"), metadata["name"])
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _matching(self, asked: Asked, target: Target) -> list[Document]:
        wanted = selector_of(asked)
        return [document for document in self.store.all_of(target.kind, target.namespace) if wanted(document)]

    def _list(self, asked: Asked, target: Target) -> Document:
        found = self._matching(asked, target)
        first = int(asked.params.get("continue") or 0)
        last = first + int(asked.params.get("limit") or 0) or len(found)
        metadata = {"resourceVersion": str(self.store.version), "continue": str(last) if last < len(found) else ""}
        items = [listed(target.kind, document) for document in found[first:last]]
        api_version, kind = target.kind.api_version, f"{target.kind.name}List"
        return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "items": items}

    async def _watch(self, raw_request: web.BaseRequest, asked: Asked, target: Target) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        watch = Watch(raw_request, target)
        wanted = selector_of(asked)
        for event in self._backlog(asked, target, wanted):
            watch.changes.put_nowait(event)
        self.store.listeners.append(watch.changes.put_nowait)
        self.watches.append(watch)
        timeout_s = asked.params.get("timeoutSeconds")
        try:
            await response.prepare(raw_request)
            async with contextlib.AsyncExitStack() as stack:
                with contextlib.suppress(TimeoutError, ConnectionError):
                    await stack.enter_async_context(asyncio.timeout(float(timeout_s) if timeout_s else None))
                    async for event in events_of(watch, target.namespace, wanted):
                        await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self.watches.remove(watch)
            self.store.listeners.remove(watch.changes.put_nowait)
        return response

    def _backlog(self, asked: Asked, target: Target, wanted: Matches) -> list[Change | Document]:
        """Return what happened before the watch and is to be told by it."""
        since = asked.params.get("resourceVersion", "")
        if since in ("", "0"):
            found = self._matching(asked, target)
            added: list[Change | Document] = [{"type": "ADDED", "object": document} for document in found]
            return added + ([self._end_of_initial(target.kind)] if "sendInitialEvents" in asked.params else [])
        if int(since) < self.store.compacted:
            return [gone()]
        return [change for change in self.store.changes if change.version > int(since)]

    def _end_of_initial(self, kind: Kind) -> Document:
        metadata = {"resourceVersion": str(self.store.version), "annotations": {"k8s.io/initial-events-end": "true"}}
        return {
            "type": "BOOKMARK",
            "object": {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata},
        }


async def events_of(watch: Watch, namespace: str | None, wanted: Matches) -> AsyncIterator[Document]:
    """Yield what a watch tells its client; ends after an error."""
    while True:
        change = await watch.changes.get()
        if watch.silent:
            continue
        if isinstance(change, dict):
            yield change
            if change["type"] == "ERROR":
                return
        elif change.kind == watch.kind and namespace in (None, change.document["metadata"].get("namespace")):
            was = change.before is not None and wanted(change.before)
            if wanted(change.document):
                type_ = "ADDED" if change.type == "MODIFIED" and not was else change.type
                yield {"type": type_, "object": change.document}
            elif was:
                yield {"type": "DELETED", "object": change.document}


def gone() -> Document:
    """Return the event of a watch that starts from a version that is no longer known."""
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410}
    return {"type": "ERROR", "object": {**status, "metadata": {}, "message": "too old resource version"}}


def failure(status: int, reason: str, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return an error as the API server sends it."""
    document = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return web.json_response(
        {**document, "message": message, "reason": reason, "code": status, "details": {}},
        status=status,
        headers=headers,
    )


def listed(kind: Kind, document: Document) -> Document:
    """Return an item of a list: those of built-in kinds do not say their kind."""
    if kind in PAGEFLEET:
        return document
    return {name: value for name, value in document.items() if name not in ("apiVersion", "kind")}


def selector_of(asked: Asked) -> Matches:
    return selector(asked.params.get("labelSelector", ""), asked.params.get("fieldSelector", ""))


def written_by(asked: Asked, target: Target) -> Write:
    agent = asked.headers.get("User-Agent", "").partition("/")[0] or "unknown"
    content_type = asked.headers.get("Content-Type", "")
    is_apply = content_type.startswith("application/apply-patch")
    return Write(
        manager=asked.params.get("fieldManager", "" if is_apply else agent),
        subresource=target.subresource,
        force=asked.params.get("force", "false").lower() == "true",
        content_type=content_type,
    )
