"""Writing pictures to files."""

import os
from collections.abc import Sequence

from torchremat.errors import ArgumentValueError

PathLike = str | os.PathLike[str]


def suffix_of(path: PathLike, known: Sequence[str], what: str) -> str:
    """The suffix of `path`, in lower case. Raises `ValueError` if it is none of `known`.

    >>> suffix_of("step.SVG", (".svg", ".png"), "a timeline")
    '.svg'
    >>> suffix_of("step.pdf", (".svg", ".png"), "a timeline")
    Traceback (most recent call last):
    torchremat.errors.ArgumentValueError: a timeline cannot be written to 'step.pdf': ...
    """
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in known:
        raise ArgumentValueError(
            f"{what} cannot be written to {os.fspath(path)!r}: its suffix must be one of "
            f"{', '.join(known)}"
        )
    return suffix


def write_text(path: PathLike, text: str, what: str) -> None:
    """Write `text`. Raises `OSError`, of the class that fits, if the path cannot be written."""
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise cannot_write(path, error, what) from error


def cannot_write(path: PathLike, error: OSError, what: str) -> OSError:
    why = error.strerror or str(error)
    return type(error)(
        error.errno,
        f"{what} cannot be written ({why}): give a path in a folder that exists and is yours",
        os.fspath(path),
    )
