"""Sizes that vary: symbols, what traces assume of them, and guards of tensors."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import SymInt
from torch._C._dynamo.guards import TensorGuards as TensorGuards
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

NAMES_IN_SIZES = dict(SYMPY_INTERP)
"""The names in the expressions of `print_size` and `guards_of`, besides symbols."""


SYMBOLS_OF_TORCH = tuple(
    os.path.join(os.path.dirname(torch.__file__), *place)
    for place in (("__init__.py",), ("fx", "experimental"))
)
"""How the paths of those files begin in which PyTorch has the methods of symbolic sizes."""


def new_shape_env() -> ShapeEnv:
    """Make an environment of symbols for sizes, which notes what a trace assumes of them.

    Equal sizes get symbols of their own: that a batch is as large as a sequence is long is chance.
    """
    return ShapeEnv(
        allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False
    )


def new_symbol(shapes: ShapeEnv, size: int, name: str, *, watched: bool = False) -> torch.SymInt:
    """Make a size; if `watched`, `check_comparisons_of` sees it and what is computed from it."""
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(name)
    symbol = shapes.create_symbol(size, source, DimDynamic.DYNAMIC, constraint_dim=None)
    made: torch.SymInt = shapes.create_symintnode(symbol, hint=size, source=source)  # type: ignore[assignment]
    return SymInt(_watch(made.node)) if watched else made


ComparisonCheck = Callable[[str, Any, Any, Any, FrameType], None]
"""Takes the method (`lt`), the result, the size, what it is compared with, and who compares."""


@contextmanager
def check_comparisons_of(shapes: ShapeEnv, check: ComparisonCheck) -> Iterator[None]:
    """Call `check` where Python compares a watched size of `shapes`."""
    shapes.check_comparison = check  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del shapes.check_comparison  # type: ignore[attr-defined]


def _watch(value: Any) -> Any:
    if type(value) is SymNode:
        value.__class__ = _WatchedNode
    return value


class _WatchedNode(SymNode):
    """A size that tells its `ShapeEnv` of comparisons, as do those that are computed from it."""


def _watch_results(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(node: SymNode, *args: Any, **kwargs: Any) -> Any:
        return _watch(method(node, *args, **kwargs))

    return call


def _check_results(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def compare(node: SymNode, other: SymNode) -> Any:
        result = method(node, other)
        check = getattr(node.shape_env, "check_comparison", None)
        frame = None if check is None else _find_comparing_frame()
        if check is not None and frame is not None:
            check(name, torch.SymBool(result), SymInt(node), SymInt(other), frame)
        return result

    return compare


def _find_comparing_frame() -> FrameType | None:
    """Find the code that compares; `None` if an operator in C++ does."""
    frame = sys._getframe(2)
    if not frame.f_code.co_filename.startswith(SYMBOLS_OF_TORCH):
        return None
    while frame.f_back is not None and frame.f_code.co_filename.startswith(SYMBOLS_OF_TORCH):
        frame = frame.f_back
    return frame


_INTEGERS = (
    "abs", "add", "clone", "floordiv", "int_floordiv", "lshift", "mod", "mul", "neg", "pos", "pow",
    "pow_by_natural", "rshift", "sub", "sym_max", "sym_min", "sym_sum", "wrap_int",
)  # fmt: skip
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_WatchedNode, _name, _check_results(_name, getattr(SymNode, _name)))
for _name in _INTEGERS:
    setattr(_WatchedNode, _name, _watch_results(getattr(SymNode, _name)))


def depends_on_symbols(size: Any) -> bool:
    """Whether a size, or a comparison of sizes, is not the same for all values of symbols."""
    return isinstance(size, torch.SymInt | torch.SymBool) and bool(size.node.expr.free_symbols)


def shape_env_of(size: torch.SymInt) -> ShapeEnv:
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


def hint_of(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def print_size(size: Any, *, original: bool = False) -> str:
    """A size as an expression of Python; `original`: before traces assumed it equal to another."""
    return PythonPrinter().doprint(size.node._expr if original else size.node.expr)  # type: ignore[no-any-return]


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
