"""Targets: the function or model that a command is about, from `package.module:name` or a file.

`name` is one of:

- a function without arguments that returns `(fun_or_module, args)` or `(…, args, kwargs)`;
- a module, a class of modules or a function, with its arguments from an `example_inputs()` beside
  it: a method of the module, or a function of the same file.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import nn

from torchremat import _torch
from torchremat.cli.arguments.user_modules import find_name, split_target
from torchremat.cli.terminal.exit_codes import UserCodeError


@dataclass(frozen=True)
class Target:
    """A function or a module that a command looks at, and arguments for one call."""

    text: str
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_target(text: str, device: str | None = None) -> Target:
    """The target that `text` names, made on `device` if one is given.

    What the user's code prints goes to standard error. Raises `click.UsageError` if there is no
    such module, file or name, and `click.ClickException` if what it is cannot be used, or its code
    raises.

    >>> load_target("torch.nn:Tanh")
    Traceback (most recent call last):
    click.exceptions.ClickException: torch.nn:Tanh is a module, and there is nothing to call it ...
    """
    where, name = split_target(text)
    with contextlib.redirect_stdout(sys.stderr), _use_device(device):
        module, found = find_name(where, name)
        fun, arguments = _call_maker(text, found)
        if arguments is None:
            arguments = _read_examples(text, fun, vars(module).get("example_inputs"))
        args, kwargs = _split(arguments)
        return _move(Target(text, fun, args, kwargs), device)


def _call_maker(text: str, found: Any) -> tuple[Callable[..., Any], Any]:
    if isinstance(found, nn.Module):
        return found, None
    if not callable(found):
        raise click.ClickException(
            f"{text} is {found!r} ({type(found).__name__}), and not a function or module. Give a "
            "function without arguments that returns (fun_or_module, args)"
        )
    needed = _num_required(found)
    if isinstance(found, type) and needed:
        raise click.ClickException(
            f"{text} is a class that needs arguments to be made. Give a function without arguments "
            "that returns (module, args):\n"
            f"    def make():\n        return {found.__name__}(...), (x,)"
        )
    if needed:
        return found, None
    with _name_user_errors(f"{text}()"):
        result = found()
    match result:
        case (fun, args) if isinstance(result, tuple) and callable(fun):
            return fun, _as_tuple(args)
        case (fun, args, dict() as kwargs) if isinstance(result, tuple) and callable(fun):
            return fun, (_as_tuple(args), kwargs)
    if callable(result):
        return result, None
    raise click.ClickException(
        f"{text}() returned {_describe_target(result)}. It must return (fun_or_module, args), "
        "where args is a tuple, or (fun_or_module, args, kwargs)"
    )


def _num_required(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of C has none
        return 1
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(p.default is p.empty and p.kind not in variadic for p in parameters)


def _read_examples(text: str, fun: Any, beside: Any) -> Any:
    examples = getattr(fun, "example_inputs", beside)
    if not callable(examples):
        kind = "module" if isinstance(fun, nn.Module) else "function"
        raise click.ClickException(
            f"{text} is a {kind}, and there is nothing to call it with. Give a function without "
            "arguments that returns (fun_or_module, args), or write example_inputs() beside it, "
            "which returns a tuple of arguments"
        )
    with _name_user_errors(f"example_inputs() of {text}"):
        return _as_tuple(examples())


def _as_tuple(arguments: Any) -> Any:
    return arguments if isinstance(arguments, tuple | list) else (arguments,)


def _split(arguments: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = arguments, {}
    if len(args) == 2 and isinstance(args[0], tuple | list) and isinstance(args[1], dict):
        args, kwargs = args
    return tuple(args), dict(kwargs)


def _describe_target(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(entry).__name__ for entry in value) or 'nothing'}"
    return f"a value of type {type(value).__name__}"


def _use_device(device: str | None) -> contextlib.AbstractContextManager[Any]:
    if device is None:
        return contextlib.nullcontext()
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise click.BadParameter(str(error).partition("\n")[0], param_hint="'--device'") from None


def _move(target: Target, device: str | None) -> Target:
    """Move tensors that are elsewhere all the same, made with `device=` or as a file was loaded."""
    if device is None:
        return target
    fun = target.fun
    with _name_user_errors(f"moving {target.text} to {device}"):
        if isinstance(fun, nn.Module):
            fun = fun.to(device)
        args, kwargs = _torch.tree_map(
            lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf,
            (target.args, target.kwargs),
        )
    return Target(target.text, fun, args, kwargs)


@contextlib.contextmanager
def _name_user_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UserCodeError(doing, error) from error
