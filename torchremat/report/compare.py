"""Several policies side by side: bytes saved, peak, and the time that recomputation adds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchremat.core.formatting import ShownInNotebook, human_bytes, table
from torchremat.errors import ArgumentTypeError
from torchremat.policies.module_selection import Select
from torchremat.policies.policy import PolicyLike, as_policy
from torchremat.remat.module_policies import under_policy
from torchremat.remat.tracing.input_labels import BoundCall, refuse_misspelt
from torchremat.report.explain import report_of
from torchremat.report.measured_step import MeasuredStep, restore_after
from torchremat.report.observe import is_real, observe_saved
from torchremat.report.report import Report

__all__ = ["Compared", "Comparison"]


def __dir__() -> list[str]:
    return sorted(__all__)


# The best of so many runs is compared: one may be disturbed, and `compare` stays interactive.
# Chosen by hand; nothing depends on the exact value.
_ROUNDS = 3


@dataclass(frozen=True)
class Compared:
    """One policy's figures.

    Attributes:
        name: `plain`, or the policy.
        report: the report of `explain`.
        held: bytes that autograd saves, `report.total`.
        recomputed: bytes of the recomputed values.
        peak: the most bytes alive at one time of what a forward and backward pass make, gradients
            included; inputs and parameters are not. `None` where nothing was run.
        seconds: best time of a forward and backward pass, `None` where nothing was run.
        added_seconds: how much more than plain's that is.
    """

    name: str
    report: Report
    peak: int | None = None
    seconds: float | None = None
    added_seconds: float | None = None

    @property
    def held(self) -> int:
        """The bytes that autograd saves."""
        return self.report.total

    @property
    def recomputed(self) -> int:
        """The bytes of the recomputed values."""
        return self.report.by_decision().get("recomputed", 0)


@dataclass(frozen=True)
class Comparison(ShownInNotebook):
    """The figures of several policies: a `Compared` each in `rows`, plain first; `str`: a table."""

    rows: tuple[Compared, ...]

    def __iter__(self) -> Iterator[Compared]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"Comparison({', '.join(row.name for row in self.rows)})"

    def __str__(self) -> str:
        head = ("policy", "saved", "recomputed", "peak", "time", "added")
        cells = [
            (
                row.name,
                human_bytes(row.held),
                human_bytes(row.recomputed),
                "-" if row.peak is None else human_bytes(row.peak),
                _human_seconds(row.seconds),
                _human_seconds(row.added_seconds, signed=True),
            )
            for row in self.rows
        ]
        return "\n".join(table([head, *cells], numeric=(1, 2, 3, 4, 5), indent=""))


def compare(
    f: Callable[..., Any],
    *args: Any,
    policies: Sequence[PolicyLike | None],
    select: Select | None = None,
    **kwargs: Any,
) -> Comparison:
    """The bytes saved, the peak and the time of `f` as it is and under each of `policies`.

    With real tensors each is run: forward, and backward from the sum of all floating-point outputs.
    The time is the best of three, taken in turn. The peak is the bytes of live storages as a
    dispatch mode counts them. As in a plan, the outputs and their gradients stay alive. `.grad` is
    not touched. Tensors that `f` writes to (buffers among them) and the generators are put back.
    With fake or `meta` tensors among the inputs nothing is run, and peak and times are `None`.

    Args:
        f: a function of trees of tensors and other values, or an `nn.Module`.
        *args: its arguments.
        policies: policies, spellings of policies, or callables; `None` saves nothing.
        select: puts each policy on these modules of the model `f`, as `nn.wrap` does, in place of
            the whole; `f` stays as it is.
        **kwargs: its keyword arguments.

    Returns:
        A `Comparison`; `print` shows it as a table.

    Raises:
        TypeError: if `f` is not callable, or not an `nn.Module` where `select` is given; if
            `policies` is not a list. Also if there is nothing to differentiate.
        ValueError: where `nn.wrap` raises it: `NoMatchError` if `select` matches nothing.

    >>> import torch
    >>> import torchremat as tr
    >>> def f(x, w):
    ...     return torch.sin(torch.sin(x @ w)).sum()
    >>> x, w = torch.ones(8, 16, device="meta"), torch.ones(16, 32, device="meta")
    >>> print(tr.compare(f, x, w, policies=["full", "dots"]))
    policy               saved  recomputed  peak  time  added
    plain             2.00 KiB         0 B     -     -      -
    nothing_saveable       0 B    2.00 KiB     -     -      -
    dots_saveable     1.00 KiB    1.00 KiB     -     -      -
    """
    refuse_misspelt(compare, f, kwargs)
    calls = {"plain": BoundCall(f, args, kwargs)}
    for policy in _check_policies(policies):
        calls[repr(policy)] = BoundCall(under_policy(f, policy, select), args, kwargs)
    observed = {name: observe_saved(bound) for name, bound in calls.items()}
    reports = {name: report_of(observation) for name, observation in observed.items()}
    plain = observed["plain"]
    if not all(is_real(i.tensor) for i in plain.inputs):
        return Comparison(tuple(Compared(name, report) for name, report in reports.items()))
    steps = {name: MeasuredStep(bound, plain) for name, bound in calls.items()}
    with restore_after(plain):
        peaks = {name: step.peak() for name, step in steps.items()}
        seconds = _best_seconds(steps)
    return Comparison(
        tuple(
            Compared(name, report, peaks[name], seconds[name], seconds[name] - seconds["plain"])
            for name, report in reports.items()
        )
    )


def _check_policies(policies: Any) -> list[Any]:
    if isinstance(policies, str | Mapping) or not isinstance(policies, Sequence):
        raise ArgumentTypeError(
            f"compare takes policies=[...], a list of policies, but it is {policies!r} "
            f"({type(policies).__name__}); for one policy write policies=[policy]"
        )
    return [as_policy(policy) for policy in policies]


def _best_seconds(steps: Mapping[str, MeasuredStep]) -> dict[str, float]:
    """The steps take turns, so that a slow machine slows all of them."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(_ROUNDS):
        for name, step in steps.items():
            best[name] = min(best[name], step.seconds())
    return best


def _human_seconds(seconds: float | None, *, signed: bool = False) -> str:
    """A time in milliseconds, `-` if none was measured.

    >>> _human_seconds(0.00123), _human_seconds(0.5, signed=True)
    ('1.23 ms', '+500 ms')
    """
    if seconds is None:
        return "-"
    milliseconds = 1e3 * seconds
    digits = 2 if abs(milliseconds) < 10 else 1 if abs(milliseconds) < 100 else 0
    return f"{milliseconds:{'+' if signed else ''}.{digits}f} ms"
