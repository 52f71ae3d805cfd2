"""Files and folders of InferenceServices: what is read, and how mistakes are told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_operator.errors import ManifestError
from pagefleet_operator.local.manifest import Manifest, Source, parse_manifest, read_sources

GOOD = """\
apiVersion: pagefleet.dev/v1alpha1
kind: InferenceService
metadata: {name: qwen}
spec:
  model: {uri: "builtin://tiny"}
"""
EXAMPLES = Path(__file__).parents[3] / "examples"


def parse(text: str | bytes) -> Manifest:
    return parse_manifest((Source(Path("f.yaml"), text.encode() if isinstance(text, str) else text),))


def problems(text: str | bytes) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        parse(text)
    return list(caught.value.problems)


def test_one_file_may_hold_several() -> None:
    manifest = parse(f"{GOOD}---\n{GOOD.replace('qwen', 'llama')}---\n# nothing here\n")
    assert [service.name for service in manifest.services] == ["qwen", "llama"]
    assert manifest.skipped == ()


def test_byte_order_mark_anchors_and_merges_are_understood() -> None:
    text = (
        GOOD + "  engine: &e {dtype: float32}\n---\n" + GOOD.replace("qwen", "b") + "  engine: {<<: {dtype: float32}}\n"
    )
    manifest = parse(b"\xef\xbb\xbf" + text.encode())
    assert {service.spec.engine.dtype for service in manifest.services} == {"float32"}


def test_each_mistake_is_told_with_its_line_and_path() -> None:
    text = (
        GOOD
        + "  replicas: two\n  engine:\n    args:\n    - 1\n    maxmodellen: 5\n---\n"
        + GOOD
        + "  router:\n    policy: x\n"
    )
    assert [line[:41] for line in problems(text)] == [
        "f.yaml:9: spec.engine.args[0]: must be te",
        "f.yaml:10: spec.engine.maxmodellen: unkno",
        "f.yaml:6: spec.replicas: must be a whole ",
        "f.yaml:18: spec.router.policy: must be au",
    ]


def test_a_missing_field_is_told_at_what_should_hold_it() -> None:
    assert problems(GOOD.replace('{uri: "builtin://tiny"}', "{}"))[0].startswith(
        "f.yaml:5: spec.model.uri: is required"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1,\nb: 2", "f.yaml:2:5: is not valid YAML: expected ',' or ']'"),
        ("a: 1\n\tb: 2", "f.yaml:2:1: is not valid YAML: found character '\\t'"),
        ("a: b: c", "f.yaml:1:5: is not valid YAML: mapping values are not allowed here"),
        (b"name: \xff", "f.yaml: is not UTF-8 text (byte 6)"),
        ("a: \x00", "f.yaml: is not valid YAML: unacceptable character"),
        (GOOD + "  replicas: 1\n  replicas: 2\n", "f.yaml:5:3: the key 'replicas' stands twice in one mapping"),
        ("1: x", "f.yaml:1:1: a key must be text; put it in quotes"),
        ("[a]: x", "f.yaml:1:1: a key must be text; put it in quotes"),
        ("? {a: b}\n: x", "a key must be text"),
        (
            "a: !!python/object:os.system x",
            "f.yaml:1:4: is not valid YAML: could not determine a constructor for the tag",
        ),
        ("a: !!binary aGk=", "f.yaml:1:4: the tag tag:yaml.org,2002:binary has no use here"),
        ("a: &x [*x]", "too large or too deep"),
        ("a" * 10 + ": " + "[" * 2000, "f.yaml"),
        ("a: " + "9" * 5000, "f.yaml:1:4: cannot be read"),
        ("", "f.yaml: holds no InferenceService (apiVersion: pagefleet.dev/v1alpha1, kind: InferenceService)"),
        ("just text", "f.yaml:1: document: must be a mapping of fields, not the text 'just text'"),
    ],
)
def test_what_is_no_manifest_is_told_in_one_line(text: str | bytes, said: str) -> None:
    found = problems(text)
    assert len(found) == 1
    assert said in found[0]
    assert "\n" not in found[0]


def test_aliases_that_multiply_are_stopped() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    for level in range(1, 9):
        bomb += f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n"
    assert "too large or too deep" in problems(bomb)[0]


def test_other_kinds_are_skipped_and_near_misses_are_not() -> None:
    secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n"
    assert parse(f"{GOOD}---\n{secret}").skipped == ("f.yaml:7: v1 Secret",)
    assert "holds no InferenceService" in problems(secret)[0]
    assert "Did you mean pagefleet.dev/v1alpha1?" in problems(GOOD.replace("v1alpha1", "v1alpha2"))[0]
    assert problems(GOOD.replace("pagefleet.dev/v1alpha1", "serving.kserve.io/v1beta1"))[0].startswith(
        "f.yaml:1: apiVersion"
    )


def test_a_date_is_text_as_in_json() -> None:
    text = GOOD.replace("{name: qwen}", "{name: qwen, labels: {since: 2026-01-01}}")
    assert parse(text).services[0].metadata.labels == {"since": "2026-01-01"}


def test_two_of_one_name_are_refused() -> None:
    assert problems(f"{GOOD}---\n{GOOD}") == [
        "metadata.name: 2 InferenceServices are called qwen; give each a name of its own "
        "(namespaces do not separate them on this machine)"
    ]


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(GOOD.replace("qwen", "second"))
    (tmp_path / "a.yml").write_text(GOOD.replace("qwen", "first"))
    (tmp_path / "README.md").write_text("no: [yaml")
    manifest = parse_manifest(read_sources(tmp_path))
    assert [service.name for service in manifest.services] == ["first", "second"]


def test_mistakes_of_all_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: [")
    (tmp_path / "b.yaml").write_text(GOOD + "  replicas: -1\n")
    with pytest.raises(ManifestError) as caught:
        parse_manifest(read_sources(tmp_path))
    first, second = caught.value.problems
    assert first.startswith(f"{tmp_path}/a.yaml:1:")
    assert second.startswith(f"{tmp_path}/b.yaml:6: spec.replicas: must be at least 0")


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    with pytest.raises(ManifestError, match="there is no such file or folder"):
        read_sources(missing)
    with pytest.raises(ManifestError, match=r"the folder has no \.yaml file"):
        read_sources(tmp_path)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ManifestError, match="is larger than 1 MiB"):
        read_sources(large)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_told(tmp_path: Path) -> None:
    locked = tmp_path / "locked.yaml"
    locked.touch(mode=0o000)
    with pytest.raises(ManifestError, match="cannot be read: Permission denied"):
        read_sources(locked)


@pytest.mark.parametrize("folder", ["01-quickstart", "02-two-replicas"])
def test_examples_are_valid(folder: str) -> None:
    assert parse_manifest(read_sources(EXAMPLES / folder)).services


@given(st.text() | st.binary())
def test_any_text_is_read_or_refused(text: Any) -> None:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        found: tuple[object, ...] = parse(data).services
    except ManifestError as error:
        found = error.problems
    assert found


PROFILE = """\
apiVersion: pagefleet.dev/v1alpha1
kind: InferenceProfile
metadata: {name: h100}
spec:
  gpuType: h100
"""


def test_profiles_stand_beside_services() -> None:
    manifest = parse(f"{PROFILE}---\n{GOOD}")
    assert [profile.name for profile in manifest.profiles] == ["h100"]
    assert [service.name for service in manifest.services] == ["qwen"]


def test_mistakes_in_profiles_are_told_alike() -> None:
    assert problems(f"{GOOD}---\n{PROFILE}  gpuTyp: x\n")[0].startswith(
        "f.yaml:12: spec.gpuTyp: unknown field. Did you"
    )
    assert problems(f"{GOOD}---\n{PROFILE}---\n{PROFILE}") == [
        "metadata.name: 2 InferenceProfiles are called h100; give each a name of its own"
    ]
    assert "holds no InferenceService" in problems(PROFILE)[0]


def test_rules_of_several_fields_are_told_with_their_line() -> None:
    (told,) = problems(GOOD + "  expose:\n    type: Ingress\n")
    assert told.startswith("f.yaml:6: spec.expose: does not suit its type: ")
