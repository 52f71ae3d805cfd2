"""The one command for a GPU machine, in small, its limits and its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pagefleet_engine.bench.kernel_cases import FLASH_BESIDE, all_cases

from bench import gpu_check
from bench.gpu_check import Outcome, chosen, run_part, run_parts, table
from bench.gpu_kv_engines import BLOCKS_PER_PROMPT, Answer, verdict
from bench.gpu_kv_planes import checks
from bench.gpu_parts import (
    GPU_TESTS,
    Device,
    Goal,
    Part,
    at_least,
    at_most,
    figure,
    first_parts,
    quick_parts,
    second_parts,
    tiny_parts,
)

ROOT = Path(__file__).resolve().parents[2]
H200, H100, UNKNOWN = Device("NVIDIA H200", 139.8), Device("NVIDIA H100 80GB HBM3", 79.1), Device("NVIDIA B300", 270)
SECOND = second_parts(Path("c"), Path("f"))


@pytest.mark.fleet
@pytest.mark.timeout(3600)  # a minute of computing: a busy machine takes its time
def test_the_whole_check_in_small(tmp_path: Path) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    out.mkdir()
    environment = {**os.environ, "OUT": str(out), "PYTHON": sys.executable, "TRITON_CACHE_DIR": str(cache)}
    only = ("tests: engine", "scheduler", "checkpoint", "startup")
    command = [str(ROOT / "bench" / "gpu_check.sh"), "--tiny", "--seconds", "3600", "--only", *only]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads((out / "gpu_check.json").read_text())
    assert {part["part"]: part["status"] for part in written["parts"]} == dict.fromkeys(only, "ok")
    assert (out / "startup.json").is_file()
    assert (out / "triton-cache.tar.xz").is_file()


def test_small_and_large_have_the_same_parts_in_one_order() -> None:
    small = [part.name for part in tiny_parts(Path("c"))]
    large = [part.name.replace("-8b", "").replace("-0.6b", "") for part in (*first_parts(H200), *SECOND)]
    assert list(dict.fromkeys(large)) == [*small, "attention", "tuning"]


@pytest.mark.parametrize("device", [H200, H100, UNKNOWN])
def test_the_limits_of_each_calls_parts_fit_into_the_call(device: Device) -> None:
    for parts in (first_parts(device), SECOND):
        assert sum(part.seconds for part in parts) <= gpu_check.CALL_SECONDS


def test_the_quick_parts_come_first_and_take_no_more_than_six_minutes() -> None:
    quick = quick_parts(H200)
    assert [part.name for part in first_parts(H200)[: len(quick)]] == [part.name for part in quick]
    assert sum(part.seconds for part in quick) <= 360


def test_each_kind_of_device_has_figures_and_sizes_of_its_own() -> None:
    assert [device.num_requests for device in (H200, H100, UNKNOWN, Device("", 24), Device("", 8))] == [
        256,
        128,
        256,
        8,
        1,
    ]
    targets = {
        device.name: [goal.target for part in first_parts(device) for goal in part.goals]
        for device in (H200, H100, UNKNOWN)
    }
    assert targets[H200.name] != targets[H100.name]
    assert "any" not in targets[H200.name] + targets[H100.name]
    assert targets[UNKNOWN.name].count("any") == 3
    (throughput,) = (part for part in first_parts(H100) if part.name == "throughput-8b")
    assert "--num-requests=128" in throughput.arguments


def test_a_goal_of_prefill_and_decode_is_not_reached_by_answers_that_no_block_was_sent_for() -> None:
    (planes,) = (part for part in SECOND if part.name == "kv planes")
    alone = [Answer(f"alone-{n}", [n], 0, 1.0) for n in range(3)]

    def reached(received_blocks: float) -> list[bool]:
        apart = [Answer(f"d-{n}", [n], received_blocks, 1.0) for n in range(3)]
        figures = {f"engines: {plane}": verdict(alone, apart) for plane in ("cuda_ipc", "nccl")}
        return [goal.reached(goal.read(figures)) for goal in planes.goals[:2]]

    assert reached(BLOCKS_PER_PROMPT) == [True, True]
    assert reached(0) == [False, False]


def test_the_faster_attention_is_told_by_the_goals_of_one_part() -> None:
    (part,) = (part for part in SECOND if part.name == "attention")
    assert part.arguments[-1] == f"--only={FLASH_BESIDE}"
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for case in all_cases(small=False):
        if FLASH_BESIDE in case.family:
            figures.setdefault(case.family, {})[case.size] = {"times_peer_speed": 0.5 if case.size == "16384" else 2.0}
    assert [goal.reached(goal.read(figures)) for goal in part.goals] == [True, True, True, False]


def test_every_gpu_test_lies_in_the_folders_that_are_run() -> None:
    command = ["git", "grep", "-l", "-E", r"pytest\.mark\.gpu|mark\.gpu", "--", "tests"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert len(found) >= 5
    assert [name for name in found if not name.startswith((*GPU_TESTS, "tests/bench/"))] == []


@pytest.mark.fleet
def test_a_pool_goes_over_the_plane_that_needs_no_gpu() -> None:
    outcome = checks(cuda=False)[0]["tcp"](600.0)
    assert outcome["ok"], outcome["why"]


def sleeper(name: str, seconds: float, limit: float) -> Part:
    return Part(name, ["-c", f"import time; time.sleep({seconds})"], limit, reports=False)


LIMITS = (3.0, 30.0, 240.0)
"""Seconds, each tried where a busy machine had not started a child by the one before."""


def test_a_part_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    for limit in LIMITS:
        outcome = run_part(Part("slow", ["-c", code], 600, reports=False), tmp_path, limit)
        assert (outcome.status, outcome.report) == ("too slow", None)
        if pid_file.exists():
            break
    while runs(int(pid_file.read_text())):
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process has not ended; one of whose status nobody has asked yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # at whatever moment it is gone
        return False


def test_the_total_bounds_what_parts_may_take_and_a_failure_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "_TOO_LITTLE", 0.2)
    failing = Part("failing", ["-c", "raise SystemExit(3)"], 60, reports=False)
    for limit in LIMITS:
        outcomes = run_parts([failing, sleeper("sleeper", 600, 600), sleeper("late", 0, 60)], tmp_path, limit)
        if outcomes[0].status != "too slow":
            break
    assert [outcome.status for outcome in outcomes] == ["failed", "too slow", "no time left"]
    assert [part["status"] for part in json.loads((tmp_path / "gpu_check.json").read_text())["parts"]] == [
        outcome.status for outcome in outcomes
    ]


def test_what_a_stopped_part_has_written_counts(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        'pathlib.Path(sys.argv[1].removeprefix(\'--json=\')).write_text(\'{"figures": {"a": {"b": 2}}}\')\n'
        "time.sleep(600)\n"
    )
    for limit in LIMITS:
        outcome = run_part(Part("partial: one", ["-c", code], 600), tmp_path, limit)
        assert outcome.status == "too slow"
        if outcome.report:
            break
    assert outcome.value(Goal("", "", figure("a", "b"), at_least(1))) == 2.0
    assert outcome.value(Goal("", "", figure("a", "c"), at_least(1))) is None


def test_parts_are_chosen_by_the_beginning_of_their_names() -> None:
    parts = [sleeper(name, 0, 1) for name in ("tests: a", "tests: b", "startup")]
    assert [part.name for part in chosen(parts, ["tests"])] == ["tests: a", "tests: b"]
    assert chosen(parts, None) == parts
    assert chosen(parts, ["nothing"]) == []


def test_the_table_says_what_was_reached_missed_and_not_measured() -> None:
    goals = [
        Goal("speed", ">= 2", figure("speed"), at_least(2)),
        Goal("size", "<= 1", figure("size"), at_most(1)),
        Goal("weight", "<= 1", figure("weight"), at_most(1)),
    ]
    part = Part("demo", [], 10, goals)
    lines = table([Outcome(part, 1.0, "ok", {"figures": {"speed": 3.0, "size": 4.0}})]).splitlines()
    assert lines[-3].split()[-2:] == ["3.00", "yes"]
    assert lines[-2].split()[-2:] == ["4.00", "NO"]
    assert lines[-1].endswith("not measured: ok")
    assert "not measured: too slow" in table([Outcome(part, 10.0, "too slow")])
