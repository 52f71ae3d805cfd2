"""Our chart as Helm itself renders it, as plain objects. No test in here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "pagefleet"
RELEASE, NAMESPACE = "pagefleet", "models"

Object = dict[str, Any]
Values = Mapping[str, Any]


def manifests(
    values: Values | None = None, *, name: str = RELEASE, namespace: str = NAMESPACE, is_upgrade: bool = False
) -> dict[str, str]:
    """Return what each template becomes, by the template's path within the chart."""
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(
            dict(values or {}), name=name, namespace=namespace, is_install=not is_upgrade, is_upgrade=is_upgrade
        )
    return {path.partition("/templates/")[2]: text for path, text in texts.items()}


def render(
    values: Values | None = None, *, name: str = RELEASE, namespace: str = NAMESPACE, is_upgrade: bool = False
) -> list[Object]:
    """Return every object of a release, hooks included."""
    texts = manifests(values, name=name, namespace=namespace, is_upgrade=is_upgrade)
    texts.pop("NOTES.txt")
    parsed = (yaml.load_all(text, Loader=yaml.CSafeLoader) for text in texts.values())
    return [document for documents in parsed for document in documents if document]


def find(objects: Sequence[Object], kind: str, name: str = "") -> Object:
    """Return the one object of that kind, and of that name where one is given."""
    (found,) = [one for one in objects if one["kind"] == kind and name in ("", one["metadata"]["name"])]
    return found


def operator_container(objects: Sequence[Object]) -> Object:
    """Return the only container of the operator's pods."""
    (container,) = find(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def pod_templates(objects: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """Yield a name and {metadata, spec} of everything that is, or makes, a pod."""
    for one in objects:
        name = f"{one['kind']}/{one['metadata']['name']}"
        if one["kind"] == "Pod":
            yield name, one
        elif one["kind"] in ("DaemonSet", "Deployment", "Job", "StatefulSet"):
            yield name, one["spec"]["template"]
