"""Private parts of PyTorch that this version lacks: importing goes on, and a use names the part."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any, NoReturn

import torch

from torchremat.errors import PyTorchVersionError

from .tested import NEWEST

_ROOM = str(Path(__file__).parents[1])
_IMPORTERS = ("importlib", "pkgutil")


def _describe(part: str) -> str:
    return (
        f"torchremat needs {part}, which PyTorch {torch.__version__} does not have; the newest "
        f"version that torchremat was tested with is {NEWEST}. Take a newer torchremat, or "
        f"`pip install 'torch<={NEWEST}.99'`. `torchremat env --check` says what works without it."
    )


class MissingPart:
    """Stands where a private part of PyTorch would be. Every use raises `PyTorchVersionError`."""

    def __init__(self, part: str) -> None:
        self._part = part

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise PyTorchVersionError(_describe(self._part))

    __call__ = __enter__ = __exit__ = __getitem__ = __iter__ = __instancecheck__ = _refuse
    __subclasscheck__ = __contains__ = __bool__ = __add__ = __radd__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for these of anything
            raise AttributeError(name)
        self._refuse()

    def __or__(self, _: object) -> "MissingPart":  # an annotation, `ShapeEnv | None`
        return self

    __ror__ = __or__


class _MissingModule(ModuleType):
    __path__ = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingPart(f"{self.__name__}.{name}")


def supply_missing(package: str, files: Iterable[str]) -> list[str]:
    """Import `files` of `package`, where a name of PyTorch is missing with a `MissingPart` there.

    PyTorch itself is left as it was. Returns what is missing.
    """
    undo: list[Callable[[], object]] = []
    missing: list[str] = []
    try:
        for file in files:
            while True:
                try:
                    importlib.import_module(f"{package}.{file}")
                except (ImportError, AttributeError) as error:
                    part = _supply(error, undo)
                    if part is None or part in missing:
                        raise
                    missing.append(part)
                else:
                    break
    finally:
        for take_away in reversed(undo):
            take_away()
    return missing


def _supply(error: ImportError | AttributeError, undo: list[Callable[[], object]]) -> str | None:
    """Put a `MissingPart` where `error` says that something of PyTorch is missing."""
    if isinstance(error, ModuleNotFoundError):
        name = error.name or ""
        if not name.startswith("torch."):
            return None
        sys.modules[name] = _MissingModule(name)
        undo.append(lambda: sys.modules.pop(name, None))
        parent, _, last = name.rpartition(".")
        _put(sys.modules[parent], last, sys.modules[name], undo)
        return name
    owner, name = _missing_name(error)
    if owner is None or not _is_of_torch(owner):
        return None
    part = f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"
    if not isinstance(owner, ModuleType):
        part = f"{owner.__module__}.{part}"
    _put(owner, name, MissingPart(part), undo)
    return part


def _put(owner: Any, name: str, value: Any, undo: list[Callable[[], object]]) -> None:
    setattr(owner, name, value)
    undo.append(lambda: delattr(owner, name))


def _missing_name(error: ImportError | AttributeError) -> tuple[Any, str]:
    """The module or class that lacks a name, and the name."""
    if isinstance(error, AttributeError):
        owner = error.obj
        is_owner = isinstance(owner, ModuleType | type)
        return (owner if is_owner or owner is None else type(owner)), error.name or ""
    found = re.match(r"cannot import name '(\w+)'", str(error))  # `name_from` is of Python 3.12
    return sys.modules.get(error.name or ""), found[1] if found else ""


def _is_of_torch(owner: Any) -> bool:
    module = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    return module.partition(".")[0] == "torch"


# --- at use --------------------------------------------------------------------------------------


def guard_functions(names: MutableMapping[str, Any]) -> None:
    """Let functions among `names` name the private part where their own code misses one."""
    for name, value in list(names.items()):
        if isinstance(value, FunctionType) and value.__module__.startswith("torchremat._torch."):
            names[name] = _guard_function(value)


def _guard_function(function: Callable[..., Any]) -> Callable[..., Any]:
    inner = getattr(function, "__wrapped__", None)
    if inspect.isgeneratorfunction(inner):

        @wraps(inner)
        def generate(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with _naming_parts():
                yield from inner(*args, **kwargs)

        return contextmanager(generate)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _naming_parts():
            return function(*args, **kwargs)

    return call


@contextmanager
def _naming_parts() -> Iterator[None]:
    try:
        yield
    except (AttributeError, ImportError) as error:
        owner, name = _missing_name(error)
        if owner is None or not _is_of_torch(owner) or not _was_raised_here(error.__traceback__):
            raise
        part = f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"
        raise PyTorchVersionError(_describe(part)) from error


def _was_raised_here(traceback: TracebackType | None) -> bool:
    """Whether the innermost frame, but for those that import, is of this room."""
    innermost = ""
    while traceback is not None:
        path = traceback.tb_frame.f_code.co_filename
        if path != __file__ and not any(name in path for name in _IMPORTERS):
            innermost = path
        traceback = traceback.tb_next
    return innermost.startswith(_ROOM)
