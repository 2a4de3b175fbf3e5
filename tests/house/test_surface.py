"""A public module shows what its `__all__` names, each documented under one import path."""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from tests.house.source import Violation, read_entries, read_package, refuse

# whose libraries need not be installed
OPTIONAL = {"torchremat.integrations.transformers", "torchremat.integrations.lightning"}


def public_modules(entries: Iterable[str]) -> dict[str, ModuleType]:
    """The modules of documented names, and the packages that have an `__all__`."""
    files = {source.module: source for source in read_package()}
    names = {name for name in files if any(entry.rpartition(".")[0] == name for entry in entries)}
    names |= {
        name
        for name, source in files.items()
        if source.name == "__init__.py" and "\n__all__" in source.text
    }
    found = {}
    for name in sorted(names):
        try:
            found[name] = import_module(name)
        except ModuleNotFoundError:
            if name not in OPTIONAL:
                raise
    return found


def find_shown(module: Any) -> Iterator[str]:
    """How `dir(module)` differs from its `__all__`."""
    names = getattr(module, "__all__", None)
    if names is None:
        yield "is public and has no __all__"
    elif dir(module) != sorted(names):
        beyond = sorted(set(dir(module)) - set(names) - {n for n in dir(module) if n[:2] == "__"})
        yield f"dir() is not __all__; it also has {', '.join(beyond) or 'dunder names'}"


def find_unpicklable(module: Any) -> Iterator[str]:
    """Classes of `__all__` that pickle would not find."""
    for name in getattr(module, "__all__", ()):
        cls = getattr(module, name)
        if inspect.isclass(cls):
            found: Any = sys.modules.get(cls.__module__)
            for part in cls.__qualname__.split("."):
                found = getattr(found, part, None)
            if found is not cls:
                yield f"{name} is not at {cls.__module__}.{cls.__qualname__}, where pickle looks"


def find_undocumented(module: Any) -> Iterator[str]:
    """Functions and classes of `__all__`, and public members of the classes, without docstring."""
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            members = vars(value).items() if inspect.isclass(value) else ()
            named = [(name, value), *((f"{name}.{n}", m) for n, m in members if n[0] != "_")]
            for full, member in named:
                if _needs_docstring(member) and not inspect.getdoc(member):
                    yield f"{full} has no docstring"


def _needs_docstring(member: Any) -> bool:
    kinds = (type, FunctionType, property, cached_property, classmethod, staticmethod)
    return isinstance(member, kinds)


def find_entries(entries: Iterable[str], modules: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Module and fault of what is documented twice, elsewhere than in `__all__`, or not at all."""
    documented: dict[int, str] = {}
    for entry in entries:
        module, _, name = entry.rpartition(".")
        if module not in modules:
            continue
        if name not in getattr(modules[module], "__all__", [name]):
            yield module, f"{entry} is documented, and not in __all__"
        value = getattr(modules[module], name, None)
        other = documented.setdefault(id(value), entry)
        if _has_identity(value) and other.rpartition(".")[0] != module:
            yield module, f"{entry} is documented as {other} too"
    for module, value in modules.items():
        for name in getattr(value, "__all__", ()):
            found = getattr(value, name)
            if _has_identity(found) and id(found) not in documented:
                yield module, f"{module}.{name} is documented nowhere"


def _has_identity(value: Any) -> bool:
    return not isinstance(value, bool | int | float | str | ModuleType | None)


def violations() -> Iterator[Violation]:
    entries = read_entries()
    modules = public_modules(entries)
    paths = {source.module: source.path for source in read_package()}
    for name, module in modules.items():
        for fault in [
            *find_shown(module),
            *find_unpicklable(module),
            *find_undocumented(module),
        ]:
            yield Violation(paths[name], 1, fault)
    for name, fault in find_entries(entries, modules):
        yield Violation(paths[name], 1, fault)


def test_public_modules_show_what_they_name():
    refuse(violations())


class Planted:
    """A class that pickle finds."""


def _module(**names: Any) -> Any:
    module = ModuleType("planted")
    vars(module).update(names)
    return module


def test_surplus_names_are_found():
    module = _module(__all__=["f"], f=1, g=Path)
    assert list(find_shown(module)) == ["dir() is not __all__; it also has g"]
    module.__dir__ = lambda: ["f"]
    assert list(find_shown(module)) == []
    assert list(find_shown(_module())) == ["is public and has no __all__"]


def test_unpicklable_classes_are_found():
    class Local:
        pass

    found = list(
        find_unpicklable(_module(__all__=["Planted", "Local"], Planted=Planted, Local=Local))
    )
    assert [text.split()[0] for text in found] == ["Local"]


def test_undocumented_members_are_found():
    class Part:
        """Documented."""

        @property
        def size(self): ...

        def _private(self): ...

    module = _module(__all__=["Part", "f", "x"], Part=Part, f=lambda: 1, x=3)
    assert list(find_undocumented(module)) == [
        "Part.size has no docstring",
        "f has no docstring",
    ]


def test_names_of_two_paths_are_found():
    first = _module(__all__=["Planted", "f"], Planted=Planted, f=lambda: 1)
    second = _module(__all__=[], Planted=Planted)
    found = find_entries(["a.Planted", "b.Planted"], {"a": first, "b": second})
    assert list(found) == [
        ("b", "b.Planted is documented, and not in __all__"),
        ("b", "b.Planted is documented as a.Planted too"),
        ("a", "a.f is documented nowhere"),
    ]
