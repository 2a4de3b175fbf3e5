#!/usr/bin/env bash
# Runs every check of the project; sets itself up first.
#   scripts/test.sh                   style, types, layers, the documentation, then the tests
#   scripts/test.sh tests/nn -k wrap  only pytest, with these arguments
set -eu
cd "$(dirname "$0")/.."
. scripts/_venv.sh
setup_venv "$ALL_EXTRAS"
export OMP_NUM_THREADS=1 # a thread for each of the two workers
export HF_HUB_OFFLINE=1  # models are made from configurations; nothing is downloaded
if [ $# -eq 0 ]; then
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/lint-imports --no-logo
    .venv/bin/mypy &
    types=$!
    bash scripts/docs.sh
    wait $types
fi
exec .venv/bin/python -m pytest -n 2 --dist worksteal "$@"
