"""`hf://` against a hub on the loopback: everything that goes well, and everything that does not."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pagefleet_download.progress import ProgressMeter
from pagefleet_download.settings import Patience
from pagefleet_download.transfer import PartFile

from tests.fakes.downloads import Pauses, fast, run, visible
from tests.fakes.http_faults import Fault
from tests.fakes.hub_server import ContentServer, HubServer, Repository
from tests.fakes.model_files import QWEN3, WANTED, safetensors, sharded

URI = "hf://org/model"
SHARD = "model-00001-of-00002.safetensors"


def test_all_that_an_engine_needs_and_nothing_else_arrives(hub: HubServer, tmp_path: Path) -> None:
    files = sharded()
    sha = hub.repositories["org/model"].commit(files)
    meter = ProgressMeter()
    result = run(URI, tmp_path / "m", fast(endpoint=hub.url), meter)
    assert (result.reason, result.message) == ("", "")
    assert visible(tmp_path / "m") == WANTED
    assert all((tmp_path / "m" / name).read_bytes() == files[name] for name in WANTED)
    assert result.facts is not None
    assert (result.facts.revision, result.facts.weights_bytes) == (sha, 5000 + 5001)
    assert (result.facts.num_files, result.facts.architecture) == (len(WANTED), "qwen3")
    total = sum(len(files[name]) for name in WANTED)
    now = meter.snapshot()
    assert (now.phase, now.bytes_done, now.bytes_total) == ("done", total, total)
    assert (now.files_done, now.files_total) == (len(WANTED), len(WANTED))
    assert not (tmp_path / "m" / ".incoming").exists()


def test_the_manifest_names_every_file_with_its_sha256(hub: HubServer, tmp_path: Path) -> None:
    files = sharded()
    sha = hub.repositories["org/model"].commit(files)
    run(URI, tmp_path, fast(endpoint=hub.url))
    manifest = json.loads((tmp_path / ".pagefleet.json").read_bytes())
    assert (manifest["source"], manifest["facts"]["revision"]) == (URI, sha)
    sums = {file["name"]: (file["size"], file["sha256"]) for file in manifest["files"]}
    assert sums == {name: (len(files[name]), hashlib.sha256(files[name]).hexdigest()) for name in WANTED}


def test_files_are_asked_for_by_commit_so_a_moving_branch_cannot_mix_revisions(hub: HubServer, tmp_path: Path) -> None:
    sha = hub.repositories["org/model"].commit(sharded())
    run(URI, tmp_path, fast(endpoint=hub.url, revision="main"))
    assert len(hub.requests_for("/resolve/")) >= len(WANTED)
    assert all(f"/resolve/{sha}/" in request.path for request in hub.requests_for("/resolve/"))


def test_a_second_run_asks_nobody(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    first = run(URI, tmp_path, fast(endpoint=hub.url))
    hub.seen.clear()
    meter = ProgressMeter()
    assert run(URI, tmp_path, fast(endpoint=hub.url), meter) == first
    assert hub.seen == []
    assert meter.snapshot().files_done == len(WANTED)


@pytest.mark.parametrize("damage", ["truncated", "removed", "link"])
def test_a_second_run_mends_what_was_damaged_and_fetches_only_that(hub: HubServer, tmp_path: Path, damage: str) -> None:
    files = sharded()
    hub.repositories["org/model"].commit(files)
    run(URI, tmp_path, fast(endpoint=hub.url))
    shard = tmp_path / SHARD
    content = shard.read_bytes()
    shard.unlink()
    if damage == "truncated":
        shard.write_bytes(content[:-1])
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        shard.symlink_to("elsewhere")
    hub.seen.clear()
    assert run(URI, tmp_path, fast(endpoint=hub.url)).reason == ""
    assert shard.read_bytes() == content
    assert not shard.is_symlink()
    fetched = {request.path.rpartition("/")[2] for request in hub.requests_for("/resolve/")}
    whole = {
        request.path.rpartition("/")[2] for request in hub.requests_for("/resolve/") if "range" not in request.headers
    }
    assert SHARD in whole
    assert whole <= {SHARD, "config.json", "model.safetensors.index.json"}  # the two are read for the facts
    assert fetched <= WANTED


def test_a_cut_transfer_goes_on_where_it_stopped(hub: HubServer, tmp_path: Path) -> None:
    files = sharded(50_000)
    hub.repositories["org/model"].commit(files)
    # The first request for a shard reads the length of its header.
    hub.faults[SHARD] = [Fault("cut", after=8), Fault("cut", after=20_000), Fault("cut", after=10_000)]
    pauses = Pauses()
    assert run(URI, tmp_path, fast(pauses, endpoint=hub.url)).reason == ""
    assert (tmp_path / SHARD).read_bytes() == files[SHARD]
    ranges = [request.headers.get("range") for request in hub.requests_for(SHARD)]
    last = len(files[SHARD]) - 1
    assert ranges == ["bytes=0-7", None, f"bytes=20000-{last}", f"bytes=30000-{last}"]
    assert len(pauses.taken) == 2


def test_the_next_run_goes_on_where_a_failed_one_stopped(hub: HubServer, tmp_path: Path) -> None:
    files = sharded(50_000)
    hub.repositories["org/model"].commit(files)
    hub.faults[SHARD] = [Fault("cut", after=8), Fault("cut", after=20_000), *[Fault("status")] * 5]
    failed = run(URI, tmp_path, fast(endpoint=hub.url))
    assert failed.reason == "StoreUnreachable"
    assert "500" in failed.message
    assert visible(tmp_path) == set()
    hub.seen.clear()
    assert run(URI, tmp_path, fast(endpoint=hub.url)).reason == ""
    assert (tmp_path / SHARD).read_bytes() == files[SHARD]
    assert f"bytes=20000-{len(files[SHARD]) - 1}" in [seen.headers.get("range") for seen in hub.requests_for(SHARD)]


@pytest.mark.parametrize("kind", ["ignore-range", "wrong-range"])
def test_a_server_that_gets_ranges_wrong_harms_nothing(hub: HubServer, tmp_path: Path, kind: str) -> None:
    files = sharded(50_000)
    hub.repositories["org/model"].commit(files)
    wrong = Fault("ignore-range") if kind == "ignore-range" else Fault("wrong-range")
    hub.faults[SHARD] = [
        wrong,
        *([] if kind == "ignore-range" else [Fault("status")]),
        Fault("cut", after=20_000),
        wrong,
    ]
    assert run(URI, tmp_path, fast(endpoint=hub.url)).reason == ""
    assert (tmp_path / SHARD).read_bytes() == files[SHARD]


def test_wrong_bytes_are_fetched_again_and_then_refused(hub: HubServer, tmp_path: Path) -> None:
    files = sharded()
    hub.repositories["org/model"].commit(files)
    length, wrong = Fault("cut", after=8), Fault("corrupt", after=1000)
    hub.faults[SHARD] = [length, wrong]
    assert run(URI, tmp_path / "once", fast(endpoint=hub.url)).reason == ""
    assert (tmp_path / "once" / SHARD).read_bytes() == files[SHARD]
    hub.faults[SHARD] = [length, wrong, wrong]
    result = run(URI, tmp_path / "twice", fast(endpoint=hub.url))
    assert (result.reason, result.exit_code) == ("ChecksumMismatch", 1)
    assert SHARD in result.message
    assert "sha256" in result.message
    assert visible(tmp_path / "twice") == set()


def test_small_files_are_verified_by_their_git_name(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    hub.faults["merges.txt"] = [Fault("corrupt", after=1)] * 2
    result = run(URI, tmp_path, fast(endpoint=hub.url))
    assert result.reason == "ChecksumMismatch"
    assert "merges.txt" in result.message
    assert "git-sha1" in result.message


def test_a_stalled_transfer_is_tried_again_and_then_given_up(hub: HubServer, tmp_path: Path) -> None:
    files = sharded()
    hub.repositories["org/model"].commit(files)
    hub.faults[SHARD] = [Fault("cut", after=8), Fault("stall", after=100)]
    settings = fast(endpoint=hub.url, patience=Patience(stall=0.4))
    assert run(URI, tmp_path / "once", settings).reason == ""
    hub.faults[SHARD] = [Fault("cut", after=8), *[Fault("stall")] * 3]
    settings = fast(endpoint=hub.url, patience=Patience(stall=0.5, attempts=3))
    result = run(URI, tmp_path / "always", settings)
    assert (result.reason, result.exit_code) == ("StoreUnreachable", 1)
    assert "no byte came for 0.5 s" in result.message


@pytest.mark.parametrize(
    "token", ["hf_secret\nhf_other", "hf_secret other", "hf_secret\t", "hf_secret\x01", "hf_secreté"]
)
def test_a_token_that_is_none_is_refused_and_not_repeated(hub: HubServer, tmp_path: Path, token: str) -> None:
    hub.repositories["org/model"].commit(sharded())
    result = run(URI, tmp_path, fast(endpoint=hub.url, token=token))
    assert (result.reason, "put the token alone" in result.message) == ("BadSettings", True)
    assert "secret" not in result.message
    assert hub.requests_for("") == []


def test_a_server_that_asks_for_a_pause_gets_it_within_bounds(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    hub.faults["list"] = [
        Fault("status", status=429, headers={"Retry-After": "77"}),
        Fault("status", status=503, headers={"Retry-After": "9999"}),
        Fault("status", status=429, headers={"Retry-After": "soon"}),
    ]
    pauses = Pauses()
    assert run(URI, tmp_path, fast(pauses, endpoint=hub.url)).reason == ""
    assert pauses.taken[:2] == [77, 120]
    assert 2 <= pauses.taken[2] <= 4


def test_nobody_there(tmp_path: Path) -> None:
    with HubServer() as gone:
        url = gone.url
    pauses = Pauses()
    result = run(URI, tmp_path, fast(pauses, endpoint=url))
    assert (result.reason, result.exit_code) == ("StoreUnreachable", 1)
    assert url in result.message
    assert "6 attempts" in result.message
    assert len(pauses.taken) == 5
    assert all(0.5 * 2**at <= pause <= 2**at for at, pause in enumerate(pauses.taken))


@pytest.mark.parametrize(
    ("repository", "revision", "token", "reason", "words"),
    [
        ("org/absent", None, None, "ModelNotFound", ["org/absent", "does not exist", "HF_TOKEN"]),
        ("org/model", "v9", None, "ModelNotFound", ["org/model", "no revision v9"]),
        ("org/private", None, None, "ModelNotFound", ["private", "HF_TOKEN"]),
        ("org/gated", None, None, "AccessDenied", ["org/gated is gated", "accept the licence", "HF_TOKEN"]),
        ("org/model", None, "hf_wrong", "AccessDenied", ["token is wrong", "HF_TOKEN"]),
    ],
)
def test_what_cannot_be_had(
    hub: HubServer,
    tmp_path: Path,
    repository: str,
    revision: str | None,
    token: str | None,
    reason: str,
    words: list[str],
) -> None:
    hub.repositories["org/model"].commit(sharded())
    for name in ("gated", "private"):
        hub.repositories[f"org/{name}"] = Repository(gated=name == "gated", private=name == "private")
        hub.repositories[f"org/{name}"].commit(sharded())
    result = run(f"hf://{repository}", tmp_path, fast(endpoint=hub.url, revision=revision, token=token))
    assert (result.reason, result.exit_code) == (reason, 2)
    assert [word for word in words if word not in result.message] == []
    assert "hf_wrong" not in result.message


def test_a_token_opens_gated_and_private_repositories(hub: HubServer, tmp_path: Path) -> None:
    for name in ("gated", "private"):
        hub.repositories[f"org/{name}"] = Repository(gated=name == "gated", private=name == "private")
        hub.repositories[f"org/{name}"].commit(sharded())
        result = run(f"hf://org/{name}", tmp_path / name, fast(endpoint=hub.url, token="hf_right"))
        assert result.reason == ""
        assert visible(tmp_path / name) == WANTED


def test_a_token_of_an_account_without_access_is_told_apart(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    hub.faults["config.json"] = [Fault("status", status=403, headers={"X-Error-Code": "GatedRepo"})]
    result = run(URI, tmp_path, fast(endpoint=hub.url, token="hf_right"))
    assert result.reason == "AccessDenied"
    assert "the account of the given token has no access" in result.message


def test_the_token_does_not_follow_a_redirect_to_another_host(tmp_path: Path) -> None:
    with ContentServer() as contents, HubServer(content_host=contents) as hub:
        hub.repositories["org/model"] = Repository(gated=True)
        hub.repositories["org/model"].commit(sharded())
        assert run(URI, tmp_path, fast(endpoint=hub.url, token="hf_right")).reason == ""
        assert len(contents.seen) == 4
        assert not [seen for seen in contents.seen if "authorization" in seen.headers]
        assert all("authorization" in seen.headers for seen in hub.seen)


def test_requests_tell_what_we_are_and_nothing_of_this_machine(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    # A process of its own: the library decides what it tells when it is imported, and here somebody may have done so.
    command = [sys.executable, "-m", "pagefleet_download.cli", URI, str(tmp_path), "--endpoint", hub.url]
    subprocess.run(command, check=True, capture_output=True)
    agents = {seen.headers["user-agent"] for seen in hub.seen}
    assert all(agent.startswith("pagefleet/") for agent in agents)
    assert not [agent for agent in agents if "torch" in agent or "agent/" in agent]
    assert {seen.path.split("?")[0].split("/")[1] for seen in hub.seen} == {"api", "org"}
    assert len(hub.requests_for("/api/")) == 1


def test_another_revision_replaces_the_first_only_when_it_is_complete(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repositories["org/model"]
    old = sharded(seed=1)
    repository.commit(old)
    run(URI, tmp_path, fast(endpoint=hub.url))
    config = json.dumps({**QWEN3, "num_hidden_layers": 8}).encode()
    new = {"config.json": config, "model.safetensors": safetensors(9000), "merges.txt": old["merges.txt"]}
    sha = repository.commit(new, branch="next")
    hub.faults["model.safetensors"] = [Fault("cut", after=8), Fault("cut", after=4000), *[Fault("status")] * 5]
    failed = run(URI, tmp_path, fast(endpoint=hub.url, revision="next"))
    assert failed.reason == "StoreUnreachable"
    assert visible(tmp_path) == WANTED
    assert all((tmp_path / name).read_bytes() == old[name] for name in WANTED)
    assert run(URI, tmp_path, fast(endpoint=hub.url)).reason == ""  # the first is still finished

    hub.seen.clear()
    result = run(URI, tmp_path, fast(endpoint=hub.url, revision="next"))
    assert result.facts is not None
    assert (result.facts.revision, result.facts.num_layers) == (sha, 8)
    assert visible(tmp_path) == set(new)
    assert all((tmp_path / name).read_bytes() == data for name, data in new.items())
    assert hub.requests_for("merges.txt") == []  # the same content is not fetched again


def test_a_folder_that_was_filled_by_hand_is_verified_instead_of_fetched(hub: HubServer, tmp_path: Path) -> None:
    files = sharded()
    hub.repositories["org/model"].commit(files)
    for name in WANTED:
        (tmp_path / name).write_bytes(files[name])
    (tmp_path / SHARD).write_bytes(files[SHARD][:-1] + b"?")  # not as it should be
    assert run(URI, tmp_path, fast(endpoint=hub.url)).reason == ""
    assert (tmp_path / SHARD).read_bytes() == files[SHARD]
    other = SHARD.replace("00001", "00002", 1)
    assert [seen.headers.get("range") for seen in hub.requests_for(other)] == ["bytes=0-7"]


def test_weights_of_a_stranger_are_neither_removed_nor_mixed_in(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    result = run(URI, tmp_path, fast(endpoint=hub.url))
    assert (result.reason, result.exit_code) == ("BadSettings", 2)
    assert "model.safetensors" in result.message
    assert (tmp_path / "model.safetensors").read_bytes() == b"mine"


def test_what_does_not_fit_is_refused_before_the_first_byte(hub: HubServer, tmp_path: Path) -> None:
    files = sharded(50_000)
    hub.repositories["org/model"].commit(files)
    total = sum(len(files[name]) for name in WANTED)
    result = run(URI, tmp_path, fast(endpoint=hub.url, free_bytes=total - 2048))
    assert (result.reason, result.exit_code) == ("DiskFull", 1)
    assert "give the volume 2.0 KiB more" in result.message
    assert hub.num_body_bytes < 5000
    assert run(URI, tmp_path, fast(endpoint=hub.url, free_bytes=total)).reason == ""


def test_a_disk_that_fills_on_the_way_is_told_and_what_fits_is_kept(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sharded(50_000)
    hub.repositories["org/model"].commit(files)
    real = PartFile.write

    def full(part: PartFile, data: bytes | bytearray) -> None:
        if part.size + len(data) > 40_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(part, data)

    with monkeypatch.context() as patch:
        patch.setattr(PartFile, "write", full)
        result = run(URI, tmp_path, fast(endpoint=hub.url))
    assert (result.reason, result.exit_code) == ("DiskFull", 1)
    assert "No space left on device: give the volume more space" in result.message
    assert visible(tmp_path) == set()
    assert run(URI, tmp_path, fast(endpoint=hub.url)).reason == ""
    assert (tmp_path / SHARD).read_bytes() == files[SHARD]


def test_a_part_that_is_here_already_needs_no_space(hub: HubServer, tmp_path: Path) -> None:
    files = sharded(50_000)
    hub.repositories["org/model"].commit(files)
    hub.faults[SHARD] = [Fault("cut", after=8), Fault("cut", after=20_000), *[Fault("status")] * 5]
    settings = fast(endpoint=hub.url, parallel_files=1)
    assert run(URI, tmp_path, settings).reason == "StoreUnreachable"
    total = sum(len(files[name]) for name in WANTED)
    arrived = sum(path.stat().st_size for path in (tmp_path / ".incoming").iterdir())
    assert arrived >= 20_000
    assert run(URI, tmp_path, fast(endpoint=hub.url, free_bytes=total - arrived - 1)).reason == "DiskFull"
    assert run(URI, tmp_path, fast(endpoint=hub.url, free_bytes=total - arrived)).reason == ""


def test_parts_that_a_killed_download_left_go_once_the_folder_needs_none(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    assert run(URI, tmp_path, fast(endpoint=hub.url)).reason == ""
    left = tmp_path / ".incoming" / "of-another-revision.part"
    left.parent.mkdir()
    left.write_bytes(b"half")
    with (tmp_path / ".pagefleet.lock").open("r+") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        assert run(URI, tmp_path, fast(endpoint=hub.url)).reason == ""
        assert left.exists(), "somebody works here"
    assert run(URI, tmp_path, fast(endpoint=hub.url)).reason == ""
    assert not left.parent.exists()
    assert visible(tmp_path) == WANTED
