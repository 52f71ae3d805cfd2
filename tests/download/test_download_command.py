"""`pagefleet download`: what it prints, what it returns, and what a signal leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from pagefleet_download.cli import main
from pagefleet_download.settings import settings_for
from pagefleet_protocol.model_facts import decode_result

from tests.fakes.downloads import visible
from tests.fakes.http_faults import Fault
from tests.fakes.hub_server import HubServer
from tests.fakes.model_files import WANTED, sharded

SHARD = "model-00001-of-00002.safetensors"
COMMAND = [sys.executable, "-m", "pagefleet_download.cli"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, hub: HubServer) -> None:
    for name in ("HF_TOKEN", "AWS_ENDPOINT_URL", "GOOGLE_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)


def test_one_line_tells_the_facts(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sha = hub.repositories["org/model"].commit(sharded())
    message = tmp_path / "termination-log"
    assert main(["hf://org/model", str(tmp_path / "m"), "--termination-message", str(message)]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert message.read_text() == out
    facts = decode_result(out).facts
    assert facts is not None
    assert (facts.revision, facts.num_layers) == (sha, 4)
    assert visible(tmp_path / "m") == WANTED


def test_inspecting_needs_no_folder(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repositories["org/model"].commit(sharded())
    assert main(["--inspect", "hf://org/model", "--revision", "main", "--host", "127.0.0.1", "--port", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["facts"]["weights_bytes"] == 10001


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (["hf://org/absent", "folder"], 2, "ModelNotFound"),
        (["s3://bucket/model"], 2, "BadSettings"),
        (["ftp://x", "folder"], 2, "BadSettings"),
        (["--inspect", "file:///nowhere"], 2, "ModelNotFound"),
    ],
)
def test_the_last_line_of_the_errors_says_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == status
    captured = capsys.readouterr()
    result = decode_result(captured.out)
    assert result.reason == reason
    assert captured.err.splitlines()[-1] == f"pagefleet download: {reason}: {result.message}"


def test_a_termination_message_that_cannot_be_written_costs_nothing_else(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["org/model"].commit(sharded())
    assert main(["--inspect", "hf://org/model", "--termination-message", str(tmp_path / "no" / "such")]) == 0
    captured = capsys.readouterr()
    assert decode_result(captured.out).reason == ""
    assert "No such file" in captured.err


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_a_port_that_is_none(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hf://org/model", "folder", "--port", port]) == 2
    said = capsys.readouterr().err
    assert said.startswith("pagefleet download: error: --port is ")
    assert "0 to 65535" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("uri", "endpoint", "environment", "expected"),
    [
        ("hf://a/b", None, {}, (None, None)),
        ("hf://a/b", None, {"HF_ENDPOINT": "http://m", "HF_TOKEN": " t\n", "AWS_ENDPOINT_URL": "x"}, ("http://m", "t")),
        ("hf://a/b", "http://flag", {"HF_ENDPOINT": "http://m", "HF_TOKEN": ""}, ("http://flag", None)),
        ("s3://a/b", None, {"AWS_ENDPOINT_URL": "http://b", "AWS_ENDPOINT_URL_S3": "http://a"}, ("http://a", None)),
        ("gs://a/b", None, {"GOOGLE_BASE_URL": "http://g", "HF_ENDPOINT": "http://m"}, ("http://g", None)),
        ("file:///a", None, {"HF_ENDPOINT": "http://m"}, (None, None)),
    ],
)
def test_settings_from_flags_and_environment(
    uri: str, endpoint: str | None, environment: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    settings = settings_for(uri, None, endpoint, environment)
    assert (settings.endpoint, settings.token) == expected
    assert settings.revision is None
    assert "token" not in repr(settings)


@pytest.mark.fleet
def test_two_processes_on_one_folder_download_once(hub: HubServer, tmp_path: Path) -> None:
    files = sharded()
    hub.repositories["org/model"].commit(files)
    command = [*COMMAND, "hf://org/model", str(tmp_path / "m")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs[0] == outputs[1]
    assert visible(tmp_path / "m") == WANTED
    whole = [seen for seen in hub.requests_for(SHARD) if "range" not in seen.headers]
    assert len(whole) == 1


@pytest.mark.fleet
def test_a_signal_ends_it_and_keeps_what_has_arrived(hub: HubServer, tmp_path: Path) -> None:
    files = sharded(50_000)
    hub.repositories["org/model"].commit(files)
    hub.faults[SHARD] = [Fault("cut", after=8), Fault("stall", after=30_000)]
    command = [*COMMAND, "hf://org/model", str(tmp_path / "m"), "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = int(process.stderr.readline().split()[-1])
        arriving = sum(len(files[name]) for name in WANTED - {SHARD}) + 30_000
        assert wait_for_bytes(port, arriving) == arriving
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    assert "stopped; what has arrived is kept" in err.splitlines()[-1]
    (part,) = [path for path in (tmp_path / "m" / ".incoming").iterdir() if path.name.startswith(SHARD)]
    assert part.read_bytes() == files[SHARD][:30_000]
    assert visible(tmp_path / "m") == set()

    done = subprocess.run(command[:-4], capture_output=True, timeout=120, env=dict(os.environ), check=True)
    assert decode_result(done.stdout).reason == ""
    assert (tmp_path / "m" / SHARD).read_bytes() == files[SHARD]
    assert hub.requests_for(SHARD)[-1].headers["range"] == f"bytes=30000-{len(files[SHARD]) - 1}"


def wait_for_bytes(port: int, at_least: int) -> int:
    """Ask a running download for its progress until so many bytes are there."""
    deadline = time.monotonic() + 120
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=30) as answer:
            bytes_done = int(json.load(answer)["bytes_done"])
        if bytes_done >= at_least or time.monotonic() > deadline:
            return bytes_done
        time.sleep(0.05)
