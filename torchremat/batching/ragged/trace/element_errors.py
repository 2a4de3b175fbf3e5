import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from torchremat import _torch
from torchremat.core.source import Source, current_source, is_user_file, source_of_error
from torchremat.errors import RaggedError, TorchrematError
from torchremat.graph.symbolic_sizes import format_size


@contextmanager
def explain_mismatches(
    elements: Sequence[tuple[int, ...]], symbols: dict[int, torch.SymInt]
) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        names = {format_size(size): number for number, size in symbols.items()}
        met = [name for name in names if name in str(error)]
        if isinstance(error, TorchrematError) or not met:
            raise
        places = "; ".join(
            f"{name} is the size of dim {shape.index(names[name])} of input {i}"
            for name in met
            for i, shape in enumerate(elements)
            if names[name] in shape
        )
        source = source_of_error(error)
        where = "" if source is None else f" at {source}"
        raise RaggedError(
            f"sizes that differ from element to element do not fit{where}: "
            f"{str(error).removesuffix(')')}. Here {places}. Two sizes are one if their lengths "
            "are equal in all elements."
        ) from error


@contextmanager
def refuse_branches(shapes: _torch.ShapeEnv) -> Iterator[None]:
    """PyTorch's own code gets the answers for a large size."""
    evaluate = shapes.evaluate_sym_node

    def check_and_evaluate(node: Any, *args: Any, **kwargs: Any) -> Any:
        if not node.expr.free_symbols:
            return evaluate(node, *args, **kwargs)
        source = _find_user_line()
        if source is None and node.pytype is int:
            raise RaggedError(
                f"an operator of PyTorch, called at {current_source()}, needs a size as a number "
                f"that differs from element to element ({node.expr}): it has no form for such. Use "
                "other operators, or map over a dense batch."
            )
        if source is not None:
            raise RaggedError(
                f"Python needs the value of a size that differs from element to element, at "
                f"{source} (of {node.expr}): an `if`, `int` or `range` of it has one answer in the "
                "graph of all elements. Use operators of tensors: torch.where, torch.arange(n), "
                "x[:k] with a number k."
            )
        return evaluate(node, *args, **kwargs)

    shapes.evaluate_sym_node = check_and_evaluate  # type: ignore[method-assign,assignment]
    try:
        with _torch.check_comparisons_of(shapes, _refuse_comparison):
            yield
    finally:
        del shapes.evaluate_sym_node


def _refuse_comparison(name: str, result: Any, size: Any, other: Any, frame: FrameType) -> None:
    """The trace takes sizes for positive, and would answer `n > 0` without asking."""
    if (
        not is_user_file(frame.f_code.co_filename)
        or not _is_settled(result)
        or not _torch.depends_on_symbols(size - other)
    ):
        return
    source = Source(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    raise RaggedError(
        f"Python compares a size that differs from element to element, at {source}, with "
        f"{other}: the answer may differ for an empty element, and the graph of all elements "
        "has one. Use operators of tensors: torch.where, sums, which are 0 for none."
    )


def _is_settled(result: Any) -> bool:
    return not _torch.depends_on_symbols(result)


_CONVERSIONS = ("__bool__", "__int__", "__index__", "__float__", "__round__", "__trunc__")


def _find_user_line() -> Source | None:
    """Find the user's line that needs the value of a size; `None` if PyTorch's code does."""
    frame: FrameType | None = sys._getframe(2)
    method = ""
    while frame is not None and frame.f_code.co_filename.startswith(_torch.SYMBOLS_OF_TORCH):
        method = frame.f_code.co_name
        frame = frame.f_back
    if frame is None or method not in _CONVERSIONS or not is_user_file(frame.f_code.co_filename):
        return None
    return Source(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
