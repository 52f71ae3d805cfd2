"""The chart's CustomResourceDefinitions: those of crds/, kept when the release goes."""

from __future__ import annotations

import yaml

from tests.fakes.helm_chart import CHART, ROOT, render

SOURCES = {path.name: path for path in sorted((ROOT / "crds").glob("*.yaml"))}


def test_the_charts_copies_are_the_generated_files() -> None:
    copies = {path.name: path.read_bytes() for path in (CHART / "files" / "crds").iterdir()}
    assert copies == {name: path.read_bytes() for name, path in SOURCES.items()}, "run `make crds`"


def test_they_are_templates_so_that_an_upgrade_upgrades_them() -> None:
    rendered = {one["metadata"]["name"]: one for one in render() if one["kind"] == "CustomResourceDefinition"}
    sources = [yaml.safe_load(path.read_text()) for path in SOURCES.values()]
    assert len(sources) == len(rendered) > 0
    for source in sources:
        annotations = {"helm.sh/resource-policy": "keep"}
        source["metadata"]["annotations"] = source["metadata"].get("annotations", {}) | annotations
        assert rendered[source["metadata"]["name"]] == source
    assert not (CHART / "crds").exists(), "Helm never upgrades what is in that folder"


def test_they_are_left_to_somebody_else_on_request() -> None:
    kinds = {one["kind"] for one in render({"crds": {"install": False}})}
    assert "CustomResourceDefinition" not in kinds
    assert "Deployment" in kinds
