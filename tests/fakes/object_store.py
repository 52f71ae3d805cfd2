"""An object store on the loopback that speaks as S3 and Google Cloud Storage (its XML API) do: list and get.

Source: the API references of both, for ListObjectsV2 and GetObject.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.fakes.http_faults import Answer, FaultyServer, Seen

_MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"


class ObjectStoreServer(FaultyServer):
    """Buckets of objects, for who signs with the key id `account`; for everybody where that is empty."""

    def __init__(self, account: str = "") -> None:
        super().__init__()
        self.buckets: dict[str, dict[str, bytes]] = {}
        self.tags: dict[str, str] = {}
        """ETags that are not the MD5 of the object, by key."""
        self._account = account

    def answer(self, request: Seen) -> Answer:
        url = urlsplit(request.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        if self._account and f"Credential={self._account}/" not in request.headers.get("authorization", ""):
            return Answer(_error("AccessDenied"), 403)
        if bucket not in self.buckets:
            return Answer(_error("NoSuchBucket"), 404)
        query = parse_qs(url.query)
        if "list-type" in query:
            listing = self._listing(bucket, query.get("prefix", [""])[0])
            return Answer(listing, headers={"Content-Type": "application/xml"}, faults_as="list")
        if key not in self.buckets[bucket]:
            return Answer(_error("NoSuchKey"), 404)
        tag = self._tag(bucket, key)
        if request.headers.get("if-match", tag) != tag:
            return Answer(_error("PreconditionFailed"), 412)
        headers = {"ETag": tag, "Last-Modified": _MODIFIED}
        return Answer(self.buckets[bucket][key], headers=headers, faults_as=key.rpartition("/")[2])

    def _tag(self, bucket: str, key: str) -> str:
        bare = self.tags.get(key) or _md5(self.buckets[bucket][key])
        return f'"{bare}"'

    def _listing(self, bucket: str, prefix: str) -> bytes:
        entries, folders = "", set()
        for key, data in self.buckets[bucket].items():
            if not key.startswith(prefix):
                continue
            rest = key.removeprefix(prefix)
            if "/" in rest:
                folders.add(prefix + rest.partition("/")[0] + "/")
                continue
            entries += (
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(self._tag(bucket, key))}</ETag><Size>{len(data)}</Size></Contents>"
            )
        entries += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
        head = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        return f'<?xml version="1.0"?><ListBucketResult>{head}{entries}</ListBucketResult>'.encode()


@lru_cache(maxsize=8)  # weights are asked for in hundreds of pieces
def _md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def _error(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code></Error>'.encode()
