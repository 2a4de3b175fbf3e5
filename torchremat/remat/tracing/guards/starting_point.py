"""Modules and variables that a function starts from, noted before it is traced."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from torchremat.remat.tracing.guards.entries import Binding
from torchremat.remat.tracing.guards.variable_guard import VariableGuard
from torchremat.remat.tracing.guards.variables import (
    roots_of,
    variables_of_arguments,
    variables_of_modules,
)
from torchremat.tracing.modules.module_paths import ModulePaths, below


class StartingPoint:
    """The modules and variables that a function starts from, before it is traced."""

    def __init__(
        self,
        fun: Callable[..., Any],
        variables: Sequence[Binding],
        prefix: str,
        static: Sequence[Any],
    ) -> None:
        """`static` are arguments that are no tensors, some of which are compared by identity."""
        self.variables = variables
        self.roots = roots_of(fun, variables)
        given = [value for value in static if isinstance(value, nn.Module)]
        roots = [*(root for _, root in self.roots), *given]
        self.inside = list(dict.fromkeys(m for root in roots for m in root.modules()))
        read = variables_of_modules(self.inside, fun)
        read += variables_of_arguments(static, fun, variables, self.inside)
        self.unchanged = VariableGuard([*variables, *read])
        self._prefix = prefix

    def name_modules(self, paths: ModulePaths) -> list[tuple[str, nn.Module]]:
        """The modules there, and those that ran in a trace, by qualified name."""
        modules = dict.fromkeys([*self.inside, *paths.seen])
        return [(below(self._prefix, paths.name_of(m)), m) for m in modules]
