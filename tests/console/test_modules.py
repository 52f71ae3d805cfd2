"""The page's modules that know no page: each file of `modules/` runs in Chromium, and reports its tests one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.chromium import Chromium
from tests.fakes.console_server import ConsoleServer

FOLDER = Path(__file__).with_name("modules")
MODULES = sorted(path.stem for path in FOLDER.glob("*.js") if path.stem != "check")


@pytest.mark.parametrize("module", MODULES)
def test_module(chromium: Chromium, server: ConsoleServer, module: str) -> None:
    server.files = {f"/{path.name}": ("text/javascript", path.read_bytes()) for path in FOLDER.glob("*.js")}
    with chromium.page(f"{server.address}/console/icon.svg") as page:
        failed = page.run(
            f"import('{server.address}/{module}.js').then(async (module) => {{ const failed = []; let count = 0;"
            " for (const [name, test] of Object.entries(module)) { count += 1;"
            " try { await test(); } catch (error) { failed.push(`${name}: ${error.stack}`); } }"
            " return count ? failed : ['no test in here']; })"
        )
    assert failed == []
