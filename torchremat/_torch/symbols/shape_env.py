"""Sizes that vary: symbols, what traces assume of them, and guards of tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import SymInt
from torch._C._dynamo.guards import TensorGuards as TensorGuards
from torch._guards import SLoc
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, statically_known_true
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv
from torch.utils._sympy.functions import CeilToInt, FloorDiv, Max, Min
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

NAMES_IN_SIZES = dict(SYMPY_INTERP)
"""The names in the expressions of `print_size` and `guards_of`, besides symbols."""


class TracingShapeEnv(ShapeEnv):
    """An environment of symbols for sizes, which notes what a trace assumes of them.

    Equal sizes get symbols of their own: that a batch is as large as a sequence is long is chance.
    """

    def __init__(self) -> None:
        super().__init__(
            allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False
        )

    def _get_stack_summary(
        self, is_debug: bool = False, framework_loc: str | None = None
    ) -> tuple[SLoc, str]:
        """Where something was assumed, which nobody asks: to find out imports much of PyTorch."""
        return SLoc(framework_loc or "a trace", None), ""


def new_shape_env() -> ShapeEnv:
    return TracingShapeEnv()


class AskingShapeEnv(TracingShapeEnv):
    """An environment that answers no question about its symbols by their hints.

    A plain `ShapeEnv` answers a question about a size (`n > 128`, `int(n)`) with the hint, and
    notes a guard. Where a size stands for those of many elements no hint speaks for all of them.
    So `answer` gives the answer to each question, in every trace that has such a size, or raises.
    It takes the expression, and the value that the asking code has for an unknown answer.
    """

    def __init__(
        self, answer: Callable[[Any, Any], Any], prepare: Callable[[Any, Sequence[Any]], None]
    ) -> None:
        """`prepare` is called with each operator and its arguments before its result is found."""
        super().__init__()
        self._answer = answer
        self.prepare = prepare
        self._hints: dict[Any, int] = {}
        self.symbols: list[torch.SymInt] = []

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer a question; each conversion of a size to a number comes here."""
        known = self._maybe_evaluate_static(orig_expr)
        if known is not None:
            return known
        fallback = args[3] if len(args) > 3 else kwargs.get("fallback_value")
        return sympy.sympify(self._answer(orig_expr, fallback))

    def create_unbacked_symint(self, *args: Any, **kwargs: Any) -> Any:
        """Ask what size that is: PyTorch makes such a symbol where it knows none."""
        return self._answer(None, None)

    def new_size(self, hint: int, name: str, *, may_be_negative: bool = False) -> torch.SymInt:
        """A symbol of which nothing is assumed: 0 and 1 are sizes as others are."""
        from torch._dynamo.source import ConstantSource

        source = ConstantSource(name)
        symbol = self.create_symbol(hint, source, DimDynamic.DYNAMIC, positive=None)
        if not may_be_negative:
            self.var_to_range[symbol] = ValueRanges(sympy.Integer(0), int_oo)
        self._hints[symbol] = hint
        size = self.create_symintnode(symbol, hint=hint, source=source)
        assert isinstance(size, torch.SymInt)
        self.symbols.append(size)
        return size

    def answer_from(self, least: int, question: Any) -> Any:
        """The answer that holds for all sizes from `least` on; `None` if there is none."""
        sizes = ValueRanges(sympy.Integer(least), int_oo)
        ranges = tuple((symbol, sizes) for symbol in question.free_symbols)
        return self._maybe_evaluate_static(question, var_to_range=ranges)

    def answer_by_hint(self, question: Any) -> Any:
        return question.xreplace({s: sympy.Integer(self._hints[s]) for s in question.free_symbols})


def is_equation(question: Any) -> bool:
    return isinstance(question, sympy.Eq | sympy.Ne)


def negate_inequation(question: Any) -> Any:
    """The equation that is true where `question`, that two sizes are unequal, is not."""
    return sympy.Eq(*question.args) if isinstance(question, sympy.Ne) else None


def asks_for_zero_or_one(question: Any) -> bool:
    """Whether it is an equation that asks if a size is 0, or is 1."""
    return is_equation(question) and any(a in (0, 1) for a in question.args)


def is_condition(question: Any) -> bool:
    return isinstance(question, sympy.logic.boolalg.BooleanFunction | sympy.core.relational.Rel)


def assert_later(condition: torch.Tensor, message: str) -> None:
    """Raise when the operator runs, which a graph has too, if `condition` is false."""
    torch._assert_async(condition, message)


def question_of(condition: torch.SymBool) -> Any:
    return condition.node.expr


def print_question(question: Any) -> str:
    return _print(question)


def symbols_of_question(question: Any) -> set[str]:
    return {symbol.name for symbol in question.free_symbols}


@lru_cache(4096)
def _print(expression: Any) -> str:
    return PythonPrinter().doprint(expression)  # type: ignore[no-any-return]


@lru_cache(4096)
def _linear_form(expression: Any) -> tuple[int, dict[str, int]] | None:
    slopes = {s: expression.diff(s) for s in expression.free_symbols}
    if not all(slope.is_Integer for slope in slopes.values()):
        return None
    start = expression.xreplace(dict.fromkeys(slopes, sympy.Integer(0)))
    return int(start), {symbol.name: int(slope) for symbol, slope in slopes.items()}


def linear_form(size: torch.SymInt) -> tuple[int, dict[str, int]] | None:
    """The constant and the slopes of a size that is linear in its symbols, else `None`."""
    return _linear_form(size.node.expr)


def greatest_value(size: torch.SymInt, longest: Mapping[str, int]) -> int | None:
    """A bound of a size whose symbols go from 0 to `longest`; `None` if none is found."""
    zero = sympy.Integer(0)
    ranges = {
        s: ValueRanges(zero, sympy.Integer(longest[s.name])) for s in size.node.expr.free_symbols
    }
    upper = bound_sympy(size.node.expr, ranges).upper
    return int(upper) if upper.is_Integer else None


def grows_with_symbols(size: torch.SymInt | torch.SymFloat | torch.SymBool) -> bool:
    """Whether `size` is known not to fall where one of its symbols, sizes from 1 on, grows."""
    return _grows(size.node.expr)


@lru_cache(4096)
def _grows(expression: Any) -> bool:
    parts = expression.args
    if expression.is_Symbol or expression.is_Integer:
        return True
    if isinstance(expression, sympy.Add | Max | Min):
        return all(map(_grows, parts))
    if isinstance(expression, FloorDiv | CeilToInt):
        return _grows(parts[0]) and all(p.is_Integer and p > 0 for p in parts[1:])
    if isinstance(expression, sympy.Mul | sympy.Pow):  # of what is never negative
        least = {symbol: sympy.Integer(1) for symbol in expression.free_symbols}
        return all(_grows(p) and p.xreplace(least) >= 0 for p in parts)
    return False


def split_condition(condition: Any) -> tuple[str, tuple[Any, ...]]:
    """Split into the word that joins its parts, and these; `""` for a comparison."""
    for kind, word in ((sympy.And, "and"), (sympy.Or, "or"), (sympy.Not, "not")):
        if isinstance(condition, kind):
            return word, condition.args
    return "", ()


def new_symbol(shapes: ShapeEnv, size: int, name: str) -> torch.SymInt:
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(name)
    symbol = shapes.create_symbol(size, source, DimDynamic.DYNAMIC, constraint_dim=None)
    return shapes.create_symintnode(symbol, hint=size, source=source)  # type: ignore[return-value]


def shape_env_of(size: torch.SymInt | torch.SymFloat | torch.SymBool) -> ShapeEnv:
    return size.node.shape_env  # type: ignore[no-any-return]


def num_guards(shapes: ShapeEnv) -> int:
    return len(shapes.guards)


def guards_of(shapes: ShapeEnv, symbols: Sequence[torch.SymInt], names: Sequence[str]) -> str:
    """Print what traces assumed of `symbols`, as an expression in which they go by `names`."""
    placeholders = [SymInt(SymNode(s.node._expr, shapes, int, s.node.hint)) for s in symbols]
    guards = shapes.produce_guards_expression(placeholders) or "True"
    for i, name in enumerate(names):
        guards = guards.replace(f"L['t{i}']", name)
    return guards


def settle_size(size: Any) -> Any:
    """`size`, as a number if a trace assumed that it is one."""
    constant = size.node.maybe_as_int()
    return size if constant is None else constant


def are_known_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all values of their symbols that a trace allows."""
    if not isinstance(a, torch.SymInt) and not isinstance(b, torch.SymInt):
        return bool(a == b)
    return str(a) == str(b) or statically_known_true(a == b)


class _AssumedSizes:
    """Values of symbols, and of the expressions that were evaluated."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.found: dict[Any, int] = {}

    def value_of(self, expression: Any) -> int:
        if expression not in self.found:
            value = eval(_print(expression), dict(NAMES_IN_SIZES), self.sizes)
            self.found[expression] = int(value)
        return self.found[expression]


_assumed: ContextVar[_AssumedSizes | None] = ContextVar("_assumed", default=None)


@contextmanager
def assume_sizes(sizes: Mapping[str, int] | None) -> Iterator[None]:
    """Let `hint_of` answer for these values of symbols; with `None`, for those of the trace."""
    token = _assumed.set(None if sizes is None else _AssumedSizes(sizes))
    try:
        yield
    finally:
        _assumed.reset(token)


def find_assumed_sizes() -> Mapping[str, int] | None:
    """The values that `assume_sizes` has around."""
    assumed = _assumed.get()
    return None if assumed is None else assumed.sizes


def size_name(size: Any) -> str | None:
    """The name of the symbol that `size` is; `None` for a number or an expression."""
    if not isinstance(size, torch.SymInt):
        return None
    return str(size.node.expr) if size.node.expr.is_symbol else None


def hint_of(size: Any) -> int:
    """The number that a size has in the call that was traced, or at the sizes that are assumed."""
    if isinstance(size, int):
        return size
    assumed = _assumed.get()
    return int(size.node.hint) if assumed is None else assumed.value_of(size.node.expr)


def print_size(size: Any, *, original: bool = False) -> str:
    """A size as an expression of Python; `original`: before traces assumed it equal to another."""
    return _print(size.node._expr if original else size.node.expr)


def names_in_size(size: Any) -> set[str]:
    return {symbol.name for symbol in size.node.expr.free_symbols}


def tensor_guard(
    tensors: Sequence[torch.Tensor], dynamic_dims: Sequence[Sequence[int]]
) -> TensorGuards:
    """A guard whose `check(*tensors)` tells in C++ (0.1 us a tensor) whether all are as now.

    It compares type, dtype, device, shape, strides, `requires_grad` and dispatch keys, with
    those that modes and autocast add. Not compared are the sizes of `dynamic_dims`, and the strides
    of tensors that have such.
    """
    if not any(dynamic_dims):
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    sizes: list[Any] = []
    strides: list[Any] = []
    for tensor, dims in zip(tensors, dynamic_dims, strict=True):
        sizes.append([None if d in dims else n for d, n in enumerate(tensor.shape)])
        strides.append([None if dims else n for n in tensor.stride()])
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
