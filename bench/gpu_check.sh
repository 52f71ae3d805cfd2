#!/usr/bin/env bash
# Everything that only a GPU can tell, in one command and under nine minutes: GPU tests, then the figures to reach.
# Needs python3 with torch, triton and transformers, and no registry: packages that python3 lacks are taken from the
# wheels in $WHEELS (bench/README.md says how to collect them). Writes JSON to $OUT if that is set.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD:$PWD/protocol:$PWD/kernels:$PWD/text:$PWD/engine${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH="$PYTHONPATH:$site"
fi
"$PYTHON" bench/gpu_check.py "$@"
