"""The cache that the hub's tools share: what others brought is used, what we bring others find, and none is trusted."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from pagefleet_download.bring import Caches, FleetDownload, bring, bring_and_wait, bring_from_hub, caches_of
from pagefleet_download.errors import (
    AccessDenied,
    BadModel,
    BadSettings,
    DiskFull,
    DownloadError,
    ModelNotFound,
    StoreUnreachable,
)
from pagefleet_download.hub_cache import HubCache
from pagefleet_download.manifest import TEXT_MANIFEST
from pagefleet_download.progress import ProgressMeter
from pagefleet_download.settings import DownloadSettings, Wish
from pagefleet_protocol.model_uri import ModelUri, model_named

from tests.fakes.downloads import fast, visible
from tests.fakes.hub_server import HubServer, Repository
from tests.fakes.model_files import WANTED, sharded

MODEL = ModelUri("hf", "org/model")
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "hf" / "hub"


def have(root: Path, settings: DownloadSettings, meter: ProgressMeter | None = None) -> Path:
    return asyncio.run(bring(MODEL, settings, Caches(root, root.parent / "models"), meter or ProgressMeter()))


def by_their_library(hub: HubServer, root: Path, name: str, revision: str | None = None) -> Path:
    return Path(hf_hub_download("org/model", name, revision=revision, endpoint=hub.url, cache_dir=root, token=False))


def test_a_model_lies_where_the_hubs_own_library_finds_it(hub: HubServer, root: Path) -> None:
    files = sharded()
    sha = hub.repositories["org/model"].commit(files)
    meter = ProgressMeter()
    folder = have(root, fast(endpoint=hub.url), meter)
    assert visible(folder) == WANTED
    assert all((folder / name).read_bytes() == files[name] for name in WANTED)
    assert folder == root / "models--org--model" / "snapshots" / sha
    hub.seen.clear()
    for name in WANTED:
        assert try_to_load_from_cache("org/model", name, cache_dir=root) == str(folder / name)
        assert by_their_library(hub, root, name, sha) == folder / name
    assert hub.seen == []
    total = sum(len(files[name]) for name in WANTED)
    assert (meter.snapshot().phase, meter.snapshot().bytes_done) == ("done", total)


def test_what_their_library_brought_is_not_downloaded_again(hub: HubServer, root: Path) -> None:
    files = sharded()
    hub.repositories["org/model"].commit(files)
    theirs = {by_their_library(hub, root, name).parent for name in WANTED - {"merges.txt"}}
    hub.seen.clear()
    folder = have(root, fast(endpoint=hub.url))
    assert {folder} == theirs
    assert visible(folder) == WANTED
    whole = [seen.path.rpartition("/")[2] for seen in hub.requests_for("/resolve/") if "range" not in seen.headers]
    # The two small ones are read to see what the model is.
    assert set(whole) == {"merges.txt", "config.json", "model.safetensors.index.json"}


def test_a_second_time_nobody_is_asked(hub: HubServer, root: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    first = have(root, fast(endpoint=hub.url))
    hub.seen.clear()
    hub.repositories["org/model"].commit(sharded(seed=1))
    assert have(root, fast(endpoint=hub.url)) == first
    assert have(root, fast(endpoint="http://127.0.0.1:9", offline=True)) == first
    assert hub.seen == []


def test_a_content_that_is_damaged_is_fetched_again(hub: HubServer, root: Path) -> None:
    files = sharded()
    hub.repositories["org/model"].commit(files)
    for name in WANTED:
        blob = by_their_library(hub, root, name).resolve()
        if name == SHARD:
            blob.write_bytes(bytes(len(files[name])))
    hub.seen.clear()
    folder = have(root, fast(endpoint=hub.url))
    assert (folder / SHARD).read_bytes() == files[SHARD]


def test_two_revisions_share_what_is_the_same(hub: HubServer, root: Path) -> None:
    files = sharded()
    first = hub.repositories["org/model"].commit(files)
    have(root, fast(endpoint=hub.url))
    hub.repositories["org/model"].commit({**files, "config.json": files["config.json"] + b" "}, "next")
    hub.seen.clear()
    folder = have(root, fast(endpoint=hub.url, revision="next"))
    assert folder.name != first
    assert (folder / SHARD).resolve() == (folder.parent / first / SHARD).resolve()
    assert not [seen for seen in hub.requests_for(SHARD) if "range" not in seen.headers]
    assert have(root, fast(endpoint=hub.url, revision=first)).name == first


def test_offline_what_others_left_will_do_when_it_is_whole(hub: HubServer, root: Path) -> None:
    files = sharded()
    hub.repositories["org/model"].commit(files)
    for name in WANTED:
        theirs = by_their_library(hub, root, name).parent
    hub.seen.clear()
    assert have(root, fast(endpoint=hub.url, offline=True)) == theirs
    assert hub.seen == []
    assert have(root, fast(endpoint="http://127.0.0.1:9")) == theirs  # nobody listens there
    (theirs / SHARD).resolve().write_bytes(b"x" + files[SHARD][1:])
    with pytest.raises(ModelNotFound, match=f"{SHARD} .* is damaged"):
        have(root, fast(offline=True))
    (theirs / SHARD).unlink()
    with pytest.raises(ModelNotFound, match=f"no whole model: the model lacks {SHARD}.*HF_HUB_OFFLINE is set"):
        have(root, fast(offline=True))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_where_nothing_may_be_written_what_others_left_is_verified(
    hub: HubServer, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    files = sharded()
    hub.repositories["org/model"].commit(files)
    for name in WANTED:
        theirs = by_their_library(hub, root, name).parent

    def refuse(cache: HubCache) -> None:
        raise OSError(number, os.strerror(number), str(cache.path))

    monkeypatch.setattr(HubCache, "create", refuse)
    assert have(root, fast(endpoint=hub.url)) == theirs
    with pytest.raises(BadSettings, match=rf"{os.strerror(number)}: the cache .*set HF_HOME to a folder of yours"):
        asyncio.run(bring_from_hub(MODEL, fast(endpoint=hub.url), root, ProgressMeter(), again=True))
    (theirs / SHARD).resolve().write_bytes(b"x" + files[SHARD][1:])
    for what_is_there in (rf", and {SHARD} in .* is damaged: .*; ", "; "):
        says = rf"{os.strerror(number)}: the cache .* does not let this user in{what_is_there}set HF_HOME to a folder"
        with pytest.raises(BadSettings, match=says):
            have(root, fast(endpoint=hub.url))
        monkeypatch.setattr(HubCache, "local_copy", refuse)


def test_offline_and_nothing_here(root: Path) -> None:
    with pytest.raises(ModelNotFound, match=rf"org/model is not in {root}; HF_HUB_OFFLINE is set.*unset it"):
        have(root, fast(offline=True))
    assert not root.exists()


def test_no_network(root: Path) -> None:
    with pytest.raises(StoreUnreachable, match=r"127\.0\.0\.1:9.*and org/model is not in .*HF_ENDPOINT, or give the f"):
        have(root, fast(endpoint="http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("state", "kind", "says"),
    [
        ({"gated": True}, AccessDenied, "is gated: accept the licence at .*/org/model"),
        ({"private": True}, ModelNotFound, "does not exist on .*, or is private"),
    ],
)
def test_no_right(hub: HubServer, root: Path, state: dict[str, Any], kind: type[DownloadError], says: str) -> None:
    hub.repositories["org/model"] = Repository(**state)
    hub.repositories["org/model"].commit(sharded())
    with pytest.raises(kind, match=says):
        have(root, fast(endpoint=hub.url))


def test_no_such_revision(hub: HubServer, root: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    with pytest.raises(ModelNotFound, match="has no revision v9: give one of its branches"):
        have(root, fast(endpoint=hub.url, revision="v9"))


@pytest.mark.parametrize("revision", ["../../../x", "/etc", "a//b", "-x", "x/", "a b", "a@{1}"])
def test_a_revision_that_is_a_path(hub: HubServer, root: Path, revision: str) -> None:
    hub.repositories["org/model"].commit(sharded())
    with pytest.raises(BadSettings, match="is no revision: give a branch, a tag or a commit"):
        have(root, fast(endpoint=hub.url, revision=revision))
    assert not root.exists()


def test_a_full_disk_is_told_before_anything_arrives(hub: HubServer, root: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    with pytest.raises(DiskFull, match=r"B free, and .* missing"):
        have(root, fast(endpoint=hub.url, free_bytes=100))


@pytest.mark.parametrize("where", ["sha", "lfs", "blobId"])
def test_names_from_a_hostile_hub_lead_nowhere(
    hub: HubServer, root: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.fakes import hub_server

    path = "../../../../outside"
    sibling = hub_server._sibling

    def hostile(name: str, data: bytes, with_sizes: bool) -> dict[str, object]:
        about = sibling(name, data, with_sizes)
        if where == "lfs" and "lfs" in about:
            about["lfs"] = {"sha256": path, "size": len(data), "pointerSize": 1}
        if where == "blobId":
            about |= {"blobId": path.ljust(40, "x")}
        return about

    monkeypatch.setattr(hub_server, "_sibling", hostile)
    repository = hub.repositories["org/model"]
    repository.commit(sharded())
    if where == "sha":
        repository.commits[path] = sharded()
        repository.branches["main"] = path
    with pytest.raises((BadSettings, BadModel), match=r"which is no commit|gives no digest"):
        have(root, fast(endpoint=hub.url))
    assert not list(root.parents[1].rglob("*outside*"))


@pytest.mark.parametrize("offline", [False, True])
def test_a_link_out_of_the_cache_is_refused(hub: HubServer, root: Path, tmp_path: Path, offline: bool) -> None:
    files = sharded()
    hub.repositories["org/model"].commit(files)
    folder = have(root, fast(endpoint=hub.url))
    (tmp_path / "secret").write_bytes(files[SHARD])
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(tmp_path / "secret")
    if offline:
        (folder / ".pagefleet.json").unlink()
    with pytest.raises(BadSettings, match="a link that leads out of the cache"):
        have(root, fast(endpoint=hub.url, offline=offline))


def test_two_that_start_at_once_download_once(hub: HubServer, root: Path) -> None:
    files = sharded()
    hub.repositories["org/model"].commit(files)
    settings = fast(endpoint=hub.url)

    async def both() -> list[Path]:
        caches = Caches(root, root.parent / "models")
        return await asyncio.gather(*(bring(MODEL, settings, caches, ProgressMeter()) for _ in range(2)))

    first, second = asyncio.run(both())
    assert first == second
    whole = [seen.path.rpartition("/")[2] for seen in hub.requests_for("/resolve/") if "range" not in seen.headers]
    read_first = {"config.json", "model.safetensors.index.json"}
    assert sorted(whole) == sorted([*WANTED, *read_first])


def test_a_tokenizer_alone_needs_no_weights(hub: HubServer, root: Path) -> None:
    files = {name: data for name, data in sharded().items() if not name.endswith(".safetensors")}
    hub.repositories["org/model"].commit(files)
    folder = have(root, fast(endpoint=hub.url, parts="text"))
    assert visible(folder) == {name for name in WANTED if name in files and "index" not in name}
    hub.seen.clear()
    assert have(root, fast(endpoint=hub.url, parts="text")) == folder
    assert hub.seen == []


def test_a_tokenizer_is_no_whole_model_and_a_model_has_its_tokenizer(hub: HubServer, root: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    folder = have(root, fast(endpoint=hub.url, parts="text"))
    assert visible(folder) < WANTED
    assert have(root, fast(endpoint=hub.url)) == folder
    assert visible(folder) == WANTED
    (folder / TEXT_MANIFEST).unlink()
    hub.seen.clear()
    have(root, fast(endpoint=hub.url, parts="text"))
    assert hub.seen == []


def test_a_repository_without_tokenizer_is_no_tokenizer(hub: HubServer, root: Path) -> None:
    hub.repositories["org/model"].commit({"config.json": b"{}"})
    with pytest.raises(BadModel, match=r"no tokenizer\.json and no tokenizer\.model: name a repository or folder"):
        have(root, fast(endpoint=hub.url, parts="text"))


@pytest.mark.fleet
def test_a_cache_of_another_user(hub: HubServer, root: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    whole = have(root, fast(endpoint=hub.url))
    hub.repositories["org/other"] = Repository()
    hub.repositories["org/other"].commit(sharded(seed=3))
    root.parents[1].chmod(0o755)
    for folder in [root, *(found for found in root.rglob("*") if found.is_dir() and not found.is_symlink())]:
        folder.chmod(0o555)
    script = (
        "import os, sys\n"
        "from pagefleet_download.bring import bring_and_wait\n"
        "from pagefleet_download.errors import DownloadError\n"
        "from pagefleet_download.progress import ProgressMeter\n"
        "from pagefleet_download.settings import Wish\n"
        "from pagefleet_protocol.model_uri import ModelUri\n"
        "if os.geteuid() == 0:\n"
        "    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for name in ('org/model', 'org/other'):\n"
        "    try: print(bring_and_wait(Wish(uri=ModelUri('hf', name)), os.environ, ProgressMeter()))\n"
        "    except DownloadError as error: print(type(error).__name__, error)\n"
    )
    environment = {**os.environ, "HF_HOME": str(root.parent), "HF_ENDPOINT": hub.url}
    open_up(root)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    found, told = done.stdout.splitlines()
    assert found == str(whole)
    assert told.startswith("BadSettings ")
    assert "Permission denied" in told
    assert f"does not let this user in, and org/other is not in {root}; " in told
    assert told.endswith("set HF_HOME to a folder of yours, or give the folder of a model")


def open_up(path: Path) -> None:
    """Let others pass on the way to a folder of this test."""
    for parent in path.parents:
        if parent.stat().st_uid == os.geteuid() and parent.name and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)


def test_the_fleets_folder_is_a_link_to_the_cache(hub: HubServer, root: Path, tmp_path: Path) -> None:
    sha = hub.repositories["org/model"].commit(sharded())
    folder, bring_it = tmp_path / "models" / "model-0123", FleetDownload(root)

    def run() -> Any:
        return asyncio.run(bring_it("hf://org/model", folder, fast(endpoint=hub.url), ProgressMeter()))

    assert run() == run()
    assert folder.resolve() == root / "models--org--model" / "snapshots" / sha
    assert visible(folder) == WANTED


def test_a_folder_of_an_earlier_release_stays(hub: HubServer, root: Path, tmp_path: Path) -> None:
    from tests.fakes.downloads import run

    hub.repositories["org/model"].commit(sharded())
    folder = tmp_path / "model-0123"
    settings = fast(endpoint=hub.url)
    before = run("hf://org/model", folder, settings)
    hub.seen.clear()
    assert asyncio.run(FleetDownload(root)("hf://org/model", folder, settings, ProgressMeter())) == before
    assert hub.seen == []
    assert not root.exists()


def test_within_an_event_loop_as_in_a_notebook(hub: HubServer, root: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    environment = {"HF_HUB_CACHE": str(root), "HF_ENDPOINT": hub.url}

    async def cell() -> Path:
        return bring_and_wait(Wish(uri=MODEL), environment, ProgressMeter())

    assert visible(asyncio.run(cell())) == WANTED


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"HF_HOME": "/data/hf"},
        {"XDG_CACHE_HOME": "/data/cache"},
        {"XDG_CACHE_HOME": "/data/cache", "HF_HOME": "/data/hf", "HF_HUB_CACHE": "/data/hub"},
        {"HF_HOME": "~/hf"},
    ],
)
def test_the_cache_is_where_the_hubs_own_library_has_it(environment: dict[str, str]) -> None:
    code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    plain = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "XDG_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain | environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert caches_of(environment).hub == Path(done.stdout.strip())


def test_models_of_buckets_and_folders_have_places_of_their_own(store: Any, tmp_path: Path) -> None:
    settings = fast(endpoint=store.url)
    caches = Caches(tmp_path / "hub", tmp_path / "models")
    here = model_named(str(tmp_path), os.path.exists)
    assert asyncio.run(bring(here, settings, caches, ProgressMeter())) == tmp_path
    environment = {"AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        folder = asyncio.run(bring(ModelUri("s3", "models/team/qwen"), settings, caches, ProgressMeter()))
    assert folder.parent == tmp_path / "models"
    assert visible(folder) == WANTED
    assert hashlib.sha256((folder / SHARD).read_bytes()).hexdigest() == hashlib.sha256(sharded()[SHARD]).hexdigest()


@pytest.mark.parametrize("uri", [ModelUri("modelscope", "org/model"), ModelUri("http", "127.0.0.1:9/folder")])
def test_no_network_to_other_stores(tmp_path: Path, uri: ModelUri) -> None:
    caches, settings = Caches(tmp_path / "hub", tmp_path / "models"), fast(endpoint="http://127.0.0.1:9")
    with pytest.raises(StoreUnreachable, match=r"127\.0\.0\.1:9.*: check the address, network and proxy") as error:
        asyncio.run(bring(uri, settings, caches, ProgressMeter()))
    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.safetensors"))
