#!/usr/bin/env python
"""Sweep over PyTorch's samples of its operators under checkpoint; print what is not equal to plain.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/sweep_ops.py              all: some 15 minutes
    OMP_NUM_THREADS=1 .venv/bin/python scripts/sweep_ops.py exp trace    these operators
    .venv/bin/python scripts/sweep_ops.py --write     docs/reference/operators.md, from the tables

The exit status is 1 if the tables of `tests/remat/test_op_db.py` say something else.
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.op_samples import OPS
from tests.remat import test_op_db


def main() -> int:
    """Run the sweep and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="operators; by default all")
    parser.add_argument("--write", action="store_true", help="only write the page")
    options = parser.parse_args()
    if options.write:
        test_op_db.DOCUMENT.parent.mkdir(exist_ok=True)
        test_op_db.DOCUMENT.write_text(test_op_db.as_document())
        return 0
    unknown = [name for name in options.names if name not in OPS]
    if unknown:
        parser.error(f"no operator of PyTorch's samples: {', '.join(unknown)}")
    torch.set_num_threads(1)
    return max([_report(name) for name in track(options.names or list(OPS), "sweeping")])


def _report(name: str) -> int:
    policies = list(test_op_db.POLICIES)
    broken, rounded = test_op_db.sweep(name, test_op_db.NUM_SAMPLES, policies)
    reasons = test_op_db.BROKEN.get(name, {})
    for law, what in broken.items():
        print(f"{name}: {law}: {reasons.get(law, f'NOT IN THE TABLE: {what[:500]}')}")
    causes = test_op_db.CLOSE.get(name, {})
    for value in sorted(rounded):
        print(f"{name}: {value} to rounding: {causes.get(value, 'NOT IN THE TABLE')}")
    for what in (reasons.keys() - broken.keys()) | (causes.keys() - rounded):
        print(f"{name}: {what}: in the table, but it is equal to plain PyTorch")
    return int(broken.keys() != reasons.keys() or rounded != causes.keys())


if __name__ == "__main__":
    sys.exit(main())
