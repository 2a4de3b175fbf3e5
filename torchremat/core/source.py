"""Lines of the user's code, and names of the user's functions, for reports and messages.

`current_source` and `source_of_error` find the line on a stack. `first_line_where` runs a function
line by line to find it. `name_of` is the name by which the user knows a function.
"""

import functools
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from torchremat.errors import make_printable

__all__ = ["Source"]


def __dir__() -> list[str]:
    return sorted(__all__)


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_COMMAND = os.path.join(_PACKAGE, "cli") + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
# Wrappers of Python's own that stand between the user's line and ours.
_WRAPPERS = tuple(_STDLIB + name for name in ("contextlib.py", "functools.py", "warnings.py"))
# `<eval_with_key>` is code that torch.fx generates, `<torchremat` that of graph/codegen.py.
_SKIPPED = (_PACKAGE, _TORCH, *_WRAPPERS, "<frozen", "<string>", "<eval_with_key>", "<torchremat")
# Where PyTorch computes in Python; its other files look after operators.
_COMPUTING = tuple(_TORCH + name for name in ("nn", "functional", "_tensor.py", "distributions"))
_CALLING = os.path.join(_TORCH, "nn", "modules", "module.py")


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's program.

    >>> print(Source("/home/ann/model.py", 31, "block"))
    model.py:31 (block)
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return make_printable(f"{os.path.basename(self.file)}:{self.line} ({self.function})")


def is_user_file(file: str) -> bool:
    """Whether code of the file is neither PyTorch's nor this library's."""
    return not file.startswith(_SKIPPED)


def is_library_file(file: str) -> bool:
    """Whether code of the file is PyTorch's, or this library's."""
    return file.startswith((_PACKAGE, _TORCH))


@functools.lru_cache(maxsize=4096)
def is_computing(file: str) -> bool:
    """Whether code of the file may choose operators: the user's, and some of PyTorch's."""
    return is_user_file(file) or (file.startswith(_COMPUTING) and file != _CALLING)


def current_source() -> Source | None:
    """The innermost line of the user's on the stack; none is below the command `torchremat`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            return Source(code.co_filename, frame.f_lineno, code.co_name)
        if code.co_filename.startswith(_COMMAND):
            return None
        frame = frame.f_back
    return None


def source_of_error(error: BaseException) -> Source | None:
    """The innermost line of the user's in the traceback of an error, if there is one."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if is_user_file(file):
            found = Source(file, line, frame.f_code.co_name)
        elif file.startswith(_COMMAND):
            found = None  # what called the command
    return found


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line of the user's on the stack."""
    level = 1
    frame: FrameType | None = sys._getframe(0)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)


def is_user_written(file: str) -> bool:
    """Whether the file is the user's or of a package, and not of Python's own library."""
    return is_user_file(file) and (not file.startswith(_STDLIB) or "site-packages" in file)


def first_line_where(changed: Callable[[], bool], run: Callable[[], Any]) -> Source | None:
    """Find the first line of the user's, of those that `run` runs, after which `changed()` is true.

    An error that `run` raises ends the search. It is slow, and used for messages of errors only.

    >>> values = []
    >>> def fill():
    ...     x = 1
    ...     values.append(x)
    >>> first_line_where(lambda: bool(values), fill).function
    'fill'
    """
    last: Source | None = None
    found: Source | None = None

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last, found
        if found is None and changed():
            found = last
        code = frame.f_code
        if found is not None or not is_user_written(code.co_filename):
            return None
        if event != "return":
            last = Source(code.co_filename, frame.f_lineno, code.co_name)
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        run()
    except Exception as error:
        assert error is not None  # the search needs only the lines before it
    finally:
        sys.settrace(before)
    return found or (last if changed() else None)


def unwrap_function(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind partials, checkpoints and other wrappers that say what they wrap."""
    while True:
        if isinstance(fun, functools.partial):
            fun = fun.func
        elif not isinstance(fun, nn.Module) and hasattr(fun, "__wrapped__"):
            fun = fun.__wrapped__
        else:
            return fun


def name_of(fun: Callable[..., Any]) -> str:
    """The name of a function in messages.

    >>> name_of(functools.partial(name_of))
    'name_of'
    """
    fun = unwrap_function(fun)
    attribute = "__name__" if inspect.isbuiltin(fun) else "__qualname__"
    return getattr(fun, attribute, None) or type(fun).__name__


def place_of(fun: Callable[..., Any]) -> str:
    """`fun` in messages: where it is defined, or else its name.

    >>> place_of(len)
    'len'
    """
    code = getattr(unwrap_function(fun), "__code__", None)
    if code is None:
        return name_of(fun)
    return f"at {Source(code.co_filename, code.co_firstlineno, code.co_name)}"
