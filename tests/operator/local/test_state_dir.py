"""The state folder: one owner, atomic files, and no process left from an earlier run."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagefleet_operator.errors import StateDirError
from pagefleet_operator.local.state_dir import StateDir, default_state_dir, start_time, sweep
from pagefleet_protocol.endpoints import Endpoint, decode_endpoints
from pagefleet_protocol.fleet_key import read_fleet_key


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_only_one_may_use_it(tmp_path: Path) -> None:
    with (
        StateDir(tmp_path / "state"),
        pytest.raises(
            StateDirError, match=rf"another pagefleet up \(process {os.getpid()}\) uses .*: stop it, or give"
        ),
    ):
        StateDir(tmp_path / "state")
    with StateDir(tmp_path / "state") as again:
        assert again.path.is_dir()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateDirError, match=r"cannot be written .* choose another with --state-dir"):
        StateDir(tmp_path / "file" / "state")


def test_a_fleet_key_is_random_for_its_owner_only_and_another_in_every_run(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state:
        one, other = state.fleet_key_path("one"), state.fleet_key_path("other")
        key = read_fleet_key(one)
        assert one.stat().st_mode & 0o777 == 0o600
        assert key != read_fleet_key(other)
        assert read_fleet_key(state.fleet_key_path("one")) == key, "what starts again finds the same"
        assert read_fleet_key(state.fleet_key_path("one", 2)) != key
    with StateDir(tmp_path) as state:
        assert read_fleet_key(state.fleet_key_path("one")) != key
        one.write_text("too short")
        assert read_fleet_key(state.fleet_key_path("one")) != key


def test_a_fleet_key_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state:
        (tmp_path / "one.fleet-key").mkdir()
        with pytest.raises(StateDirError, match=r"one\.fleet-key: cannot be written"):
            state.fleet_key_path("one")


def test_endpoints_are_replaced_whole(tmp_path: Path) -> None:
    endpoint = Endpoint("e-0", "http://127.0.0.1:1", "m", draining=True)
    with StateDir(tmp_path) as state:
        state.write_endpoints("qwen", (endpoint,))
        assert decode_endpoints(state.endpoints_path("qwen").read_bytes()).endpoints == (endpoint,)
        state.write_endpoints("qwen", ())
        assert decode_endpoints(state.endpoints_path("qwen").read_bytes()).endpoints == ()
        assert not list(tmp_path.glob("*.part"))


def test_what_a_killed_run_left_is_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    with StateDir(tmp_path) as state:
        state.record("qwen-engine-0", sleeper.pid)
    with StateDir(tmp_path) as state:
        assert state.end_leftovers() == ("qwen-engine-0",)
        assert sleeper.wait(120) < 0
        assert state.end_leftovers() == ()


def test_kv_goes_with_its_engine_and_with_the_fleet(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state:
        folders = [state.kv_path(name) for name in ("qwen-engine-0", "qwen-engine-1")]
        assert not folders[0].exists(), "engines make them"
        for folder in folders:
            (folder / "3f").mkdir(parents=True)
            (folder / "3f" / "block.kv").write_bytes(b"kv")
        state.remove_kv("qwen-engine-0")
        state.remove_kv("qwen-engine-2")
        assert [folder.exists() for folder in folders] == [False, True]
    assert not folders[1].exists()
    assert (tmp_path / "logs").exists()


def test_kv_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    block = tmp_path / "kv" / "old-engine-0" / "block.kv"
    block.parent.mkdir(parents=True)
    block.write_bytes(b"kv")
    with StateDir(tmp_path) as state:
        assert block.exists(), "a process that was left may still use it"
        state.end_leftovers()
        assert not block.exists()


def test_a_process_that_only_has_the_same_id_is_left_alone(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    with StateDir(tmp_path) as state:
        (tmp_path / "processes.json").write_text(json.dumps({"a": [sleeper.pid, "1"], "b": [sleeper.pid, ""]}))
        assert state.end_leftovers() == ()
        assert sleeper.poll() is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": ["x", "y"]}', "null"])
def test_a_damaged_record_is_no_obstacle(tmp_path: Path, text: str) -> None:
    with StateDir(tmp_path) as state:
        (tmp_path / "processes.json").write_text(text)
        assert state.end_leftovers() == ()


def test_a_process_that_ended_is_forgotten(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    with StateDir(tmp_path) as state:
        state.record("qwen-engine-0", sleeper.pid)
        state.forget("qwen-engine-0")
        state.forget("never-known")
    assert json.loads((tmp_path / "processes.json").read_text()) == {}


def test_start_time_knows_the_dead(sleeper: subprocess.Popen[bytes]) -> None:
    assert start_time(sleeper.pid) == start_time(sleeper.pid) is not None
    sleeper.kill()
    deadline = time.monotonic() + 30
    while start_time(sleeper.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert start_time(sleeper.pid) is None, "a zombie does not run"


def test_each_file_has_a_folder_of_its_own(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    one = default_state_dir(Path("examples/a.yaml"), environment)
    other = default_state_dir(Path("examples/b/a.yaml"), environment)
    assert one == default_state_dir(Path("examples") / ".." / "examples" / "a.yaml", environment)
    assert one != other
    assert one.parent == other.parent == tmp_path / "pagefleet"
    assert default_state_dir(Path("a.yaml"), {}).is_relative_to(Path.home() / ".local" / "state")


def test_what_killed_fleets_of_other_manifests_left_is_swept(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    states = {name: StateDir(tmp_path / name) for name in ("killed", "orphans", "runs")}
    for name, state in states.items():
        (state.kv_path("e-0") / "block.kv").parent.mkdir(parents=True)
        (tmp_path / name / "qwen.endpoints.json.part").touch()
        state.logs.append("e-0", b"said")
        if name == "orphans":
            state.record("e-0", sleeper.pid)
        if name != "runs":
            state._lock.close()  # as the system does when a process is killed
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "mine.part").touch()
    sweep(tmp_path)
    sweep(tmp_path / "nowhere")
    states["runs"]._lock.close()
    assert [(tmp_path / name / "kv").exists() for name in ("killed", "orphans", "runs")] == [False, True, True]
    assert sorted(file.name for file in (tmp_path / "killed").iterdir()) == ["lock", "logs"]
    assert (tmp_path / "killed" / "logs" / "e-0.log").read_bytes() == b"said"
    assert (tmp_path / "stranger" / "mine.part").exists()


def test_a_fleet_may_begin_while_another_one_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sweeps holds the lock of a folder for a moment, and not while it removes gigabytes of K/V."""
    folder = tmp_path / "killed"
    killed = StateDir(folder)
    (killed.kv_path("e-0") / "block.kv").mkdir(parents=True)
    killed._lock.close()
    sweeping = (folder / "lock").open("r+")
    fcntl.flock(sweeping, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", lambda seconds: sweeping.close())
    StateDir(folder)._lock.close()
    begun: list[StateDir] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: begun.append(StateDir(folder)))
    sweep(tmp_path)
    [state] = begun
    assert not state.kv_path("e-0").exists()
    state._lock.close()


FULL_DISK = """
import errno, sys
from pathlib import Path
from pagefleet_operator.local.state_dir import StateDir
from pagefleet_protocol.endpoints import Endpoint, decode_endpoints

disk = Path(sys.argv[1])


def fill():
    with (disk / "other").open("ab", buffering=0) as other:
        try:
            while True:
                other.write(bytes(1 << 16))
        except OSError as error:
            assert error.errno == errno.ENOSPC


with StateDir(disk / "state") as state:
    state.write_endpoints("qwen", ())
    fill()
    for port in range(1, 50):
        endpoint = Endpoint("e-0", f"http://127.0.0.1:{port}", "m")
        state.write_endpoints("qwen", (endpoint,))
        assert decode_endpoints(state.endpoints_path("qwen").read_bytes()).endpoints == (endpoint,)
        state.write_kv_peers("qwen", (f"127.0.0.1:{port}",))
        state.record(f"e-{port}", 1)
        state.fleet_key_path("qwen", port)
        if port % 10 == 0:
            fill()  # whoever fills it takes what comes free too
    (disk / "other").unlink()
    state.write_endpoints("qwen", ())
    assert (disk / "state" / "reserve").stat().st_size == 1 << 20
fill()
with StateDir(disk / "state") as state:
    state.write_endpoints("qwen", ())
    assert not list((disk / "state").glob("*.part"))
print("written")
"""


def test_a_full_disk_does_not_keep_a_restarted_engine_from_its_routers(tmp_path: Path) -> None:
    """On a disk of its own, in a namespace of its own."""
    mounted = f'mount -t tmpfs -o size=4m none {tmp_path} && exec {sys.executable} -c "$1" {tmp_path}'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, "sh", FULL_DISK]
    if subprocess.run([*command[:6], "mount -t tmpfs none /mnt"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces here")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.stderr) == ("written\n", "")
