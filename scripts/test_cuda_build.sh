#!/usr/bin/env bash
# Compares the kernels that plans take for a GPU with those that PyTorch's build for CUDA chooses on
# fake tensors. No GPU is needed, but that build is: 5 GB in .venv-cuda, made once.
#   scripts/test_cuda_build.sh [-k dropout ...]
# pip's settings hold; PIP_INDEX_URL may name an index with builds for CUDA.
set -eu
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=1
python=.venv-cuda/bin/python
if [ ! -e .venv-cuda/.ready ]; then
    "${PYTHON:-python3}" -m venv --clear .venv-cuda
    # === takes no build with a local version, such as one for the CPU
    "$python" -m pip install -qq torch===2.13.0
    "$python" -m pip install -qq -e ".[test]"
    : >.venv-cuda/.ready
fi
exec "$python" -m pytest -p no:cacheprovider -m cuda_build tests/planning/test_choices_of_cuda.py "$@"
