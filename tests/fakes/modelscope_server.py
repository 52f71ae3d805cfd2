"""The few answers of ModelScope that a download needs: the list of a repository's files, and their bytes.

Source: ModelScope's own client, modelscope/hub.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from tests.fakes.http_faults import Answer, FaultyServer, Seen


class ModelScopeServer(FaultyServer):
    """One repository, org/model; for who has the session `token`, or for everybody where that is empty."""

    def __init__(self, token: str = "") -> None:
        super().__init__()
        self.branches: dict[str, dict[str, bytes]] = {}
        self._by_commit: dict[tuple[str, str], bytes] = {}
        """Contents by commit and name: each file has the commit that changed it last."""
        self._token = token

    def commit(self, files: Mapping[str, bytes], branch: str = "master") -> None:
        self.branches[branch] = dict(files)
        for name, data in files.items():
            self._by_commit[_commit(data), name] = data

    def answer(self, request: Seen) -> Answer:
        url = urlsplit(request.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if self._token and request.headers.get("cookie") != f"m_session_id={self._token}":
            return Answer(_said(10010205001, "no access"), 404)
        if url.path == "/api/v1/models/org/model/repo/files":
            return self.listing(query["Revision"])
        if url.path == "/api/v1/models/org/model/repo":
            data = self._by_commit.get((query["Revision"], query["FilePath"]))
            return Answer(_said(1, "no such file"), 404) if data is None else Answer(data, faults_as=query["FilePath"])
        return Answer(_said(10010205001, "no such model"), 404)

    def listing(self, revision: str) -> Answer:
        if revision not in self.branches:
            return Answer(_said(10010205002, "no such revision"), 404)
        files = [
            {"Name": name.rpartition("/")[2], "Path": name, "Type": "blob", "Size": len(data)}
            | {"Sha256": hashlib.sha256(data).hexdigest(), "Revision": _commit(data), "IsLFS": False}
            for name, data in self.branches[revision].items()
            if "/" not in name
        ]
        folder = {"Name": "original", "Path": "original", "Type": "tree", "Size": 0, "Sha256": "", "Revision": "x"}
        body = {"Code": 200, "Message": "success", "Success": True, "Data": {"Files": [folder, *files]}}
        return Answer(json.dumps(body).encode(), headers={"Content-Type": "application/json"}, faults_as="list")


def _commit(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _said(code: int, message: str) -> bytes:
    return json.dumps({"Code": code, "Message": message, "Success": False}).encode()
