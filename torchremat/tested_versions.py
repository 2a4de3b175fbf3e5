"""The versions of PyTorch that the package was tested with; `docs/reference/versions.md`.

It imports no PyTorch, so that `import torchremat` can look at the one that is imported already.
"""

import functools
import re
import sys
import warnings

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
    return _numbers(version or _version()) > _numbers(NEWEST)


def _version() -> str:
    return str(sys.modules["torch"].__version__)


def warn_of_newer() -> None:
    """Warn if the PyTorch that is imported is newer than those that were tested."""
    if is_newer():
        warnings.warn(
            f"PyTorch {_version()} is newer than those that torchremat was tested with, "
            f"{OLDEST} to {NEWEST}. `torchremat env --check` tries what works. Take a newer "
            "torchremat if there is one.",
            PyTorchVersionWarning,
            stacklevel=4,
        )


@functools.cache
def warn_once_of_newer() -> None:
    """Warn as `warn_of_newer`, at the first call only."""
    warn_of_newer()
