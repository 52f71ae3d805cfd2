"""Write the chart's dashboards and alerts: `python -m charts.monitoring`, which is `make monitoring`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from charts.monitoring.alerts import rules
from charts.monitoring.dashboards import DASHBOARDS
from charts.monitoring.grafana import document

FOLDER = Path(__file__).parents[1] / "pagefleet" / "files" / "monitoring"


def files() -> Mapping[str, str]:
    """Return the text of every file, by name."""
    boards = {f"{one.name}.json": _one_panel_a_line(document(one)) for one in DASHBOARDS}
    return {**boards, "alerts.yaml": yaml.safe_dump(rules(), sort_keys=False, width=1000)}


def _one_panel_a_line(dashboard: Mapping[str, Any]) -> str:
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in dashboard.items() if name != "panels"]
    panels = ",\n".join(map(json.dumps, dashboard["panels"]))
    return "{\n" + ",\n".join([*fields, f'"panels": [\n{panels}\n]']) + "\n}\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text)
