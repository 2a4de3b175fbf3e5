#!/usr/bin/env bash
# Tests what depends on a device on the device of tests/second_device, which is compiled for it: its
# memory is the host's, and it does everything as late as it may.
#   scripts/test_second_device.sh [-k offload ...]
set -eu
cd "$(dirname "$0")/.."
. scripts/_venv.sh
setup_venv test
export OMP_NUM_THREADS=1 TORCHREMAT_SECOND_DEVICE=1
exec .venv/bin/python -m pytest -p no:cacheprovider tests/second_device "$@"
