#!/usr/bin/env bash
# Everything that only a GPU can tell, in one command and under nine minutes: GPU tests, then the figures to reach.
# Needs python3 with torch, triton and transformers, and no registry: packages that python3 lacks are taken from the
# wheels in $WHEELS (bench/README.md says how to collect them). Writes JSON to $OUT if that is set.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$PWD:$PWD/protocol:$PWD/kernels:$PWD/text:$PWD/kv:$PWD/engine${PYTHONPATH:+:$PYTHONPATH}:$site"
if [ -n "${WHEELS:-}" ]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
fi
# Nothing of ours is installed here, and connectors are found by what an installed distribution says of itself.
"$PYTHON" - "$site/pagefleet_kv-0.1.0.dist-info" <<'EOS'
import pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path("kv/pyproject.toml").read_text())["project"]
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
groups = project["entry-points"].items()
text = "".join(f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in one.items()) for group, one in groups)
(folder / "entry_points.txt").write_text(text)
EOS
"$PYTHON" bench/gpu_check.py "$@"
