"""Each benchmark once, on a model of a million parameters, and what it says to a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine.bench import offline, roofline
from pagefleet_engine.bench.cli import BENCHMARKS, main

SMALL = ["--shape=llama-1m", "--device=cpu", "--num-threads=1", "--max-model-len=256"]


@pytest.fixture(autouse=True)
def _same_threads_after() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the machine takes seconds; it has a test of its own."""
    for module in (offline, roofline):
        monkeypatch.setattr(module, "measure_roofline", lambda device: roofline.Roofline(2e10, 2e11))


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    report = tmp_path / "report.json"
    assert main([*arguments, f"--json={report}"]) == 0
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["command"].startswith(f"pagefleet bench {arguments[0]} ")
    return found


def test_latency(tmp_path: Path) -> None:
    report = run(tmp_path, "latency", *SMALL, "--batch-size=2", "--input-len=9", "--output-len=48", "--repeats=2")
    figures = report["figures"]
    assert figures["per_token_ms"]["p50"] > 0
    assert figures["output_tokens_per_s"] == pytest.approx(2e3 / figures["per_token_ms"]["p50"])
    assert 0 < figures["decode_share_of_roofline"] < 1
    assert report["settings"]["model"] == "llama-1m"
    assert report["roofline"]["copy_bytes_per_s"] > 0


def test_throughput(tmp_path: Path) -> None:
    figures = run(tmp_path, "throughput", *SMALL, "--num-requests=3", "--input-len=4:9", "--output-len=5")["figures"]
    assert figures["output_tokens_per_s"] == pytest.approx(15 / figures["seconds"])
    assert figures["device_idle_seconds"] >= 0


def test_prefix(tmp_path: Path) -> None:
    figures = run(tmp_path, "prefix", *SMALL, "--prefix-len=64", "--input-len=8", "--num-requests=3")["figures"]
    assert figures["hit_rate"] == pytest.approx(3 * 64 / (4 * 72))


def test_startup(tmp_path: Path) -> None:
    figures = run(tmp_path, "startup", *SMALL, "--repeats=1")["figures"]
    assert figures["seconds"]["p50"] > figures["phase_seconds"]["weights"] > 0


@pytest.mark.fleet
def test_startup_of_a_server(tmp_path: Path) -> None:
    figures = run(tmp_path, "startup", "--server", *SMALL, "--repeats=1")["figures"]
    phases = figures["phase_seconds"]
    assert {"imports", "config", "weights", "warm_up", "tokenizer"} <= set(phases)
    assert figures["seconds"]["p50"] > phases["server_ready"] > phases["server_imports"] > 0
    assert figures["first_token_ms"] > 0


def test_kernels(tmp_path: Path) -> None:
    figures = run(tmp_path, "kernels", "--device=cpu", "--only=attention")["figures"]
    both = {"decode attention", "decode attention, pool by layer"}
    assert set(figures) == both | {"prefill attention", "cascade attention"}
    assert all(size["times_peer_speed"] > 0 for sizes in figures.values() for size in sizes.values())


@pytest.mark.fleet
def test_serve_starts_a_server_and_draws_what_it_saw(tmp_path: Path) -> None:
    plot = tmp_path / "latencies.png"
    report = run(
        tmp_path, "serve", *SMALL, "--num-requests=6", "--request-rate=50", "--input-len=5:9", "--output-len=4",
        "--max-concurrency=4", "--async-scheduling", "--no-profile-cache",
        "--slo", "ttft:60000", "tpot:60000", f"--plot={plot}",
    )  # fmt: skip
    figures = report["figures"]
    assert report["settings"]["model"] == "llama-1m"
    assert report["roofline"]["copy_bytes_per_s"] > 0
    assert 0 < figures["share_of_roofline"] < 1
    assert (figures["completed"], figures["failed"]) == (6, 0)
    assert figures["goodput_share"] == 1.0
    assert figures["ttft_ms"]["p50"] <= figures["ttft_ms"]["p99"] <= figures["e2e_ms"]["p99"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "no benchmark: give one of latency"),
        (["latency"], "no model is given: say --model MODEL or --shape"),
        (["latency", "--shape", "gpt-5"], "invalid choice: 'gpt-5'"),
        (["latency", "--shap"], "expected one argument"),
        (["latency", "--shape=llama-1m", "--block-size=0"], "block_size is 0: give at least 1"),
        (["throughput", "--shape=llama-1m", "--input-len=0"], "--input-len is '0'"),
        (["serve", "--request-rate=0"], "--request-rate is 0.0: give more than 0"),
        (["serve", "--slo", "fast"], "as ttft:500"),
        (["serve", "--base-url=http://127.0.0.1:9/v1"], "does not list models"),
        (["startup", "--model=/nowhere", "--repeats=1"], "the engine did not start: /nowhere: no such folder"),
        (["kernels", "--device=cpu", "--tune=table.json"], "--tune measures a GPU"),
        (["kernels", "--device=cpu", "--only=magic"], "no kernel's name contains 'magic'"),
    ],
)
def test_a_mistake_is_told_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("pagefleet bench: error: ")
    assert said.count("\n") == 1


def test_help_names_every_benchmark_without_loading_torch() -> None:
    code = "import sys; from pagefleet_engine.bench.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in BENCHMARKS)
