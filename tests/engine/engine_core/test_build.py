"""What a start on a CPU does not pay for."""

from __future__ import annotations

import subprocess
import sys

SLOW_TO_IMPORT = ("torch._dynamo", "torch._inductor", "sympy", "triton", "transformers")


def test_building_a_core_imports_nothing_that_only_some_settings_need() -> None:
    code = (
        "import sys, pagefleet_engine.engine_core.build; "
        f"print(*[name for name in {SLOW_TO_IMPORT!r} if name in sys.modules])"
    )
    environment = {"PATH": "", "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
