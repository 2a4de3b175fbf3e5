"""Branches that else only raise, of a function that `vmap` runs as it is, without a trace.

Python chooses one way for all examples. Where the condition holds for some of them only, it is
chosen to fail: the function raises its own error, as it does for one of these examples. A function
that goes on nevertheless, since the error was caught, would give the others wrong results.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.source import Source, current_source
from torchremat.errors import ConcretizationError
from torchremat.tracing.checks.raising_branches import find_needed_truth

_aten = torch.ops.aten


@dataclass
class _MappedRun:
    """A function that is mapped at a `level`, and the line of a condition that differs."""

    level: int
    differs_at: Source | None = None


class _MappedRuns(threading.local):
    def __init__(self) -> None:
        self.active: list[_MappedRun] = []


_runs = _MappedRuns()


@contextmanager
def expect_errors_to_leave() -> Iterator[None]:
    """Raise if the mapped function in the block goes on after a check that some examples fail."""
    run = _MappedRun(_torch.transform_depth())
    _runs.active.append(run)
    try:
        yield
    finally:
        _runs.active.pop()
    if run.differs_at is not None:
        raise ConcretizationError(
            f"the condition at {run.differs_at} holds for some of the examples that vmap maps and "
            "not for others, and the function goes on in both cases: it returns, or it catches the "
            "error. Choose between tensors with torch.where, or call it for each example."
        )


@cache
def let_vmap_check() -> tuple[object, ...]:
    """Register the rules for branches that else only raise; they hold as long as this tuple."""
    rules = {
        _aten.is_nonzero.default: _answer_check,
        _aten._is_all_true.default: _note_all,
        _aten._is_any_true.default: _note_any,
    }
    return tuple(_torch.replace_batching_rule(op, rule) for op, rule in rules.items())


def _runs_over(x: Tensor) -> list[_MappedRun]:
    return [run for run in _runs.active if _torch.is_mapped_at(x, run.level)]


def _answer_check(plain: Any, x: Tensor) -> bool:
    runs = _runs_over(x)
    needed = find_needed_truth() if runs else None
    if needed is None:
        return bool(plain(x))
    flags = _torch.innermost_tensor(x)
    if not flags.numel():
        return needed  # of no examples, none fails
    return not needed if _note_if_different(flags, runs) else bool(flags.flatten()[0])


def _note_all(plain: Any, x: Tensor) -> Tensor:
    """`torch.distributions` asks so for all examples at once, whatever becomes of the answer."""
    return _note_differences(plain(x), x.all(), x)


def _note_any(plain: Any, x: Tensor) -> Tensor:
    return _note_differences(plain(x), x.any(), x)


def _note_differences(answer: Tensor, of_each: Tensor, x: Tensor) -> Tensor:
    if not _torch.is_faking():  # in a trace the branch itself is checked
        _note_if_different(_torch.innermost_tensor(of_each), _runs_over(x))
    return answer


def _note_if_different(flags: Tensor, runs: Sequence[_MappedRun]) -> bool:
    """Note on `runs` that the truth values of examples differ, if they do."""
    if not runs or not flags.numel():
        return False
    with _torch.at_level_below():
        true = flags != 0
        differs = bool(true.any()) and not bool(true.all())
    if differs:
        for run in runs:
            run.differs_at = current_source()
    return differs
