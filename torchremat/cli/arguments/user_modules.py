"""The user's Python modules, found by name or as files, and the names in them."""

import importlib
import importlib.util
import os
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from torchremat.cli.terminal.exit_codes import UserCodeError
from torchremat.errors import nearest_names


def split_target(text: str) -> tuple[str, str]:
    """The module or file, and the name in it; the name is empty if there is none.

    >>> split_target("pkg.models:make"), split_target("a/model.py:Net.make")
    (('pkg.models', 'make'), ('a/model.py', 'Net.make'))
    >>> split_target("model.py")
    ('model.py', '')
    """
    where, _, name = text.rpartition(":")
    if not where or name.endswith(".py") or os.sep in name:
        where, name = text.removesuffix(":"), ""
    return where, name


def find_name(where: str, name: str) -> tuple[ModuleType, Any]:
    """The module that `where` names, and what is called `name` in it.

    Raises `click.UsageError` with the nearest names if there is no such module, file or name, and
    `UserCodeError` if loading it raises.

    >>> module, function = find_name("math", "sin")
    >>> module.__name__, function(0.0)
    ('math', 0.0)
    """
    module = _load_file(where) if _is_path(where) else _import_module(where)
    found: Any = module
    for part in name.split(".") if name else ():
        known = vars(found)
        if not hasattr(found, part):
            raise click.UsageError(
                f"{where} has no {name!r}; {nearest_names(part, _list_usable(found) or known)}"
            )
        found = getattr(found, part)
    if not name:
        raise click.UsageError(
            f"{where} alone does not say what in it is meant: write {where}:NAME; "
            f"{nearest_names('', _list_usable(module))}"
        )
    return module, found


def _is_path(where: str) -> bool:
    return where.endswith(".py") or os.sep in where


def _list_usable(owner: Any) -> list[str]:
    """The names of the functions and classes that are written there, not imported to there."""
    home = getattr(owner, "__name__", None)
    return [
        name
        for name, value in vars(owner).items()
        if not name.startswith("_") and callable(value) and _home(value) in (home, None)
    ]


def _home(value: Any) -> str | None:
    return getattr(value, "__module__", None)


def _load_file(where: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        folder = path.parent
        near = [str(file) for file in folder.glob("*.py")] if folder.is_dir() else []
        what = "is a folder" if path.is_dir() else "no such file"
        raise click.UsageError(f"{where}: {what}; {nearest_names(where, near)}")
    path = path.resolve()
    name = path.stem if path.stem not in sys.modules else f"_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise click.UsageError(f"{where} is not a Python file: its name is to end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    _let_import_from(path.parent)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserCodeError(f"loading {where}", error) from error
    return module


def _import_module(where: str) -> ModuleType:
    _let_import_from(Path.cwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing and f"{where}.".startswith(f"{missing}."):  # not one that it imports itself
            raise click.UsageError(
                f"there is no module {missing!r} here or installed; "
                f"{nearest_names(missing, _siblings(missing))}. A file is given as path/to/file.py"
            ) from None
        raise UserCodeError(f"importing {where}", error) from error
    except (ValueError, TypeError):  # an empty or relative name
        raise click.UsageError(
            f"{where!r} is neither a module's name nor a file: write package.module:name or "
            "path/to/file.py:name"
        ) from None
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"importing {where}", error) from error


def _let_import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _siblings(missing: str) -> list[str]:
    package, _, _ = missing.rpartition(".")
    if not package:
        return [entry.name for entry in pkgutil.iter_modules([str(Path.cwd())])]
    prefix = f"{package}."
    folders = getattr(sys.modules.get(package), "__path__", [])
    return [prefix + entry.name for entry in pkgutil.iter_modules(folders)]
