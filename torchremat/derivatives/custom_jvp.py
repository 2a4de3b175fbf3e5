"""`custom_jvp`: a function with a rule of its own for forward mode, and so for reverse mode."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.avals import Aval
from torchremat.core.source import place_of
from torchremat.derivatives.custom_function import CustomFunction, FlatCall
from torchremat.derivatives.linear_parts import Tensors
from torchremat.derivatives.rule_arguments import (
    aval_of_value,
    describe_tree,
    flatten_up_to,
    name_of,
)
from torchremat.derivatives.rule_dispatch import CustomJvpCall, uncompiled
from torchremat.derivatives.rules import Cotangents, JvpRule, Pushed
from torchremat.derivatives.symbolic_zeros import SymbolicZero, zero_of
from torchremat.errors import MissingRuleError, RuleTypeError


class custom_jvp(CustomFunction):  # noqa: N801 (JAX's name, used as a decorator)
    """A function whose derivative is given by a rule for tangents.

        out, out_tangent = jvp(primals, tangents)       linear in the tangents

    Reverse mode is the transpose of the rule, which runs once, in the forward pass, and saves what
    its linear part needs. Where nothing is differentiated `fun` runs. The rule is differentiated
    itself for derivatives of higher order, mapped under `vmap`, and runs inside a checkpoint, whose
    policy sees the operators in it. In a graph a call is one `function_p`, whose rule survives.

    Under plain autograd the arguments are saved too: a derivative of the backward pass runs the
    rule a second time.

    Args:
        fun: a function of trees of tensors and Python values. It is called with positional
            arguments; keywords and defaults are resolved by its signature.
        nondiff_argnums: positions of arguments that are any Python values (functions, say), which
            the rule takes first.
        nondiff_argnames: names of more such arguments.

    Raises:
        ValueError: if `nondiff_argnames` names no parameter that can be given by position.
        AttributeError: if it is called before a rule is defined.
        TypeError: by a call, if the rule gives no pair, or trees or tensors that do not match.
        ClosureError: (a `RuntimeError`) if a tensor that `fun` closes over has a gradient.

    After `jax.custom_jvp`.

    >>> import torch, torchremat as tr
    >>> @custom_jvp
    ... def log1pexp(x):
    ...     return torch.log1p(torch.exp(x))
    >>> @log1pexp.defjvp
    ... def rule(primals, tangents):
    ...     (x,), (dx,) = primals, tangents
    ...     return log1pexp(x), torch.sigmoid(x) * dx
    >>> x = torch.tensor(100.0, requires_grad=True)
    >>> log1pexp(x).backward()
    >>> x.grad
    tensor(1.)
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        nondiff_argnums: int | Sequence[int] = (),
        nondiff_argnames: str | Iterable[str] = (),
    ) -> None:
        super().__init__(fun, nondiff_argnums, nondiff_argnames)
        self._jvp: Callable[..., Any] | None = None
        self._symbolic_zeros = False

    def defjvp(self, jvp: Callable[..., Any], symbolic_zeros: bool = False) -> Callable[..., Any]:
        """Set the rule; also as a decorator.

        Args:
            jvp: takes arguments that are not differentiated, a tuple of the others, and one of
                their tangents, in the same structure. Tangents are zeros where there are none,
                `None` for integers. It gives a pair of the result and its tangents, in one
                structure.
            symbolic_zeros: give the rule a `SymbolicZero` for each tangent that is zero.

        Returns:
            `jvp`.
        """
        self._jvp = jvp
        self._symbolic_zeros = symbolic_zeros
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Set a rule for each argument: `jvps[i](tangent, result, *primals)`, or `None` for zero.

        >>> import torch, torchremat as tr
        >>> multiply = custom_jvp(lambda x, y: x * y)
        >>> multiply.defjvps(lambda t, ans, x, y: t * y, lambda t, ans, x, y: x * t)
        >>> torch.func.grad(multiply, argnums=(0, 1))(torch.tensor(2.0), torch.tensor(3.0))
        (tensor(3.), tensor(2.))
        """
        if self.nondiff_argnums:
            raise RuleTypeError("Can't use ``defjvps`` with ``nondiff_argnums``.")

        def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
            result = self(*primals)
            if len(jvps) != len(primals):
                raise RuleTypeError(
                    f"defjvps was given {len(jvps)} rule(s) for {name_of(self.fun)}, which is "
                    f"called with {len(primals)} argument(s): give one for each, None for zero"
                )
            found = [
                rule(tangent, result, *primals)
                for rule, tangent in zip(jvps, tangents, strict=True)
                if rule is not None
            ]
            return result, _sum_of_trees(result, found)

        self.defjvp(jvp)

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._jvp is None:
            raise MissingRuleError(
                f"No JVP defined for custom_jvp function {name_of(self.fun)} using defjvp."
            )
        arguments = self._signature.resolve(args, kwargs)
        call = _JvpCall(self.fun, arguments, self._jvp, self._symbolic_zeros)
        return call.apply(CustomJvpCall, JvpRule(name_of(self.fun), call.primal, call.jvp))


@dataclass(eq=False)
class _JvpCall(FlatCall):
    rule: Callable[..., Any]
    symbolic_zeros: bool

    def jvp(self, primals: Tensors, tangents: Cotangents) -> Pushed:
        """Return outputs and their tangents, `None` for zero."""
        others = self.arguments.others(primals)
        leaves, spec = _torch.tree_flatten(others)
        given = iter(tangents)
        found = []
        for leaf in leaves:
            tangent = next(given) if isinstance(leaf, Tensor) else None
            if tangent is None:
                tangent = zero_of(aval_of_value(leaf), symbolic=self.symbolic_zeros)
            found.append(tangent)
        pair = self.rule(*self.arguments.nondiff, others, _torch.tree_unflatten(found, spec))
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RuleTypeError(
                f"{self._subject} must produce a pair (list or tuple of length two) representing "
                f"primal and tangent outputs, but got {describe_tree(pair)}"
            )
        result, tangent_tree = pair
        outputs = self.flatten_result(result)
        try:
            out_tangents = flatten_up_to(tangent_tree, result)
        except ValueError:
            raise RuleTypeError(
                f"{self._subject} must produce primal and tangent outputs with equal container "
                f"(pytree) structures, but got {describe_tree(result)} and "
                f"{describe_tree(tangent_tree)} respectively. The rule is {place_of(self.rule)}; "
                "None stands for tangents that are zero."
            ) from None
        pairs = zip(_torch.tree_flatten(result)[0], out_tangents, strict=True)
        return outputs, [
            self._check_tangent(value, tangent)
            for value, tangent in pairs
            if isinstance(value, Tensor)
        ]

    @property
    def _subject(self) -> str:
        return f"Custom JVP rule {name_of(self.rule)} for function {name_of(self.fun)}"

    def _check_tangent(self, value: Tensor, tangent: Any) -> Tensor | None:
        if tangent is None or isinstance(tangent, SymbolicZero):
            return None
        if not (value.is_floating_point() or value.is_complex()):
            return None
        if isinstance(tangent, int | float | complex) and not value.dim():
            return torch.full_like(value, tangent)
        given = Aval.of(tangent) if isinstance(tangent, Tensor) else None
        wanted = Aval.of(value)
        if given is None or (given.shape, given.dtype) != (wanted.shape, wanted.dtype):
            raise RuleTypeError(
                f"{self._subject} must produce primal and tangent outputs with corresponding "
                f"shapes and dtypes. Expected {wanted} (tangent type of {wanted}) but got "
                f"{aval_of_value(tangent)}."
            )
        return tangent  # type: ignore[no-any-return]


def _sum_of_trees(like: Any, trees: Sequence[Any]) -> Any:
    """The sum of trees of tangents; `None` where all are zero."""
    leaves, spec = _torch.tree_flatten(like)
    columns = [flatten_up_to(tree, like) for tree in trees]
    sums: list[Any] = [None] * len(leaves)
    for column in columns:
        for i, tangent in enumerate(column):
            if tangent is not None:
                sums[i] = tangent if sums[i] is None else sums[i] + tangent
    return _torch.tree_unflatten(sums, spec)
