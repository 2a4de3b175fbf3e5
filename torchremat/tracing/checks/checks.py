"""Checks of a trace: operators that raise where a condition does not hold.

    x, s -> gt = s > 0;  if not gt.all(): raise ValueError(...);    return x / s

    x, s -> gt = s > 0;  all = all(gt);  ok = check(all);  div = x / s          -> div, ok

What a check returns is an output of the graph: so it runs in each call, whatever becomes of the
graph. It runs where the question was, before an operator that a wrong value would crash. Whoever
runs the graph catches `CheckError`, and runs the function as it is, which raises its own error.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.tracing.checks.raising_branches import find_needed_truth

_library = torch.library.Library("torchremat", "FRAGMENT")


class CheckError(Exception):
    """A check does not hold: the function itself raises, or knows how to go on."""


def _check(flag: Tensor) -> Tensor:
    if not flag:
        raise CheckError
    return flag.clone()


def _check_mapped(flag: Tensor) -> Tensor:
    with _torch.at_level_below() as level:
        flags, _ = _torch.unwrap_batched_tensor(flag, level.number)
        checked: Tensor = check(flags.all())
    return checked


_library.define("check(Tensor flag) -> Tensor")
_library.impl("check", _check, "CompositeExplicitAutograd")
_library.impl("check", torch.empty_like, "Meta")
_library.impl("check", _check_mapped, "FuncTorchBatched")
check = torch.ops.torchremat.check.default


# A loop that only an error ends, one that is caught outside, would be traced without end. Chosen by
# hand: `torch.distributions` checks some five conditions for a sample and its probability.
_MOST_CHECKS = 1024


class Checks:
    """The checks that a function has come to so far, as tensors of its trace without an axis."""

    def __init__(
        self,
        node_of: Callable[[Tensor], fx.Node | None],
        below_levels: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._node_of = node_of
        self._below_levels = below_levels
        self._flags: dict[torch.device, list[Tensor]] = {}

    def answer(self, tensor: Tensor) -> bool | None:
        """The truth value of `tensor` with which the code that asks for it now does not raise.

        `None` if there is no such value, or none that can be checked.
        """
        if any(size != 1 for size in tensor.shape):
            return None
        needed = find_needed_truth()
        return needed if needed is not None and self.expect(tensor, needed) else None

    def expect(self, tensor: Tensor, needed: bool) -> bool:
        """Check that each truth value in `tensor` is `needed`; whether that is possible."""
        inner = _torch.innermost_tensor(tensor)
        num_checks = sum(map(len, self._flags.values()))
        if self._node_of(inner) is None or num_checks >= _MOST_CHECKS:
            return False
        with self._below_levels():
            flag = inner if inner.dtype is torch.bool else inner != 0
            flag = (flag if needed else flag.logical_not()).all()
            self._flags.setdefault(flag.device, []).append(check(flag))
        return True

    def conclude(self) -> list[Tensor]:
        """One tensor on each device, for which all checks there have run."""
        with self._below_levels():
            return [
                flags[0] if len(flags) == 1 else torch.stack(flags).all()
                for flags in self._flags.values()
            ]
