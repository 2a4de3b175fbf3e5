"""Shared by `custom_jvp` and `custom_vjp`: the decorated function, and one call of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import Tensor

from torchremat.core.trees import Structure
from torchremat.derivatives.linear_parts import Tensors
from torchremat.derivatives.rule_arguments import (
    RuleArguments,
    Signature,
    flatten_tensors,
    name_of,
    unflatten_tensors,
)
from torchremat.derivatives.rule_dispatch import CustomCall
from torchremat.derivatives.rules import FlatRule
from torchremat.tracing.tracing import lift_all


class CustomFunction(ABC):
    """A function with rules of its own; in a class it is a method."""

    def __init__(
        self,
        fun: Callable[..., Any],
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Iterable[str] = (),
    ) -> None:
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            if hasattr(fun, name):
                setattr(self, name, getattr(fun, name))
        self.__wrapped__ = self.fun = fun
        self._signature = Signature(fun, nondiff_argnums, nondiff_argnames)
        self.nondiff_argnums = self._signature.nondiff_argnums

    def __repr__(self) -> str:
        return f"{type(self).__name__}({name_of(self.fun)})"

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)


@dataclass(eq=False)
class FlatCall:
    """One call: the function and its rules as functions of flat tensors.

    The one of them that runs sets `out_structure`.
    """

    fun: Callable[..., Any]
    arguments: RuleArguments
    out_structure: Structure | None = field(default=None, init=False)

    def primal(self, inputs: Tensors) -> list[Tensor]:
        return self.flatten_result(self.fun(*self.arguments.all(inputs)))

    def flatten_result(self, result: Any) -> list[Tensor]:
        self.out_structure, outputs = flatten_tensors(result)
        return list(lift_all(outputs))  # one may be closed over

    def apply(self, call_type: type[CustomCall], rule: FlatRule) -> Any:
        """Run what the innermost transformation needs, and return the result as a tree."""
        outputs = call_type.apply(rule, *self.arguments.tensors)
        assert self.out_structure is not None, "the function has run"
        return unflatten_tensors(self.out_structure, outputs)
