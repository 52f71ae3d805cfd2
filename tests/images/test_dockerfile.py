"""The rules of the images: user, versions, what each may hold, and that every source is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from pagefleet_protocol.version import VERSION

from images.dependencies import third_party
from images.dockerfile_reader import Instruction, Stage, expanded, lineage, read
from tests.architecture.test_distributions import closure

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
STAGES = read(TEXT)
TARGETS = ("engine", "router", "operator")
DISTRIBUTIONS = {
    "engine": {"protocol", "download", "kernels", "text", "kv", "console", "engine", "pagefleet"},
    "router": {"protocol", "text", "console", "router", "pagefleet"},
    "operator": {"protocol", "download", "operator", "pagefleet"},
}
TITLE = "org.opencontainers.image"


def instructions(target: str) -> list[Instruction]:
    """Return the instructions of the image itself, from the base on."""
    return [one for stage in lineage(STAGES, target) for one in stage.instructions]


def last(target: str, name: str) -> Instruction:
    return [one for one in instructions(target) if one.name == name][-1]


def pinned(path: Path) -> dict[str, str]:
    """Return name and version of each line of a requirements file; every line has to state one version."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", line) for line in lines)
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def copies(stage: Stage) -> list[tuple[Instruction, list[str]]]:
    """Return the COPYs of a stage from the context, with their sources."""
    plain = [one for one in stage.of("COPY") if "from" not in one.flags]
    return [(one, [word for word in one.words[:-1] if not word.startswith("--")]) for one in plain]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_nobody_and_as_the_command(target: str) -> None:
    after_user = [one.name for one in STAGES[target].instructions]
    assert last(target, "USER").text == "65532:65532"
    assert "RUN" not in after_user[after_user.index("USER") :]
    assert last(target, "ENTRYPOINT").words == ["pagefleet"]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_says_what_it_is(target: str) -> None:
    labels = {pair.split("=")[0] for one in instructions(target) if one.name == "LABEL" for pair in one.words}
    wanted = ("title", "description", "vendor", "licenses", "version", "revision")
    assert labels == {f"{TITLE}.{name}" for name in wanted}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_holds_its_own_distributions_only(target: str) -> None:
    brought = [one for one in instructions(target) if one.name == "COPY"]
    assert [(one.flags, one.words[-2:]) for one in brought] == [
        ({"from": f"build-{target}"}, ["/opt/pagefleet", "/opt/pagefleet"]),  # libraries: a layer that stays
        ({"from": f"build-{target}"}, ["/opt/own", "/opt/pagefleet"]),
    ]
    build = STAGES[f"build-{target}"]
    sources = {source.partition("/")[0] for _, found in copies(build) for source in found}
    assert sources == DISTRIBUTIONS[target]
    for run in build.of("RUN"):
        named = set(re.findall(rf"(?<![\w/-])({'|'.join(set().union(*DISTRIBUTIONS.values()))})(?![\w/-])", run.text))
        assert named in (set(), DISTRIBUTIONS[target] - {"pagefleet"}, DISTRIBUTIONS[target])


@pytest.mark.parametrize("target", ["router", "operator"])
def test_router_and_operator_hold_no_tools_and_no_tensor_library(target: str) -> None:
    made, built = (
        [one.text for stage in lineage(STAGES, name) for one in stage.of("RUN")] for name in (target, f"build-{target}")
    )
    assert not [text for text in made if re.search(r"apt-get|gcc", text)]
    assert not [text for text in (*made, *built) if re.search(r"torch|triton", text)]
    assert "--without-pip /opt/pagefleet" in next(STAGES["build"].of("RUN")).text


def test_the_engine_brings_the_compiler_that_triton_calls() -> None:
    (install,) = (one.text for one in STAGES["engine"].of("RUN"))
    assert "apt-get install --yes --no-install-recommends gcc libc6-dev" in install
    assert "rm -rf /var/lib/apt/lists/*" in install


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_nothing_is_installed_without_a_version(stage: Stage) -> None:
    installs = [
        part for run in stage.of("RUN") for part in run.text.split(" && ") if " install " in part and "pip" in part
    ]
    for text in installs:
        assert any(
            flag in text
            for flag in ("--constraint constraints.txt", "--no-deps", "--requirement requirements-build.txt")
        )
    assert len(installs) == {"build": 1, "build-router": 2, "build-operator": 2, "build-engine": 3}.get(stage.name, 0)


@pytest.mark.parametrize("distribution", ["pagefleet-engine", "pagefleet-router", "pagefleet-operator"])
def test_every_library_of_an_image_has_a_version(distribution: str) -> None:
    versions = pinned(ROOT / "constraints.txt")
    needed = {name for name in closure(distribution) if not name.startswith("pagefleet-")}
    folders = [ROOT / "protocol", ROOT / distribution.removeprefix("pagefleet-")]
    extras = third_party(folders, ["traces", "picker"])
    for one in extras:
        needed |= {name for name in closure(one) if not name.startswith("pagefleet-")}
    assert "opentelemetry-sdk" in needed
    assert ("grpcio" in needed) == (distribution == "pagefleet-router")
    assert not needed - set(versions)
    assert pinned(ROOT / "images" / "requirements-build.txt")["hatchling"]


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_every_source_is_there_and_sent_to_the_builder(stage: Stage) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for _, sources in copies(stage):
        for source in sources:
            assert (ROOT / source).exists()
            assert source in sent or source.partition("/")[0] in sent
    earlier = list(STAGES)[: list(STAGES).index(stage.name)]
    assert {one.flags["from"] for one in stage.of("COPY") if "from" in one.flags} <= set(earlier)


def test_the_base_has_a_version_and_takes_a_digest() -> None:
    supported = SpecifierSet(re.search(r'requires-python = "(.*)"', (ROOT / "engine/pyproject.toml").read_text())[1])  # type: ignore[index]
    bases = {stage.base for stage in STAGES.values() if stage.base not in STAGES}
    assert len(bases) == 1
    version = re.fullmatch(r"docker\.io/library/python:(3\.\d+)-slim", bases.pop())
    assert version is not None
    assert version[1] in supported
    exact = read(TEXT, {"PYTHON_DIGEST": "sha256:0123"})
    assert exact["build"].base == exact["runtime"].base == f"{version[0]}@sha256:0123"


@pytest.mark.parametrize("target", TARGETS)
def test_what_changes_with_every_commit_comes_last(target: str) -> None:
    *_, version, revision, label = STAGES[target].instructions
    assert (version.text, revision.text) == (f"VERSION={VERSION}", "REVISION=unknown")
    assert label.words == [f"{TITLE}.version=$VERSION", f"{TITLE}.revision=$REVISION"]
    assert not list(STAGES["runtime"].of("ARG"))


@pytest.mark.parametrize("target", TARGETS)
def test_our_own_code_is_not_in_the_layer_of_libraries(target: str) -> None:
    wheels = [one.text for one in STAGES[f"build-{target}"].of("RUN") if "dist/*.whl" in one.text]
    assert len(wheels) == 1
    assert "pip install --no-deps --prefix /opt/own dist/*.whl" in wheels[0]


def test_what_is_written_at_run_time_goes_under_tmp() -> None:
    environment = dict(pair.split("=", 1) for one in instructions("engine") if one.name == "ENV" for pair in one.words)
    places = {environment[name] for name in ("HOME", "XDG_CACHE_HOME")}
    assert all(place == "/tmp" or place.startswith("/tmp/") for place in places)
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    assert last("engine", "WORKDIR").text == "/tmp"


def test_requirements_are_those_of_others(tmp_path: Path) -> None:
    for name, needs in {"a": ["pagefleet-b", "torch>=2"], "b": ["msgspec>=0.19", "torch>=2"]}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text(f"[project]\ndependencies = {needs}\n")
    assert third_party([tmp_path / "a", tmp_path / "b"]) == ["msgspec>=0.19", "torch>=2"]
    with (tmp_path / "b" / "pyproject.toml").open("a") as file:
        file.write('[project.optional-dependencies]\nmore = ["rich>=14", "pagefleet-a[more]"]\nother = ["x"]\n')
    assert third_party([tmp_path / "a", tmp_path / "b"], ["more"]) == ["msgspec>=0.19", "rich>=14", "torch>=2"]
    assert third_party([tmp_path / "b"], ["other", "more"]) == ["msgspec>=0.19", "rich>=14", "torch>=2", "x"]


def test_requirements_of_the_operator_are_found() -> None:
    names = {Requirement(one).name for one in third_party([ROOT / "protocol", ROOT / "download", ROOT / "operator"])}
    assert {"pydantic", "msgspec", "pyyaml"} <= names
    assert not {name for name in names if name.startswith("pagefleet")}


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("$A/${A}", {"A": "x"}, "x/x"),
        ("${A}", {}, ""),
        ("${A:-y}", {}, "y"),
        ("${A:-y}", {"A": "x"}, "x"),
        ("a${B:+@${B}}", {"B": "c"}, "a@c"),
        ("a${B:+@${B}}", {"B": ""}, "a"),
    ],
)
def test_variables_are_replaced(text: str, values: dict[str, str], expected: str) -> None:
    assert expanded(text, values) == expected


def test_lines_are_joined_and_comments_left_out() -> None:
    stages = read(
        '# why\nARG V=1\nFROM base:${V} AS a\nRUN one \\\n    # not this\n    && two\nFROM a AS b\nCMD ["x", "y"]\n'
    )
    assert stages["a"].base == "base:1"
    assert [one.text for one in stages["a"].instructions] == ["one && two"]
    assert [stage.name for stage in lineage(stages, "b")] == ["a", "b"]
    assert next(stages["b"].of("CMD")).words == ["x", "y"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("RUN x\n", "RUN comes before the first FROM"), ("FROM base\n", "FROM base gives its stage no name")],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(text)
