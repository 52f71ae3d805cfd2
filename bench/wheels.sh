#!/usr/bin/env bash
# Collects, for bench/gpu_check.sh, the wheels that a machine with torch, triton and transformers may lack.
# Usage: bench/wheels.sh FOLDER [PYTHON_VERSION]; versions are those of constraints.txt.
set -euo pipefail
folder=${1:?give a folder}
version=${2:-3.12}
platforms=()
for name in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${name}_x86_64")
done
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
    --python-version "$version" "${platforms[@]}" -c "$(dirname "$0")/../constraints.txt" -d "$folder" \
    annotated-types fastapi httptools isal msgspec prometheus-client psutil pydantic pydantic-core pyzmq starlette \
    typing-inspection uvicorn uvloop
ls "$folder"
