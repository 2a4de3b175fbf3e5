"""Variables that a function reads: in its closure, its globals, and the objects these lead to."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MethodType
from typing import Any

from torch import nn

from torchremat.core.slots import identity_of
from torchremat.remat.tracing.guards.entries import (
    MISSING,
    MOST_VARIABLES,
    OF_EVERY_MODULE,
    Binding,
    entries_of,
    is_plain,
    is_user_written,
    read_by,
)
from torchremat.remat.tracing.guards.named_code import NamedCode, functions_in

# Chosen by hand: an object, the configuration in it, and a list in that (self.config.layers[0]).
_DEPTH = 3


def variables_of(fun: Callable[..., Any]) -> list[Binding]:
    """The variables that `fun` reads from its closure, its module and the object it belongs to.

    Looked into are functions that it calls, containers and objects among them, a few levels deep;
    deeper down, what some code names that may run.
    """
    seen: set[int] = {id(fun)}
    owner = getattr(fun, "__self__", None)
    level = list(read_by(fun))
    if owner is not None and not isinstance(owner, nn.Module):
        level += entries_of(Binding("", [owner], 0))
    found = _follow(level, seen)
    code = NamedCode(functions_in(fun))
    held = code.find_held(found)
    return _distinct([*found, *held, *code.find_plain()])


def _distinct(variables: Iterable[Binding]) -> list[Binding]:
    return list({(identity_of(v.holder), v.key): v for v in variables}.values())


def _follow(level: list[Binding], seen: set[int]) -> list[Binding]:
    found: list[Binding] = []
    for _ in range(_DEPTH):
        found += level
        inner = [v for v in level if id(v.get()) not in seen]
        seen.update(id(v.get()) for v in inner)
        level = []
        for variable in inner:
            if len(found) + len(level) < MOST_VARIABLES:
                level += entries_of(variable)
    return found + level


def variables_of_arguments(
    arguments: Sequence[Any],
    fun: Callable[..., Any],
    variables: Iterable[Binding],
    modules: Sequence[nn.Module],
) -> list[Binding]:
    """The variables in static arguments, which are compared by identity, that code may read.

    The code is that of `fun`, and what its `variables` and the attributes of `modules` have.
    """
    own = [Binding(f"static argument {i}", arguments, i) for i in range(len(arguments))]
    own = [v for v in own if not is_plain(v.get())]
    if not own:
        return []
    code = NamedCode(functions_in(fun), modules)
    for value in [*(v.get() for v in variables), *(x for m in modules for x in vars(m).values())]:
        code.note(value)
    return _distinct([*code.find_held(own), *code.find_plain()])


def variables_of_modules(modules: Iterable[nn.Module], fun: Callable[..., Any]) -> list[Binding]:
    """The variables that `fun` or a `forward` of `modules` may read, or what these name.

    Those are globals, class attributes, configurations. Of classes and objects those entries count
    that some code names which may run. A module's own plain attributes are left to `ModuleGuard`.
    """
    modules = list(modules)
    own = [Binding(n, vars(m), n) for m in modules for n in {*vars(m)} - OF_EVERY_MODULE]
    own = [v for v in own if not _is_of_forward(v)]
    code = NamedCode(functions_in(fun), modules)
    held = code.find_held(own)
    classes = {c: None for m in modules for c in type(m).__mro__ if is_user_written(c)}
    methods = {id(f) for c in classes for f in vars(c).values()}
    level = [v for f in code.functions if id(f) in methods for v in read_by(f)]
    names = code.names
    level += [Binding(f"{c.__name__}.{n}", vars(c), n) for c in classes for n in names & {*vars(c)}]
    found = _follow(level, {id(m) for m in modules})
    found += [v for v in own if not is_plain(v.get())] + held + code.find_plain()
    return _distinct(found)


def _is_of_forward(variable: Binding) -> bool:
    """Whether it is the own `forward` of a module, or a method of that, such as `extra_repr`."""
    forward = variable.holder.get("forward", MISSING)
    value = variable.get()
    return value is forward or (isinstance(value, MethodType) and value.__self__ is forward)


def modules_in(variables: Iterable[Binding]) -> Iterator[tuple[str, nn.Module]]:
    """The modules among `variables`, each with its name."""
    for variable in variables:
        value = variable.get()
        if isinstance(value, nn.Module):
            yield variable.label.removeprefix("closed-over "), value


def roots_of(fun: Any, variables: Iterable[Binding]) -> list[tuple[str, nn.Module]]:
    """The modules that `fun` starts from, by name: itself or its object, then its variables."""
    owner = getattr(fun, "__self__", fun)
    own = [("", owner)] if isinstance(owner, nn.Module) else []
    return own + list(modules_in(variables))
