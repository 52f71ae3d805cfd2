#!/usr/bin/env bash
# Everything that only a GPU can tell, in two calls of under nine minutes: GPU tests, then the figures to reach.
# Needs python3 with torch, triton, transformers and pytest, and no registry: packages that python3 lacks are taken from
# the wheels in $WHEELS (bench/wheels.py collects them). Writes JSON to $OUT if that is set, and what Triton compiled,
# which $TRITON_CACHE brings along to another machine.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$PWD$(printf ":$PWD/%s" $(dirname -- */pyproject.toml))${PYTHONPATH:+:$PYTHONPATH}:$site"
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$HOME/.triton/cache}
export TRITON_STORE_BINARY_ONLY=1  # the cache is to be brought back: no intermediate code
mkdir -p "$TRITON_CACHE_DIR"
[ -z "${TRITON_CACHE:-}" ] || tar -xf "$TRITON_CACHE" -C "$TRITON_CACHE_DIR"
if [ -n "${WHEELS:-}" ]; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
fi
# Nothing of ours is installed here, and connectors are found by what an installed distribution says of itself.
"$PYTHON" - "$site/pagefleet_kv-0.dist-info" <<'EOS'
import pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path("kv/pyproject.toml").read_text())["project"]
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
groups = project["entry-points"].items()
text = "".join(f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in one.items()) for group, one in groups)
(folder / "entry_points.txt").write_text(text)
EOS
status=0
"$PYTHON" bench/gpu_check.py "$@" || status=$?
[ -z "${OUT:-}" ] || XZ_OPT="-T0 -3" tar -cJf "$OUT/triton-cache.tar.xz" -C "$TRITON_CACHE_DIR" . || true
exit $status
