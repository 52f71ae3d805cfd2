"""What the documents say about the chart: values that exist, YAML that is taken, rights that are granted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from pagefleet_protocol.resource_documents import parse_inference_profile, parse_inference_service

from tests.fakes.helm_chart import CHART, ROOT, find, render
from tests.fakes.pod_security import violations

DOCUMENTS = [ROOT / "docs" / "kubernetes.md", ROOT / "SECURITY.md", ROOT / "README.md"]
DOCUMENTS += sorted((ROOT / "examples").glob("*/README.md"))
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
NAMED = re.compile(rf"(?:`|--set )((?:{'|'.join(VALUES)})(?:\.[A-Za-z*]+)+)")
KUBERNETES = (ROOT / "docs" / "kubernetes.md").read_text()


def holds(values: Any, path: list[str]) -> bool:
    if not path:
        return True
    if not isinstance(values, dict):
        return False
    branches = list(values.values()) if path[0] == "*" else [values.get(path[0])]
    return any(branch is not None and holds(branch, path[1:]) for branch in branches)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_values_that_exist(document: Path) -> None:
    unknown = [name for name in NAMED.findall(document.read_text()) if not holds(VALUES, name.split("."))]
    assert unknown == []


def test_the_search_for_values_finds_some() -> None:
    named = set(NAMED.findall(KUBERNETES))
    assert {"images.registry", "watch.namespaces", "policy.hfEndpoint", "crds.install"} <= named


def test_pieces_of_yaml_are_taken() -> None:
    for block in re.findall(r"```yaml\n(.*?)```", KUBERNETES, re.DOTALL):
        document = yaml.safe_load(block)
        if document.get("kind") == "InferenceService":
            assert parse_inference_service(document).name == document["metadata"]["name"]
            continue
        if document.get("kind") == "InferenceProfile":
            assert parse_inference_profile(document).name == document["metadata"]["name"]
            continue
        if "kind" in document:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
            assert violations(document) == [], "the document asks for a namespace that enforces `restricted`"
            continue
        spec = {"model": {"uri": "builtin://tiny"}, **document["spec"]}
        service = {"apiVersion": "pagefleet.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": "a"}}
        assert parse_inference_service({**service, "spec": spec}).name == "a"


def test_the_table_of_rights_is_that_of_the_role() -> None:
    table = KUBERNETES.partition("| resource | verbs |")[2].partition("\n\n")[0]
    words = set(re.findall(r"[a-z/]+", table))
    for rule in find(render(), "Role", "models-pagefleet-operator")["rules"]:
        assert set(rule["resources"]) | set(rule["verbs"]) <= words


def test_every_link_within_the_document_has_its_heading() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in KUBERNETES.splitlines()
        if line.startswith("## ")
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", KUBERNETES)) <= headings
