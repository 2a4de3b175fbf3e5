#!/usr/bin/env bash
# Builds the documentation into docs/_build/html, without the network; warnings are errors.
# Sets itself up first. Extra arguments go to sphinx-build (-E builds all pages anew).
set -eu
cd "$(dirname "$0")/.."
. scripts/_venv.sh
setup_venv "$ALL_EXTRAS"
export OMP_NUM_THREADS=1
.venv/bin/python -m sphinx -q -b html -W --keep-going -n -d docs/_build/doctrees "$@" docs docs/_build/html
echo "docs/_build/html/index.html"
