"""The generated CustomResourceDefinition: as committed, structural, and in agreement with the types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pagefleet_operator import crdgen

CRDS = Path(__file__).parents[2] / "crds"


@pytest.fixture(scope="module")
def version() -> dict[str, Any]:
    definition = crdgen.custom_resource_definition()
    (only,) = definition["spec"]["versions"]
    assert isinstance(only, dict)
    return only


def nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    for child in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
        yield from nodes(child)


def test_the_committed_file_is_the_generated_one() -> None:
    committed = (CRDS / crdgen.file_name()).read_text(encoding="utf-8")
    assert committed == crdgen.render(), "run `make crds`"


def test_names_are_those_of_the_map() -> None:
    names = crdgen.custom_resource_definition()["spec"]["names"]
    assert names["kind"] == "InferenceService"
    assert names["plural"] == "inferenceservices"
    assert names["shortNames"] == ["pfis"]
    assert names["categories"] == ["pagefleet"]


def test_every_node_is_structural(version: dict[str, Any]) -> None:
    """Each has a type (or is int-or-string), and none of the keywords that the API server refuses."""
    for node in nodes(version["schema"]["openAPIV3Schema"]):
        assert ("type" in node) != bool(node.get("x-kubernetes-int-or-string"))
        assert not set(node) & {"$ref", "$defs", "definitions", "const", "additionalProperties", "title", "allOf"}
        assert "anyOf" not in node or node["anyOf"] == [{"type": "integer"}, {"type": "string"}]
        if node.get("type") == "array":
            assert "items" in node
            assert node["x-kubernetes-list-type"] in ("atomic", "map", "set")


def test_only_the_model_is_required(version: dict[str, Any]) -> None:
    root = version["schema"]["openAPIV3Schema"]
    assert root["required"] == ["spec"]
    assert root["properties"]["spec"]["required"] == ["model"]
    assert root["properties"]["spec"]["properties"]["model"]["required"] == ["uri"]


def test_defaults_reach_the_fields_of_objects_that_are_left_out(version: dict[str, Any]) -> None:
    """The API server applies a field's default only inside an object that exists, so objects default to {}."""
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert spec["router"]["default"] == {}
    assert spec["router"]["properties"]["policy"]["default"] == "prefix"
    assert spec["replicas"]["default"] == 1
    assert "default" not in spec["engine"]["properties"]["maxModelLen"]


def test_status_is_a_subresource_and_columns_point_into_the_schema(version: dict[str, Any]) -> None:
    assert version["subresources"] == {"status": {}}
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    for column in version["additionalPrinterColumns"]:
        first, second, *_ = column["jsonPath"].removeprefix(".").replace("[", ".").split(".")
        if first != "metadata":
            assert second in properties[first]["properties"]


def test_writes_into_a_folder(tmp_path: Path) -> None:
    assert crdgen.main([str(tmp_path)]) == 0
    written = yaml.safe_load((tmp_path / crdgen.file_name()).read_text())
    assert written == crdgen.custom_resource_definition()


def test_without_a_folder_tells_the_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crdgen.main([]) == crdgen.main([str(tmp_path / "missing")]) == 2
    assert "usage: python -m pagefleet_operator.crdgen FOLDER" in capsys.readouterr().err
