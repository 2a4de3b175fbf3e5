"""Steps that run: a forward and a backward pass, measured, without a lasting effect."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.accelerators import get_all_generator_states, is_here, set_all_generator_states
from torchremat.core.open_objects import flatten_result
from torchremat.remat.tracing.input_labels import BoundCall
from torchremat.report.live_bytes import LiveBytes
from torchremat.report.observe import Observation


class MeasuredStep:
    """A forward and a backward pass of `call` that leave no gradients behind.

    The inputs that `observation` of the same call differentiates get a gradient. The backward pass
    begins at the sum of all floating-point outputs. As in a plan, the caller has the outputs to the
    end of the step. Their gradients are handed over, as in the midst of a larger backward pass.

    >>> from torchremat.report.observe import observe_saved
    >>> call = BoundCall(lambda x: torch.sin(torch.sin(x)).sum(), (torch.ones(256),), {})
    >>> MeasuredStep(call, observe_saved(call)).peak()  # sin x, cos x, their product: 1 KiB each
    3080
    """

    def __init__(self, call: BoundCall, observation: Observation) -> None:
        self._call = call
        inputs = observation.differentiated_inputs
        arguments = [i for i in inputs if i.label.kind == "argument"]
        self._differentiated = {id(i.tensor) for i in arguments}
        self._written = {id(i.tensor) for i in observation.inputs if i.is_written}
        self._closed_over = [i.tensor for i in inputs if i.label.kind != "argument"]
        self._labels = {id(i.tensor): i.label.text for i in inputs}
        self._devices = {i.tensor.device for i in observation.inputs}

    def _build_arguments(self) -> tuple[list[Tensor], list[Tensor]]:
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
        self.seconds()
        with torch.enable_grad():
            args, wrt = self._build_arguments()
        with LiveBytes() as memory:
            self._run(args, wrt)
        return int(memory.peak)

    def seconds(self) -> float:
        with torch.enable_grad():
            args, wrt = self._build_arguments()
        self._wait()
        start = time.perf_counter()
        self._run(args, wrt)
        self._wait()
        return time.perf_counter() - start

    def results(self) -> dict[str, Tensor | None]:
        """Outputs (`output 0`) and gradients (`grad of x`) of a step; `None` for no gradient.

        >>> from torchremat.report.observe import observe_saved
        >>> call = BoundCall(lambda x: torch.sin(x).sum(), (torch.zeros(2),), {})
        >>> MeasuredStep(call, observe_saved(call)).results()
        {'output 0': tensor(0.), 'grad of x': tensor([1., 1.])}
        """
        with torch.enable_grad():
            args, wrt = self._build_arguments()
            leaves, _ = flatten_result(self._call.run(args))
        outputs = [x for x in leaves if isinstance(x, Tensor)]
        found: dict[str, Tensor | None] = {
            f"output {i}": output.detach().clone() for i, output in enumerate(outputs)
        }
        passed = dict.fromkeys(map(id, self._call.tensors))
        names = [self._labels[key] for key in passed if key in self._differentiated]
        names += [self._labels[id(tensor)] for tensor in self._closed_over]
        gradients = self._gradients(_differentiable(leaves), wrt)
        return found | dict(zip((f"grad of {name}" for name in names), gradients, strict=False))

    def _run(self, args: list[Tensor], wrt: list[Tensor]) -> None:
        with torch.enable_grad():
            leaves, _ = flatten_result(self._call.run(args))
        self._gradients(_differentiable(leaves), wrt)

    def _gradients(self, outputs: list[Tensor], wrt: list[Tensor]) -> tuple[Tensor | None, ...]:
        if not outputs:
            return ()
        cotangents = [_ones_of(output) for output in outputs]
        end: Tensor = _HandOver.apply(cotangents, *outputs)  # type: ignore[no-untyped-call]
        del outputs
        return torch.autograd.grad(
            end, [*wrt, *self._closed_over], torch.empty_like(end), allow_unused=True
        )

    def _wait(self) -> None:
        for device in self._devices:
            if is_here(device):
                torch.accelerator.synchronize(device)


class _HandOver(torch.autograd.Function):
    """Hands the gradients in a list to autograd; those of scalars stay there, as that of a loss."""

    @staticmethod
    def forward(ctx: Any, cotangents: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.cotangents = cotangents
        return torch.empty(0, device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        given = tuple(ctx.cotangents)
        if _torch.FREES_COTANGENTS:
            ctx.cotangents[:] = [ct for ct in given if not ct.ndim]
        return None, *given


@contextmanager
def restore_after(observation: Observation) -> Iterator[None]:
    closed_over = [i for i in observation.inputs if i.label.kind != "argument"]
    written = [i.tensor for i in closed_over if i.is_written]
    copies = [tensor.detach().clone() for tensor in written]
    states = get_all_generator_states()
    try:
        yield
    finally:
        set_all_generator_states(states.items())
        for tensor, copy in zip(written, copies, strict=True):
            tensor.detach().copy_(copy)


def _differentiable(leaves: Sequence[Any]) -> list[Tensor]:
    return [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]


def _ones_of(tensor: Tensor) -> Tensor:
    """The gradient of the sum of its numbers, real and imaginary ones."""
    return torch.full_like(tensor, 1 + 1j if tensor.is_complex() else 1)
