"""The command: its flags, their variables, and what it says about mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pagefleet_operator import operate_cli
from pagefleet_operator.handlers import operator
from pagefleet_operator.handlers.settings import OperateSettings

IMAGES = ["--engine-image", "e:1", "--router-image", "r:1", "--operator-image", "o:1"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[OperateSettings]:
    """The settings that operators would have been started with."""
    given: list[OperateSettings] = []

    def run(settings: OperateSettings) -> int:
        given.append(settings)
        return 0

    monkeypatch.setattr(operator, "operate", run)
    for name in [name for name in os.environ if name.startswith("PAGEFLEET_OPERATOR_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    return given


def test_flags_become_settings(started: list[OperateSettings]) -> None:
    flags = ["--namespace", "a", "--namespace", "b", "--operator-namespace", "c", "--lease-name", "l", "--port", "0"]
    flags += ["--image-pull-secret", "s", "--allowed-image", "x/", "--allowed-host-path", "/m", "--cluster-domain", "d"]
    flags += ["--hf-endpoint", "https://m", "--allow-any-pod-template", "--no-network-policies", "--workers", "3"]
    flags += ["--no-leader-election", "--resync-seconds", "60", "--host", "127.0.0.1", "--kubeconfig", "k"]
    flags += ["--api-server-port", "16443", "--api-server-port", "443"]
    assert operate_cli.main([*IMAGES, *flags]) == 0
    (settings,) = started
    cluster = settings.cluster
    assert (cluster.engine_image, cluster.router_image, cluster.operator_image) == ("e:1", "r:1", "o:1")
    assert (settings.namespaces, cluster.operator_namespace, settings.lease_name) == (("a", "b"), "c", "l")
    assert (cluster.image_pull_secret, cluster.allowed_image, cluster.allowed_host_path) == (
        ("s",),
        ("x/",),
        ("/m",),
    )
    assert (cluster.cluster_domain, cluster.hf_endpoint) == ("d", "https://m")
    assert cluster.allow_any_pod_template
    assert not cluster.network_policies
    assert cluster.api_server_port == (16443, 443)
    assert not settings.leader_election
    assert (settings.port, settings.workers, settings.timing.resync) == (0, 3, 60.0)
    assert settings.kubeconfig == Path("k")


def test_variables_set_the_same(started: list[OperateSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ENGINE_IMAGE": "e:2",
        "ROUTER_IMAGE": "r:2",
        "OPERATOR_IMAGE": "o:2",
        "NAMESPACE": "a, b",
        "WORKERS": "5",
        "NO_LEADER_ELECTION": "true",
    }.items():
        monkeypatch.setenv(f"PAGEFLEET_OPERATOR_{name}", value)
    assert operate_cli.main(["--engine-image", "e:3"]) == 0
    (settings,) = started
    assert (settings.cluster.engine_image, settings.cluster.router_image) == ("e:3", "r:2")
    assert settings.cluster.api_server_port == (443, 6443)
    assert (settings.namespaces, settings.workers, settings.leader_election) == (("a", "b"), 5, False)


def test_a_flag_replaces_a_variables_list(started: list[OperateSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFLEET_OPERATOR_NAMESPACE", "a")
    assert operate_cli.main([*IMAGES, "--namespace", "b"]) == 0
    assert started[0].namespaces == ("b",)


def test_two_processes_have_two_names(started: list[OperateSettings]) -> None:
    for _ in range(2):
        operate_cli.main([*IMAGES, "--operator-namespace", "c"])
    assert started[0].identity != started[1].identity


def test_outside_a_cluster_the_lease_is_where_the_services_are(started: list[OperateSettings]) -> None:
    operate_cli.main([*IMAGES, "--namespace", "a"])
    assert started[0].cluster.operator_namespace == "a"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "pagefleet operate: error: give --engine-image, --router-image, --operator-image"),
        (IMAGES, "pagefleet operate: error: give --operator-namespace"),
    ],
)
def test_what_is_missing_is_told(
    started: list[OperateSettings], flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert operate_cli.main(flags) == 2
    assert capsys.readouterr().err.startswith(says)
    assert started == []


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "70000"),
        ("--workers", "0"),
        ("--resync-seconds", "1"),
        ("--workers", "many"),
        ("--api-server-port", "x"),
    ],
)
def test_a_value_that_cannot_be_is_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert operate_cli.main([*IMAGES, flag, value]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"pagefleet operate: error: {flag} is ")
    assert value in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("variable", ["ALLOW_ANY_POD_TEMPLATE", "NO_NETWORK_POLICIES", "LEADER_ELECTION"])
def test_a_misspelt_boolean_is_no_no(
    variable: str, started: list[OperateSettings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"PAGEFLEET_OPERATOR_{variable}", "ture")
    assert operate_cli.main([*IMAGES, "--operator-namespace", "c"]) == 2
    assert capsys.readouterr().err == (
        f"pagefleet operate: error: PAGEFLEET_OPERATOR_{variable} is 'ture': give true or false\n"
    )
    assert started == []


def test_a_file_sets_the_same(started: list[OperateSettings], tmp_path: Path) -> None:
    file = tmp_path / "operator.yaml"
    file.write_text("namespace: [a, b]\nresync-seconds: 1h\nnetwork_policies: no\nworkers: 3\n")
    assert operate_cli.main([*IMAGES, "--config", str(file), "--workers", "4"]) == 0
    (settings,) = started
    assert (settings.namespaces, settings.timing.resync, settings.workers) == (("a", "b"), 3600.0, 4)
    assert not settings.cluster.network_policies


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, pagefleet_operator.operate_cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit(any(name in sys.modules for name in ('kopf', 'kubernetes', 'aiohttp', 'pydantic')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "PAGEFLEET_OPERATOR_ENGINE_IMAGE is --engine-image" in done.stdout


def test_a_real_start_without_a_cluster_ends_with_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pagefleet_operator.operate_cli", *IMAGES, "--operator-namespace", "a"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_")}
    kubeconfig = ["--kubeconfig", str(tmp_path / "none")]
    starts = [
        (subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True, env=environment), says)
        for flags, says in ((kubeconfig, "there is no such file"), ([], "outside a cluster give --kubeconfig FILE"))
    ]
    for process, says in starts:
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 2
        assert says in stderr.splitlines()[-1]
