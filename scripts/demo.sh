#!/usr/bin/env bash
# Trains a small GPT under several remat policies and compares them; sets itself up first.
#   scripts/demo.sh --help     what can be changed
set -eu
cd "$(dirname "$0")/.."
. scripts/_venv.sh
setup_venv examples
exec .venv/bin/python examples/15_train_gpt.py "$@"
