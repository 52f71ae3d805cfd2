"""Writes the golden files anew: `python -m tests.operator.render.regenerate`. Read what changed before a commit."""

from __future__ import annotations

from tests.operator.render.service_table import GOLDEN, TABLE, golden


def main() -> None:
    """Write one file for each InferenceService of the table, and remove those of no one."""
    for path in GOLDEN.glob("*.yaml"):
        if path.stem not in TABLE:
            path.unlink()
    for name in TABLE:
        (GOLDEN / f"{name}.yaml").write_text(golden(name))


if __name__ == "__main__":
    main()
