#!/usr/bin/env python
"""Print the date, device and versions that a page of measurements names.

python scripts/describe_machine.py
"""

import datetime
import importlib.metadata
import platform
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerator import describe_device, find_device


def main() -> None:
    """Print one sentence."""
    device = describe_device(find_device())
    versions = [f"PyTorch {torch.__version__}", f"Python {platform.python_version()}"]
    for name in ("triton", "transformers"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    day = datetime.datetime.now(tz=datetime.UTC).date()
    print(f"{day}: {device}; {', '.join(versions)}; {platform.system()} {platform.machine()}.")


if __name__ == "__main__":
    main()
