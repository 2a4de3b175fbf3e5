"""Several policies side by side: bytes held, peak, and the time that recomputation adds."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.remat.bound import BoundCall
from torchremat.remat.checkpoint import checkpoint
from torchremat.remat.explain import report_of
from torchremat.remat.held import Observation, is_real, observe
from torchremat.remat.measure import LiveBytes
from torchremat.remat.policies import PolicyLike, as_policy
from torchremat.remat.report import Report, human_bytes, table

_ROUNDS = 3


@dataclass(frozen=True)
class Compared:
    """One policy's figures.

    Attributes:
        name: `plain`, or the policy.
        report: what `explain` says of it.
        held: bytes that autograd holds, `report.total`.
        recomputed: bytes of the values that are computed again.
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
        """The bytes that autograd holds."""
        return self.report.total

    @property
    def recomputed(self) -> int:
        """The bytes of the values that are computed again."""
        return self.report.by_decision().get("recomputed", 0)


@dataclass(frozen=True)
class Comparison:
    """The figures of several policies: a `Compared` each in `rows`, plain first; `str`: a table."""

    rows: tuple[Compared, ...]

    def __iter__(self) -> Iterator[Compared]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        head = ("policy", "held", "recomputed", "peak", "time", "added")
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
    f: Callable[..., Any], *args: Any, policies: Sequence[PolicyLike | None], **kwargs: Any
) -> Comparison:
    """The bytes held, the peak and the time of `f` as it is and under each of `policies`.

    With real tensors each is run: forward, and backward from the sum of all floating-point outputs.
    The time is the best of three, taken in turn; the peak is the bytes of live storages as a
    dispatch mode counts them. `.grad` is not touched, and tensors that `f` writes to (buffers among
    them) and the generators are put back. With fake or `meta` tensors among the inputs nothing is
    run, and peak and times are `None`.

    Args:
        f: a function of trees of tensors and other values, or an `nn.Module`.
        *args: its arguments.
        policies: policies, spellings of policies, or callables; `None` saves nothing.
        **kwargs: its keyword arguments.

    Returns:
        A `Comparison`; `print` shows it as a table.

    Raises:
        TypeError: if `f` is not callable, if `policies` is no list of policies, or if there is
            nothing to differentiate.

    >>> import torch
    >>> import torchremat as tr
    >>> def f(x, w):
    ...     return torch.sin(torch.sin(x @ w)).sum()
    >>> x, w = torch.ones(8, 16, device="meta"), torch.ones(16, 32, device="meta")
    >>> print(tr.compare(f, x, w, policies=["full", "dots"]))
    policy                held  recomputed  peak  time  added
    plain             2.00 KiB         0 B     -     -      -
    nothing_saveable       0 B    2.00 KiB     -     -      -
    dots_saveable     1.00 KiB    1.00 KiB     -     -      -
    """
    calls = {"plain": BoundCall(f, args, kwargs)}
    for policy in _checked(policies):
        calls[repr(policy)] = BoundCall(checkpoint(f, policy=policy), args, kwargs)
    observed = {name: observe(bound) for name, bound in calls.items()}
    reports = {name: report_of(observation) for name, observation in observed.items()}
    plain = observed["plain"]
    if not all(is_real(i.tensor) for i in plain.inputs):
        return Comparison(tuple(Compared(name, report) for name, report in reports.items()))
    steps = {name: _Step(bound, plain) for name, bound in calls.items()}
    with _restored(plain):
        peaks = {name: step.peak() for name, step in steps.items()}
        seconds = _best_seconds(steps)
    return Comparison(
        tuple(
            Compared(name, report, peaks[name], seconds[name], seconds[name] - seconds["plain"])
            for name, report in reports.items()
        )
    )


def _checked(policies: Any) -> list[Any]:
    if isinstance(policies, str | Mapping) or not isinstance(policies, Sequence):
        raise TypeError(
            f"compare takes policies=[...], a list of policies, but it is {policies!r} "
            f"({type(policies).__name__}); for one policy write policies=[policy]"
        )
    return [as_policy(policy) for policy in policies]


# --- running -------------------------------------------------------------------------------------


class _Step:
    """A forward and a backward pass that leave no gradients behind."""

    def __init__(self, call: BoundCall, observation: Observation) -> None:
        self._call = call
        inputs = observation.differentiated_inputs()
        arguments = [i for i in inputs if i.label.kind == "argument"]
        self._differentiated = {id(i.tensor) for i in arguments}
        self._written = {id(i.tensor) for i in observation.inputs if i.is_written}
        self._closed_over = [i.tensor for i in inputs if i.label.kind != "argument"]
        self._devices = {i.tensor.device for i in observation.inputs}

    def _arguments(self) -> tuple[list[Tensor], list[Tensor]]:
        """What to pass, and what to differentiate with respect to."""
        args: dict[int, Tensor] = {}
        wrt = []
        for tensor in self._call.tensors:
            if id(tensor) in args:
                continue
            arg = tensor
            if id(tensor) in self._differentiated:
                arg = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
                wrt.append(arg)
            args[id(tensor)] = arg.clone() if id(tensor) in self._written else arg
        return [args[id(tensor)] for tensor in self._call.tensors], wrt

    def peak(self) -> int:
        """The most bytes alive at one time of what a step makes; the function is traced before."""
        self.seconds()
        with torch.enable_grad():
            args, wrt = self._arguments()
        with LiveBytes() as memory:
            self._run(args, wrt)
        return int(memory.peak)

    def seconds(self) -> float:
        """The time of a step."""
        with torch.enable_grad():
            args, wrt = self._arguments()
        self._wait()
        start = time.perf_counter()
        self._run(args, wrt)
        self._wait()
        return time.perf_counter() - start

    def _run(self, args: list[Tensor], wrt: list[Tensor]) -> None:
        with torch.enable_grad():
            leaves, _ = _torch.tree_flatten(self._call.run(args))
            sums = [_real_sum(x) for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        del leaves
        if sums:
            torch.autograd.grad(sums, [*wrt, *self._closed_over], allow_unused=True)

    def _wait(self) -> None:
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def _real_sum(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).sum()


def _best_seconds(steps: Mapping[str, _Step]) -> dict[str, float]:
    """The best time of each, taken in turn so that what slows the machine slows all."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(_ROUNDS):
        for name, step in steps.items():
            best[name] = min(best[name], step.seconds())
    return best


@contextmanager
def _restored(observation: Observation) -> Iterator[None]:
    """After the block, generators and the tensors closed over that are written to are as before."""
    closed_over = [i for i in observation.inputs if i.label.kind != "argument"]
    written = [i.tensor for i in closed_over if i.is_written]
    devices = {i.tensor.device for i in observation.inputs}
    gpus = [device.index or 0 for device in devices if device.type == "cuda"]
    copies = [tensor.detach().clone() for tensor in written]
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            for tensor, copy in zip(written, copies, strict=True):
                tensor.detach().copy_(copy)


def _human_seconds(seconds: float | None, *, signed: bool = False) -> str:
    """A time for people.

    >>> _human_seconds(0.00123), _human_seconds(0.5, signed=True)
    ('1.23 ms', '+500 ms')
    """
    if seconds is None:
        return "-"
    milliseconds = 1e3 * seconds
    digits = 2 if abs(milliseconds) < 10 else 1 if abs(milliseconds) < 100 else 0
    return f"{milliseconds:{'+' if signed else ''}.{digits}f} ms"
