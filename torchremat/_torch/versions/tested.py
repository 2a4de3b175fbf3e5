"""The versions of PyTorch that the package was tested with; `docs/reference/versions.md`."""

import re
import warnings

import torch

from torchremat.errors import PyTorchVersionWarning

OLDEST = "2.11"
NEWEST = "2.15"


def _numbers(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def is_newer(version: str | None = None) -> bool:
    """Whether `version`, else the installed PyTorch, is newer than those that were tested.

    >>> is_newer("2.15.3+cpu"), is_newer("2.16.0a0+git1234")
    (False, True)
    """
    return _numbers(version or torch.__version__) > _numbers(NEWEST)


def warn_of_newer() -> None:
    """Warn once, at import, if the installed PyTorch is newer than those that were tested."""
    if is_newer():
        warnings.warn(
            f"PyTorch {torch.__version__} is newer than those that torchremat was tested with, "
            f"{OLDEST} to {NEWEST}. `torchremat env --check` tries what works. Take a newer "
            "torchremat if there is one.",
            PyTorchVersionWarning,
            stacklevel=3,
        )
