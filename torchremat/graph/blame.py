"""Which line of the user's does something that can only be seen afterwards."""

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torchremat.graph.sources import Source, is_user_file

_STDLIB_FOLDER = os.path.dirname(os.__file__) + os.sep


def _is_users(file: str) -> bool:
    """Whether `file` is neither torch's, nor this package's, nor Python's own."""
    return is_user_file(file) and (not file.startswith(_STDLIB_FOLDER) or "site-packages" in file)


def line_that_makes(changed: Callable[[], bool], run: Callable[[], Any]) -> Source | None:
    """Run `run` line by line; the first line of the user's after which `changed()` is true.

    An error that `run` raises ends the search. Slow: for telling of an error.

    >>> values = []
    >>> def fill():
    ...     x = 1
    ...     values.append(x)
    >>> line_that_makes(lambda: bool(values), fill).function
    'fill'
    """
    last: Source | None = None
    found: Source | None = None

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last, found
        if found is None and changed():
            found = last
        code = frame.f_code
        if found is not None or not _is_users(code.co_filename):
            return None
        if event != "return":
            last = Source(code.co_filename, frame.f_lineno, code.co_name)
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        run()
    except Exception as error:
        assert error is not None  # what is asked is only how far it came
    finally:
        sys.settrace(before)
    return found or (last if changed() else None)
