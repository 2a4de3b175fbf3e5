"""Where a function can leave a tensor: the mutable objects that it reaches, each with a path.

    def forward(self, x):           module  __dict__ 'aux'
        self.aux = x.mean()         function  __closure__ 0  cell_contents
        losses.append(self.aux)     function  __globals__ 'losses'

A path is followed anew at each call, since the object at its end may be another.
"""

import functools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import Generator, Tensor, nn

from torchremat import _torch
from torchremat.core.open_objects import is_opened
from torchremat.core.slots import Slots, slots_of
from torchremat.core.small_arrays import contents_of
from torchremat.core.source import is_user_file
from torchremat.remat.escapes.holders import ABSENT, read_holder
from torchremat.remat.escapes.names_in_code import globals_read_by, globals_set_by, names_in


class StandIn:
    """Stands for a hook while a function is traced; paths lead through it to the hook."""

    hook: Any


class WeakKey:
    """A key of a dict, or a value, that is referred to weakly if it is a module or a function."""

    __slots__ = ("_get",)

    def __init__(self, value: Any) -> None:
        self._get: Callable[[], Any]
        if isinstance(value, nn.Module | FunctionType):
            self._get = weakref.ref(value)
        else:
            self._get = lambda: value

    @property
    def value(self) -> Any:
        return self._get()


@dataclass(frozen=True, eq=False)
class Path:
    """A way from a root to an object: attributes, items, and the value of a context variable.

    An attribute is "open" where the object is opened as part of the tree of arguments; of "slots"
    the key says whether it is.

    The root is a module, which is referred to weakly, or `"function"` or `"arguments"`.
    """

    root: Any
    steps: tuple[tuple[str, Any], ...] = ()

    def step(self, kind: str, key: Any = None) -> "Path":
        key = WeakKey(key) if kind == "item" and not isinstance(key, int | str) else key
        return Path(self.root, (*self.steps, (kind, key)))

    def find(self, roots: "Roots") -> Any:
        """The object that is there now. Raises `LookupError` if there is none."""
        value = roots.find(self.root)
        try:
            for kind, key in self.steps:
                if kind in ("attribute", "open"):
                    value = getattr(value, key)
                elif kind == "slots":
                    value = Slots(value)
                elif kind == "item":
                    value = value[key.value if isinstance(key, WeakKey) else key]
                else:
                    value = value.get()
                value = value.hook if isinstance(value, StandIn) else value
        except (AttributeError, TypeError, ValueError) as error:  # an empty cell is a ValueError
            raise LookupError(str(error)) from error
        return value

    def follow_later(self, get_function: Callable[[], Any]) -> Callable[[], Any]:
        """A function that returns what is here then, or `ABSENT`."""

        def follow() -> Any:
            try:
                return self.find(Roots(get_function(), ()))
            except LookupError:
                return ABSENT

        return follow

    @property
    def is_in_arguments(self) -> bool:
        """Whether it is a container in the tree of arguments, all of which is in a trace's key."""
        steps = (kind in ("item", "open") or (kind == "slots" and key) for kind, key in self.steps)
        return self.root == "arguments" and all(steps)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal ways, in this process."""
        root = self.root if isinstance(self.root, str) else id(self.root())
        steps = ((kind, key.value if isinstance(key, WeakKey) else key) for kind, key in self.steps)
        return (root, *((k, id(v) if isinstance(v, nn.Module) else v) for k, v in steps))

    def __str__(self) -> str:
        words = []
        for i, (kind, key) in enumerate(self.steps):
            if kind == "item" and self.steps[i - 1][1] != "__closure__":
                shown = key.value if isinstance(key, WeakKey) else key
                words.append(shown if isinstance(shown, str) else f"[{shown!r}]")
        return ".".join(words).replace(".[", "[")


@dataclass(frozen=True)
class Roots:
    """Where paths begin in one call: the function, and its arguments by position and by name."""

    function: Any
    arguments: Any

    def find(self, root: Any) -> Any:
        if isinstance(root, str):
            return self.function if root == "function" else self.arguments
        module = root()
        if module is None:
            raise LookupError("a module is gone")
        return module


@dataclass(eq=False)
class Holder:
    """A mutable object with a copy of its content: slots by key, or items in order."""

    place: Path
    target: Any
    names: frozenset[str] | None = None
    before: Any = field(init=False)

    def __post_init__(self) -> None:
        self.is_sequence = isinstance(self.target, list | deque | set)
        self.before = self.read()

    @property
    def is_of_module(self) -> bool:
        """Whether it is the `__dict__` of a module, of which other guards know."""
        return not isinstance(self.place.root, str) and len(self.place.steps) == 1

    @property
    def is_noted_by_modules(self) -> bool:
        """Whether `ModuleState` compares it: the attributes of a module, or a container there."""
        steps = self.place.steps
        is_near = len(steps) == 1 or (len(steps) == 2 and type(self.target) in _CONTAINERS)
        return is_near and not isinstance(self.place.root, str)

    @property
    def is_container(self) -> bool:
        """Whether it is a dict in its own right, not the attributes or globals of something."""
        is_dict = isinstance(self.target, dict) and self.names is None
        return is_dict and not (self.place.steps and self.place.steps[-1][1] == "__dict__")

    def read(self) -> Any:
        return read_holder(self.target, self.names)


# --- the walk ------------------------------------------------------------------------------------

ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)
# Each trace copies what it can reach. Chosen by hand: larger containers are data.
_MOST_ITEMS = 4096
# Chosen by hand: 20 ms of walking. A tensor that lies beyond is found by its references.
_MOST_OBJECTS = 20_000
# Chosen by hand: an attribute is two steps, and objects in objects in lists have eight.
_MOST_STEPS = 14
# Chosen by hand: a function, a helper that it calls, and one that this calls.
_MOST_CALLS = 3
_CONTAINERS = (list, dict, set, deque)
_OF_MODULES = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules", "training"}
_NOT_WALKED = (sys.stdlib_module_names | {"torch", "torchremat"}) - {"__main__"}
_STDLIB = os.path.dirname(os.__file__) + os.sep
_CACHED = type(functools.lru_cache(lambda: None))


class Reach:
    """The mutable objects that a function can reach through `roots` and `modules`.

    Functions are followed through their closures and the globals that they name, a few calls deep.
    """

    def __init__(
        self, roots: Roots, modules: Sequence[nn.Module], *, through_modules: bool = True
    ) -> None:
        self._through_modules = through_modules
        self.holders: list[Holder] = []
        self.caches: list[Any] = []
        """Functions under `functools.lru_cache`."""
        self.known: dict[int, Path] = {}
        self.modules: list[nn.Module] = []
        self.generators: set[int] = set()
        self.arrays: list[tuple[Any, bytes, Path]] = []
        """Small arrays of NumPy and Python, with their contents."""
        self._alive: list[Any] = []
        self._queue: deque[tuple[Any, Path, int, frozenset[str]]] = deque()
        for module in modules:
            self._add(module, Path(weakref.ref(module)), 0)
        self._add(roots.function, Path("function"), 0)
        self._add(roots.arguments, Path("arguments"), 0)
        while self._queue and len(self._alive) < _MOST_OBJECTS:
            self._expand(*self._queue.popleft())

    @property
    def containers(self) -> list[Any]:
        """The containers here that refer to the objects that were found."""
        return [self._alive, *(holder.before for holder in self.holders)]

    def _add(
        self, value: Any, place: Path, calls: int, names: frozenset[str] = frozenset()
    ) -> None:
        value = value.hook if isinstance(value, StandIn) else value
        if type(value) is weakref.CallableProxyType and isinstance(value, nn.Module):
            value = value.modules.__self__  # the module itself
        if isinstance(value, ATOMS) or id(value) in self.known:
            return
        if len(place.steps) <= _MOST_STEPS:
            self.known[id(value)] = place
            self._alive.append(value)
            self._queue.append((value, place, calls, names))

    def _hold(self, target: Any, place: Path, names: frozenset[str] | None = None) -> Any:
        holder = Holder(place, target, names)
        self.holders.append(holder)
        return holder.before

    def _expand(self, value: Any, place: Path, calls: int, names: frozenset[str]) -> None:
        kind = type(value)
        if isinstance(value, nn.Module):
            self._expand_module(value, place, calls)
        elif isinstance(value, Tensor):
            attributes = place.step("attribute", "__dict__")
            for name, item in self._hold(value.__dict__, attributes).items():
                self._add(item, attributes.step("item", name), calls)
        elif isinstance(value, dict | list | deque | set | tuple):
            self._expand_container(value, place, calls)
        elif kind is FunctionType:
            self._expand_function(value, place, calls)
        elif kind is MethodType:
            self._add(value.__self__, place.step("attribute", "__self__"), calls)
            self._add(value.__func__, place.step("attribute", "__func__"), calls)
        elif isinstance(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self._add(getattr(value, name), place.step("attribute", name), calls)
        elif kind is ContextVar:
            for item in self._hold(value, place).values():
                self._add(item, place.step("get"), calls)
        elif isinstance(value, ModuleType):
            self._expand_python_module(value, place, calls, names)
        else:
            self._expand_object(value, place, calls)

    def _expand_container(self, value: Any, place: Path, calls: int) -> None:
        if len(value) > _MOST_ITEMS:
            return
        if not isinstance(value, tuple):
            self._hold(value, place)
        if isinstance(value, set):
            return
        pairs = list(value.items()) if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            self._add(item, place.step("item", key), calls)

    def _expand_module(self, value: nn.Module, place: Path, calls: int) -> None:
        place = Path(weakref.ref(value))  # the shortest way
        self.modules.append(value)
        attributes = place.step("attribute", "__dict__")
        held = self._hold(vars(value), attributes)
        for name, item in held.items():
            if not self._through_modules and type(item) not in _CONTAINERS:
                continue
            if name not in _OF_MODULES or item:  # hooks, of which most modules have none
                self._add(item, attributes.step("item", name), calls)
        if self._through_modules:
            self._expand_classes(value, place, calls)

    def _expand_classes(self, value: Any, place: Path, calls: int) -> None:
        order = place.step("attribute", "__class__").step("attribute", "__mro__")
        for i, kind in enumerate(type(value).__mro__):
            if _is_walked(kind):
                self._add(kind, order.step("item", i), calls)

    def _expand_class(self, value: type, place: Path, calls: int, of_object: bool) -> None:
        if not _is_walked(value) or value.__flags__ & 1 << 8:  # an immutable type
            return
        attributes = place.step("attribute", "__dict__")
        for name, item in self._hold(value, place).items():
            method = getattr(item, "__func__", getattr(item, "fget", item))
            if name.startswith("__") and name != "__call__":
                continue
            if isinstance(item, staticmethod | classmethod):
                self._add(
                    method, attributes.step("item", name).step("attribute", "__func__"), calls
                )
            elif isinstance(item, property):
                self._add(method, attributes.step("item", name).step("attribute", "fget"), calls)
            elif of_object or not isinstance(item, FunctionType):
                self._add(item, attributes.step("item", name), calls)

    def _expand_function(self, value: FunctionType, place: Path, calls: int) -> None:
        if value.__closure__:
            cells = place.step("attribute", "__closure__")
            for i, cell in enumerate(value.__closure__):
                at = cells.step("item", i)
                for item in self._hold(cell, at).values():
                    self._add(item, at.step("attribute", "cell_contents"), calls)
        for name in ("__defaults__", "__kwdefaults__"):
            self._add(getattr(value, name), place.step("attribute", name), calls)
        self._add(vars(value), place.step("attribute", "__dict__"), calls)
        file = value.__code__.co_filename
        if calls >= _MOST_CALLS or not _may_keep(file):
            return
        names = frozenset(names_in(value.__code__))
        own = frozenset(globals_read_by(value.__code__) | globals_set_by(value.__code__))
        around = place.step("attribute", "__globals__")
        for name, item in self._hold(value.__globals__, around, own).items():
            self._add(item, around.step("item", name), calls + 1, names)

    def _expand_python_module(
        self, value: ModuleType, place: Path, calls: int, names: frozenset[str]
    ) -> None:
        file = getattr(value, "__file__", None)
        if file is None or not _may_keep(file):
            return
        attributes = place.step("attribute", "__dict__")
        for name, item in self._hold(vars(value), attributes, names).items():
            self._add(item, attributes.step("item", name), calls, names)

    def _expand_object(self, value: Any, place: Path, calls: int) -> None:
        if isinstance(value, type):
            self._expand_class(value, place, calls, place.steps[-1][0] == "item")
            return
        contents = contents_of(value)
        if contents is not None:
            self.arrays.append((value, contents, place))
        if isinstance(value, Generator):
            self.generators.add(_torch.generator_id(value))
        if isinstance(value, _CACHED):
            self.caches.append(value)
        if type(value) is BuiltinFunctionType and type(value.__self__) in _CONTAINERS:
            self._add(value.__self__, place.step("attribute", "__self__"), calls)  # seen.append
        if not _is_walked(type(value)):
            wrapped = getattr(value, "__wrapped__", None)  # a checkpoint, or the forward of `wrap`
            self._add(wrapped, place.step("attribute", "__wrapped__"), calls)
            return
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            is_open = place.is_in_arguments and is_opened(value)
            self._add(attributes, place.step("open" if is_open else "attribute", "__dict__"), calls)
        if slots_of(type(value)):
            at = place.step("slots", place.is_in_arguments and is_opened(value))
            for name, item in self._hold(Slots(value), at).items():
                self._add(item, at.step("item", name), calls)
        self._expand_classes(value, place, calls)


def _is_walked(kind: type) -> bool:
    if kind in (SimpleNamespace, threading.local):
        return True
    package = kind.__module__.partition(".")[0]
    return package not in _NOT_WALKED


@functools.cache
def _may_keep(file: str) -> bool:
    """Whether code of `file` may keep tensors in its globals: not Python's, not torch's."""
    if file.startswith(_STDLIB) and "site-packages" not in file:
        return False
    return is_user_file(file) or file == "<string>"
