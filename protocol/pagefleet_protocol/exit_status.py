"""How our programs tell whoever started them why they ended; the last line on stderr says it in words.

0 is a clean end, and 1 whatever has no number of its own.
"""

from __future__ import annotations

MISTAKE = 2
"""A flag or a setting cannot work: starting it again does not help."""
MODEL_NOT_LOADED = 3
"""Of engines: the settings are right, and the model is missing, damaged, unknown or too large."""
