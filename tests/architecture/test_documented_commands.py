"""Every command of the documents is read by its program, runs in a test that is named, or is marked with a reason."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from pagefleet_download.cli import DOWNLOAD, DownloadConfig
from pagefleet_engine.bench.cli import BENCHMARKS
from pagefleet_engine.cli import read_configuration as read_serve
from pagefleet_engine.compression.cli import QUANTIZE
from pagefleet_engine.compression.settings import QuantizeConfig
from pagefleet_operator.chat.cli import CHAT, ChatConfig, TalkConfig
from pagefleet_operator.chat.run_cli import RUN, RunConfig
from pagefleet_operator.cli import UP, UpConfig
from pagefleet_operator.console_cli import CONSOLE, ConsoleConfig
from pagefleet_operator.operate_cli import OPERATE
from pagefleet_protocol.settings.program import OneLineParser, Program
from pagefleet_router.cli import read_configuration as read_route

from tests.architecture.documented_commands import ROOT, Command, documented_commands, simple_commands, typed_lines
from tests.fakes.helm_chart import render

COMMANDS = documented_commands()

RUN_ELSEWHERE = {
    "python examples/03-offline/offline.py": "tests/examples/test_offline.py",
    "python examples/12-agents/openai_agent.py": "tests/examples/test_agents.py",
    "python examples/12-agents/anthropic_agent.py": "tests/examples/test_agents.py",
    "python examples/12-agents/pydantic_agent.py": "tests/examples/test_agents.py",
    "pip install --find-links dist pagefleet": "e2e/test_installed.py",
    "helm install": "e2e/kubernetes/installation.py",
    "helm test": "e2e/kubernetes/installation.py",
    "helm upgrade": "e2e/kubernetes/installation.py",
    "helm uninstall": "e2e/kubernetes/installation.py",
    "curl http://127.0.0.1:": "e2e/test_documented_commands.py",
    "curl -s http://127.0.0.1:": "e2e/test_documented_commands.py",
    "curl -s localhost:8000": "e2e/test_documented_commands.py",
    "curl -si localhost:8000": "e2e/test_documented_commands.py",
    "curl -s -o /dev/null localhost:8000": "e2e/test_documented_commands.py",
}
"""By how they begin; the file runs them, or what Helm's library does for them."""

MARKED = {
    "docker build": "builds images from a registry; tests/images holds the Dockerfile's steps and versions",
    "docker push": "needs a registry",
    "cosign": "signs with a person's identity; the tool is not in Debian",
    "git": "what a release does to the repository",
    "helm rollback": "Helm's own, and needs a cluster with a history",
    "helm package": "Helm's own command; tests/chart renders and lints the chart that it packs",
    "helm push": "needs a registry",
    "openssl": "makes random bytes",
    "seq": "counts; what it counts for is run",
    "pre-commit install": "writes into .git; its hooks are those of make lint",
    "pip install openai": "packages of others",
    "kubectl apply --server-side -f https://github.com/": "reads a manifest of others from the network",
    "hf": "Hugging Face's own command",
    "pagefleet VERB": "any verb",
    "vllm": "vLLM's own command, which ours is compared with",
    "curl https://llm.example.org": "a host that only the reader's Gateway has",
}
"""Why nothing here reads or runs them, by how they begin."""


def parse_program(program: Program, *groups: type[object]) -> Callable[[Sequence[str]], object]:
    def parse(arguments: Sequence[str]) -> object:
        given = program.read(arguments, {})
        return [program.build(group, given) for group in groups]

    return parse


def parse_run(arguments: Sequence[str]) -> object:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parse_program(RUN, RunConfig, TalkConfig)(arguments[:end])
    return read_serve([arguments[0], *arguments[end + 1 :]], {})


def parse_bench(arguments: Sequence[str]) -> object:
    name, *flags = arguments
    if (name, flags) == ("WHAT", ["--help"]):
        return BENCHMARKS
    parser = OneLineParser(prog=f"pagefleet bench {name}")
    parser.add_argument("--json")
    importlib.import_module(f"pagefleet_engine.bench.{name}").add_arguments(parser)
    return parser.parse_args(flags)


def parse_console(arguments: Sequence[str]) -> object:
    named = ["--namespace" if word == "-n" else word for word in arguments]
    return parse_program(CONSOLE, ConsoleConfig)(named)


VERBS: Mapping[str, Callable[[Sequence[str]], object]] = {
    "serve": lambda words: read_serve(words, {}),
    "route": lambda words: read_route(words, {}),
    "up": parse_program(UP, UpConfig),
    "run": parse_run,
    "chat": parse_program(CHAT, ChatConfig, TalkConfig),
    "console": parse_console,
    "download": parse_program(DOWNLOAD, DownloadConfig),
    "quantize": parse_program(QUANTIZE, QuantizeConfig),
    "operate": parse_program(OPERATE),
    "bench": parse_bench,
    "doctor": argparse.ArgumentParser().parse_args,
    "collect-env": argparse.ArgumentParser().parse_args,
}
"""Reads the arguments of each verb by its own parser, and raises where it would refuse them."""


def check_pagefleet(command: Command) -> None:
    verb, *rest = [word.strip("[]") for word in command.words[1:] if word != "..."]
    assert verb in VERBS, f"{command}: no such verb"
    if not rest and not command.in_block:
        return  # a name, in running text
    needs_model = verb == "serve" and rest[0].startswith("-") and not command.in_block
    VERBS[verb](["MODEL", *rest] if needs_model else rest)
    for word in rest:
        assert not word.startswith("examples/") or (ROOT / word).exists(), f"{command}: no {word}"


def check_make(command: Command) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *command.words[1:]], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"


def check_python(command: Command) -> None:
    *_, script = command.words
    assert (ROOT / script).exists(), f"{command}: no {script}"


KUBECONFIG = """
current-context: nowhere
contexts: [{name: nowhere, context: {cluster: nowhere}}]
clusters: [{name: nowhere, cluster: {server: "http://127.0.0.1:1"}}]
"""


def check_kubectl(command: Command) -> None:
    """Let kubectl read it, with no server behind: it gets so far that it asks one."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    words = [word for word in command.words[1:] if word != "..."]
    verbs = {"describe", "logs", "cordon", "port-forward", "scale", "annotate"}
    incomplete = verbs & set(words) and not command.in_block and len(words) < 3
    arguments = [words[0], "--help"] if incomplete or words[0] == "annotate" else words  # `annotate ingress tiny ...`
    Path("kubeconfig").write_text(KUBECONFIG)
    done = subprocess.run(
        [kubectl, *arguments],
        cwd=ROOT,
        env={**os.environ, "KUBECONFIG": str(Path("kubeconfig").absolute())},
        input='{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "what-the-block-holds"}}',
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    asked = "127.0.0.1:1 was refused" in done.stderr or "connection refused" in done.stderr
    assert done.returncode == 0 or asked, f"{command}: {done.stderr[-500:]}"


def check_helm(command: Command) -> None:
    """Render the chart that it names, with the values that it sets."""
    words = command.words
    if "charts/pagefleet" not in words:
        return
    values: dict[str, object] = {}
    for name, value in re.findall(r"--set (\w+\.\w+)=(\S+)", " ".join(words)):
        outer, inner = name.split(".")
        values[outer] = {inner: value.replace("$REGISTRY", "registry.example.org/team")}
    assert render(values or {"images": {"registry": "registry.example.org"}})


def check_install(command: Command) -> None:
    """Every package and extra of ours that pip or uvx is told is there."""
    assert command.words[:2] in (("pip", "install"), ("uvx", "pagefleet"), ("uvx", "--find-links")), str(command)
    for name, extra in re.findall(r"pagefleet-(\w+)\[(\w+)\]", str(command)):
        assert f"\n{extra} = [" in (ROOT / name / "pyproject.toml").read_text(), f"{command}: no extra {extra}"
    if command.words[0] == "uvx":
        start = command.words.index("pagefleet")
        check_pagefleet(Command(command.document, command.words[start:], command.in_block))


CHECKS: Mapping[str, Callable[[Command], None]] = {
    "pagefleet": check_pagefleet,
    "make": check_make,
    "python": check_python,
    "kubectl": check_kubectl,
    "helm": check_helm,
    "pip": check_install,
    "uvx": check_install,
}


def begins(command: Command, table: Mapping[str, str]) -> str:
    return next((start for start in table if f"{' '.join(command.words)} ".startswith(start)), "")


@pytest.mark.parametrize("command", {str(one): one for one in COMMANDS}.values(), ids=str)
def test_a_command_is_read_or_run_or_marked(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = command.document.relative_to(ROOT)
    (tmp_path / "fleet.key").write_text("ab" * 32)
    (tmp_path / "fleet.key").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    if not begins(command, MARKED):
        check = CHECKS.get(command.words[0])
        assert check or begins(command, RUN_ELSEWHERE), f"{where}: nothing reads {command}: run it, or mark it"
        if check:
            check(command)


@pytest.mark.parametrize("table", [RUN_ELSEWHERE, MARKED])
def test_the_tables_hold_nothing_that_no_document_says(table: Mapping[str, str]) -> None:
    said = {begins(command, table) for command in COMMANDS}
    assert set(table) - said == set()


def test_what_runs_them_is_there() -> None:
    assert [file for file in RUN_ELSEWHERE.values() if not (ROOT / file).exists()] == []


def test_a_mistake_in_a_command_is_found(tmp_path: Path) -> None:
    for text in (
        "pagefleet serve builtin://tiny --max-model-lenn 1024",
        "pagefleet serve builtin://tiny --kv-role sideways",
        "pagefleet up examples/00-none/inferenceservice.yaml",
        "pagefleet bench serv",
        "pagefleet route --polcy prefix",
        "make everything",
        "python bench/none.py",
    ):
        ((words),) = simple_commands(text)
        with pytest.raises(Exception, match=r"."):
            CHECKS[words[0]](Command(tmp_path, words, in_block=True))


def test_blocks_are_read_as_a_shell_reads_them() -> None:
    function = "$ ask() {\n    curl -s $1 \\\n      -d x | grep y\n  }\nanswer: make this\n"
    block = function + "$ KEY=$(kubectl get x); make up # so\n"
    words = [words for line in typed_lines(block) for words in simple_commands(line)]
    assert words == [("curl", "-s", "$1", "-d", "x"), ("kubectl", "get", "x"), ("make", "up")]
    assert typed_lines("tiny: ready\n  make up\n") == ["  make up"]
