"""What must be settled before any test module is imported."""

import os
from pathlib import Path

# Triton reads this when it is first imported, by whichever test comes first. A GPU runs the compiled kernels instead.
os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidia0").exists() else "1")
