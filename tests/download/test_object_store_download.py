"""`s3://` and `gs://` against an object store on the loopback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pagefleet_download.settings import Patience, settings_for

from tests.fakes.downloads import Pauses, fast, run, visible
from tests.fakes.http_faults import Fault
from tests.fakes.model_files import WANTED, sharded
from tests.fakes.object_store import ObjectStoreServer

URI = {"s3": "s3://models/team/qwen", "gs": "gs://models/team/qwen"}
SHARD = "model-00001-of-00002.safetensors"
BOTH = pytest.mark.parametrize("scheme", ["s3", "gs"])


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "right")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")


@BOTH
def test_the_objects_below_the_path_arrive(store: ObjectStoreServer, tmp_path: Path, scheme: str) -> None:
    files = sharded()
    result = run(URI[scheme], tmp_path, fast(endpoint=store.url))
    assert (result.reason, result.message) == ("", "")
    assert visible(tmp_path) == WANTED
    assert all((tmp_path / name).read_bytes() == files[name] for name in WANTED)
    assert result.facts is not None
    assert result.facts.weights_bytes == 10001
    assert len(result.facts.revision) == 40


SESSION = "AWS_SESSION_TOKEN"


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", SESSION, "AWS_REGION"])
def test_a_line_end_in_a_secret_does_no_harm(
    store: ObjectStoreServer, tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SESSION, "session")
    monkeypatch.setenv(variable, os.environ[variable] + "\r\n")
    assert run(URI["s3"], tmp_path, fast(endpoint=store.url)).message == ""


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", SESSION, "AWS_REGION"])
@pytest.mark.parametrize("value", ["private\nprivate", "private private", "private\x01", "privaté"])
def test_a_variable_that_is_none_is_named_and_not_repeated(
    store: ObjectStoreServer, tmp_path: Path, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    result = run(URI["s3"], tmp_path, fast(endpoint=store.url))
    assert (result.reason, result.message.split()[0]) == ("BadSettings", variable)
    assert "priva" not in result.message.replace(str(tmp_path), "")
    assert store.requests_for("") == []


@BOTH
def test_the_revision_is_of_the_content(store: ObjectStoreServer, tmp_path: Path, scheme: str) -> None:
    revisions = []
    for run_number, content in enumerate([b"a b", b"a b", b"a c"]):
        store.buckets["models"]["team/qwen/merges.txt"] = content
        result = run(URI[scheme], tmp_path / str(run_number), fast(endpoint=store.url))
        assert result.facts is not None
        revisions.append(result.facts.revision)
    assert revisions[0] == revisions[1] != revisions[2]


@BOTH
def test_a_cut_transfer_goes_on_with_the_same_object(store: ObjectStoreServer, tmp_path: Path, scheme: str) -> None:
    files = sharded(1_000_000)
    store.buckets["models"] = {f"team/qwen/{name}": data for name, data in files.items()}
    store.faults[SHARD] = [Fault("cut", after=8), Fault("cut", after=600_000)]
    assert run(URI[scheme], tmp_path, fast(endpoint=store.url)).reason == ""
    assert (tmp_path / SHARD).read_bytes() == files[SHARD]
    gets = store.requests_for("00001")
    assert all("if-match" in request.headers for request in gets)
    starts = [int(request.headers["range"].removeprefix("bytes=").split("-")[0]) for request in gets]
    assert starts[0] == 0
    assert starts[-1] > 0


def test_an_object_that_is_replaced_meanwhile_is_no_mixture(store: ObjectStoreServer, tmp_path: Path) -> None:
    class Replacing(list[Fault]):
        def pop(self, _: object = None) -> Fault:
            store.buckets["models"][f"team/qwen/{SHARD}"] = b"another"
            return super().pop(0)

    store.faults[SHARD] = Replacing([Fault("cut", after=8), Fault("cut", after=1000)])
    result = run(URI["s3"], tmp_path, fast(endpoint=store.url))
    assert (result.reason, result.exit_code) == ("ChecksumMismatch", 1)
    assert "was replaced while it was read" in result.message
    assert visible(tmp_path) == set()


@BOTH
def test_wrong_bytes_are_noticed_by_the_tag(store: ObjectStoreServer, tmp_path: Path, scheme: str) -> None:
    store.faults[SHARD] = [Fault("cut", after=8), *[Fault("corrupt", after=99)] * 2]
    result = run(URI[scheme], tmp_path, fast(endpoint=store.url))
    assert result.reason == "ChecksumMismatch"
    assert SHARD in result.message
    assert "md5" in result.message


def test_tags_of_encrypted_objects_are_no_md5(store: ObjectStoreServer, tmp_path: Path) -> None:
    store.tags = {key: f"{number:032x}" for number, key in enumerate(store.buckets["models"])}
    result = run(URI["s3"], tmp_path, fast(endpoint=store.url))
    assert (result.reason, result.message) == ("", "")
    assert visible(tmp_path) == WANTED


def test_a_damaged_sample_does_not_switch_the_comparison_off(store: ObjectStoreServer, tmp_path: Path) -> None:
    store.faults["config.json"] = [Fault("corrupt", after=3)]
    store.faults[SHARD] = [Fault("cut", after=8), *[Fault("corrupt", after=99)] * 2]
    pauses = Pauses()
    assert run(URI["s3"], tmp_path, fast(pauses, endpoint=store.url)).reason == "ChecksumMismatch"
    assert len(pauses.taken) >= 1


def test_objects_that_were_uploaded_in_parts_are_compared_by_size(store: ObjectStoreServer, tmp_path: Path) -> None:
    store.tags[f"team/qwen/{SHARD}"] = "0123456789abcdef0123456789abcdef-7"
    assert run(URI["s3"], tmp_path, fast(endpoint=store.url)).reason == ""
    manifest = json.loads((tmp_path / ".pagefleet.json").read_bytes())
    tags = {file["name"]: file["tag"] for file in manifest["files"]}
    assert tags[SHARD] == '"0123456789abcdef0123456789abcdef-7"'


@pytest.mark.parametrize(
    ("uri", "reason", "words"),
    [
        ("s3://absent/team/qwen", "ModelNotFound", "s3://absent/team/qwen"),
        ("s3://models/team/nothing", "ModelNotFound", "holds no object"),
        ("gs://absent/x", "ModelNotFound", "gs://absent/x"),
        ("s3://models/team", "ModelNotFound", "holds no object"),
    ],
)
def test_what_is_not_there(store: ObjectStoreServer, tmp_path: Path, uri: str, reason: str, words: str) -> None:
    result = run(uri, tmp_path, fast(endpoint=store.url))
    assert (result.reason, result.exit_code) == (reason, 2)
    assert words in result.message


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_credentials_that_may_not(tmp_path: Path, scheme: str) -> None:
    with ObjectStoreServer(account="somebody") as closed:
        closed.buckets["models"] = {}
        result = run(URI[scheme], tmp_path, fast(endpoint=closed.url))
    assert (result.reason, result.exit_code) == ("AccessDenied", 2)
    assert {"s3": "AWS_ACCESS_KEY_ID", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}[scheme] in result.message
    assert "secret" not in result.message.replace("secretRef", "").replace("Secret", "")


def test_credentials_that_may(tmp_path: Path) -> None:
    with ObjectStoreServer(account="right") as closed:
        closed.buckets["models"] = {f"team/qwen/{name}": data for name, data in sharded().items()}
        assert run(URI["s3"], tmp_path, fast(endpoint=closed.url)).reason == ""


@pytest.mark.parametrize(("web_identity", "reason"), [(True, ""), (False, "AccessDenied")])
def test_a_role_of_the_pods_account_signs_whatever_else_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, web_identity: bool, reason: str
) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    with ObjectStoreServer(account="right") as closed:
        closed.buckets["models"] = {f"team/qwen/{name}": data for name, data in sharded().items()}
        settings = fast(endpoint=closed.url, web_identity=web_identity)
        assert run(URI["s3"], tmp_path, settings).reason == reason


def test_a_role_is_known_by_the_variable_that_the_cloud_sets() -> None:
    roles = {"AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token"}
    assert settings_for(URI["s3"], None, None, roles).web_identity
    assert not settings_for(URI["s3"], None, None, {}).web_identity


@BOTH
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_store_that_fails_for_a_while(store: ObjectStoreServer, tmp_path: Path, scheme: str, status: int) -> None:
    store.faults["list"] = [Fault("status", status=status)] * 2
    assert run(URI[scheme], tmp_path / "while", fast(endpoint=store.url)).reason == ""
    store.faults["list"] = [Fault("status", status=status)] * 6
    result = run(URI[scheme], tmp_path / "always", fast(endpoint=store.url))
    assert (result.reason, result.exit_code) == ("StoreUnreachable", 1)
    assert str(status) in result.message


def test_a_stalled_store_is_tried_again(store: ObjectStoreServer, tmp_path: Path) -> None:
    store.faults[SHARD] = [Fault("cut", after=8), Fault("stall", after=10)]
    store.faults["list"] = [Fault("stall")]
    settings = fast(endpoint=store.url, patience=Patience(stall=0.4))
    assert run(URI["s3"], tmp_path, settings).reason == ""
    assert len(store.requests_for("list-type")) >= 2


def test_a_revision_is_refused(store: ObjectStoreServer, tmp_path: Path) -> None:
    result = run(URI["s3"], tmp_path, fast(endpoint=store.url, revision="main"))
    assert (result.reason, "leave it out" in result.message) == ("BadSettings", True)
