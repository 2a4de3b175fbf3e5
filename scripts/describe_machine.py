#!/usr/bin/env python
"""Print the date, device and versions that a page of measurements names.

python scripts/describe_machine.py
"""

import datetime
import importlib.metadata
import platform

import torch


def main() -> None:
    """Print one sentence."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
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
