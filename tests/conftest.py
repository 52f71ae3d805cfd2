"""What must be settled before any test module is imported."""

import os
from importlib.util import find_spec
from pathlib import Path

# Triton reads this when it is first imported, by whichever test comes first. A GPU runs the compiled kernels instead.
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidia0").exists() else "1")

if find_spec("hypothesis"):  # a machine with a GPU may lack it: bench/gpu_check.sh needs none of its tests
    from hypothesis import HealthCheck, settings

    # A busy machine makes examples slow, and that says nothing about the code.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
