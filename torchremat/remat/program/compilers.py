"""The compilers of a program's graphs, by name; without one they run operator by operator."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import fx

from torchremat import _torch
from torchremat.core.upper_rooms import load_rooms
from torchremat.graph.codegen import Runner


class Compiler(Protocol):
    """Makes a function of a graph. It is part of the key that traces are found by."""

    @property
    def takes_symbols(self) -> bool:
        """Whether sizes may be symbols in the graph."""

    @property
    def fuses(self) -> bool:
        """Whether it makes one kernel of pointwise work and what reads it."""

    def __call__(self, module: fx.GraphModule) -> Runner:
        """The function that runs the graph of `module`."""

    def __hash__(self) -> int: ...


_compilers: dict[str, Compiler] = {}


def register_compiler(name: str, compiler: Compiler) -> None:
    """Register a compiler, whose own file is above this room."""
    _compilers[name] = compiler


def compiler_named(name: str | None) -> Compiler | None:
    """The compiler of that name; none for `"eager"`, which is how programs run anyway."""
    if name is None or name == "eager":
        return None
    load_rooms("compilers")
    return _compilers[name]


def compiler_of(fun: Callable[..., Any]) -> Compiler | None:
    return compiler_named("inductor") if _torch.is_compiled_by_inductor(fun) else None
