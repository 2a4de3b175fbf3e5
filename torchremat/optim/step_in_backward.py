"""`step_in_backward`: each parameter is updated as soon as its gradient is there.

    plain      g3, g2, g1 made and alive, then step() updates p3, p2, p1
    here       g3 made, p3 updated, g3 freed;  g2 made, p2 updated, g2 freed;  ...

The loop stays as it is. `optimizer.step()` updates what the backward pass did not.
"""

import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, distributed
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from torchremat.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    StepInBackwardError,
)
from torchremat.optim.per_parameter import Group, find_objection, update_parameter
from torchremat.optim.spent_gradient import SpentGradient, spend
from torchremat.optim.state_on_host import StateOnHost


def step_in_backward(
    optimizer: Optimizer,
    *,
    max_norm: float | None = None,
    accumulate: int = 1,
    norms: bool = False,
    offload: bool = False,
) -> "StepInBackward":
    """Let `optimizer` update each parameter in the backward pass, as soon as its gradient is there.

    Gradients are then freed one by one, instead of being all alive at the end of the backward pass.
    The loop, the results and the `state_dict` of the optimizer stay the same, to the bit. A
    gradient that was consumed leaves a `SpentGradient`, which has no values: whoever reads them
    gets an error.

    Settings such as the learning rate must be set before the backward pass, since it uses them. An
    error in the backward pass leaves some parameters updated.

    Args:
        optimizer: one whose rule reads one parameter, its gradient and its state, as those of
            `torch.optim` do but for LBFGS. It is tried on small tensors.
        max_norm: the global norm to which gradients are clipped, instead of `clip_grad_norm_` in
            the loop. `loss.backward()` then keeps all gradients, and `step()` clips them;
            `backward(loss)` of what is returned keeps none, and takes two passes.
        accumulate: how many backward passes there are before each `step()`. The last one updates.
        norms: whether a `SpentGradient` has the norm of its gradient, for code that logs norms. To
            compute them takes a few percent of the time of a step with few tokens.
        offload: whether the optimizer's state lies in the host's memory. That of a parameter is
            brought to its device for the update, and that of the next comes meanwhile. Tensors of
            less than `config.least_offload_nbytes` stay, and others where the host has no room.

    Returns:
        The `StepInBackward`, whose `remove()` undoes it. It is a context manager that does.

    Raises:
        TypeError: if `optimizer` is no `torch.optim.Optimizer`.
        ValueError: if `max_norm` or `accumulate` is not positive.
        StepInBackwardError: (a `RuntimeError`) if parameters of this optimizer cannot be updated
            one at a time, it was given before, or other processes share the gradients.

    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> stepping = step_in_backward(optimizer)
    >>> for _ in range(3):                                   # as it was
    ...     optimizer.zero_grad()
    ...     model(torch.ones(4, 8)).sum().backward()         # updates the parameters
    ...     optimizer.step()
    >>> model.weight.grad
    SpentGradient(shape=(1, 8), dtype=torch.float32)
    >>> stepping.remove()
    """
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"step_in_backward takes a torch.optim.Optimizer, but it was given {optimizer!r}. Make "
            "one first, such as torch.optim.AdamW(model.parameters())"
        )
    if max_norm is not None and not max_norm > 0:
        raise ArgumentValueError(f"max_norm={max_norm!r} is not positive: give None not to clip")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ArgumentValueError(
            f"accumulate={accumulate!r} is no number of backward passes: give 1 or more"
        )
    if shares_gradients():
        raise StepInBackwardError(
            "step_in_backward: the gradients of several processes are summed after each of them is "
            "there, so an update before that would use only this process's. Call step() after the "
            "backward pass, as usual"
        )
    if stepping_of(optimizer) is not None:
        raise StepInBackwardError(
            f"{type(optimizer).__name__} steps in the backward pass already: call remove() of what "
            "step_in_backward returned first"
        )
    objection = find_objection(optimizer)
    if objection is not None:
        raise StepInBackwardError(
            f"{type(optimizer).__name__} cannot update one parameter at a time: {objection}. Call "
            "its step() after the backward pass, as usual"
        )
    return StepInBackward(optimizer, max_norm, accumulate, norms, offload)


def shares_gradients() -> bool:
    """Whether there are other processes, with which gradients may be summed."""
    is_one_of_several = distributed.is_available() and distributed.is_initialized()
    return is_one_of_several and distributed.get_world_size() > 1


_STEPPING: "WeakKeyDictionary[Optimizer, ref[StepInBackward]]" = WeakKeyDictionary()
"""The optimizers that step in the backward pass; a handle would keep its optimizer alive."""


def stepping_of(optimizer: Optimizer) -> "StepInBackward | None":
    """The handle of `optimizer`, if it steps in the backward pass."""
    handle = _STEPPING.get(optimizer)
    return None if handle is None else handle()


Stepping = tuple["ref[StepInBackward]", ...]


def find_stepping() -> Stepping:
    """The handles of all optimizers that step in the backward pass now."""
    return tuple(_STEPPING.values())


class StepInBackward:
    """An optimizer that steps in the backward pass, until `remove()`.

    Attributes:
        optimizer: the optimizer.
        max_norm: as it was given.
        accumulate: as it was given.
        norms: as it was given.
        offload: as it was given.
        total_norm: the global norm of the last gradients that were clipped, a tensor without
            dimensions; `None` before and without `max_norm`.

    >>> parameter = torch.nn.Parameter(torch.tensor([3.0]))
    >>> with step_in_backward(torch.optim.SGD([parameter], lr=1.0), max_norm=1.0) as stepping:
    ...     stepping.backward(5 * parameter.sum())
    >>> stepping.total_norm, parameter.item()
    (tensor(5.), 2.000000238418579)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_norm: float | None,
        accumulate: int,
        norms: bool,
        offload: bool,
    ) -> None:
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.accumulate = accumulate
        self.norms = norms
        self.offload = offload
        self.total_norm: Tensor | None = None
        self._is_measuring = False
        self._is_updating = max_norm is None
        self._passes: dict[Tensor, int] = {}
        """How often each parameter got a gradient since the last step."""
        self._norms: dict[Tensor, Tensor] = {}
        self._settings: dict[int, dict[str, Any]] = {}
        """The settings that this step's updates used, by the number of a group."""
        self._handles = [
            optimizer.register_step_pre_hook(self._begin_step),
            optimizer.register_step_post_hook(self._end_step),
        ]
        self._watched: set[Tensor] = set()
        self._watch_parameters()
        self._spent: list[tuple[Tensor, Tensor]] = []
        """Parameters that are updated already when `step()` runs, with their gradients."""
        self._num_states = len(optimizer.state)
        self._on_host = StateOnHost(optimizer) if offload else None
        _STEPPING[optimizer] = ref(self)

    def _watch_parameters(self) -> None:
        """Wait for the gradients of all parameters; groups may have come since."""
        for number, group in enumerate(self.optimizer.param_groups):
            take = functools.partial(_hand_over, ref(self), number)
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._watched:
                    self._watched.add(parameter)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(take))

    def backward(self, loss: Tensor, gradient: Tensor | None = None) -> None:
        """`loss.backward(gradient)`, in two passes where gradients are clipped.

        The first pass keeps the norm of each gradient, the second updates. Values that the forward
        pass saved are alive until both are done. Where gradients are there already, as with
        `accumulate`, there is one pass, and `step()` clips them.
        """
        self._watch_parameters()
        is_kept = self.accumulate > 1 or any(p.grad is not None for p in self._parameters())
        if self.max_norm is None or is_kept:
            loss.backward(gradient)
            return
        self._norms.clear()
        self._is_measuring = True
        try:
            loss.backward(gradient, retain_graph=True)
        finally:
            self._is_measuring = False
        if not self._norms:
            return
        in_order = [self._norms[p] for p in self._parameters() if p in self._norms]
        self.total_norm = get_total_norm(in_order)
        self._is_updating = True
        try:
            loss.backward(gradient)
        finally:
            self._is_updating = False

    def remove(self) -> None:
        """Let the optimizer update parameters in `step()` alone, as before."""
        for handle in self._handles:
            handle.remove()
        if stepping_of(self.optimizer) is self:
            del _STEPPING[self.optimizer]
        self._drop_spent()
        if self._on_host is not None:
            self._on_host.remove()
            self._on_host = None

    def __enter__(self) -> "StepInBackward":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        clip = "" if self.max_norm is None else f", max_norm={self.max_norm}"
        passes = "" if self.accumulate == 1 else f", accumulate={self.accumulate}"
        place = ", offload=True" if self.offload else ""
        return f"StepInBackward({type(self.optimizer).__name__}{clip}{passes}{place})"

    def _take_gradient(self, number: int, parameter: Tensor) -> None:
        """Called when the gradient of `parameter` is complete."""
        gradient = parameter.grad
        if gradient is None or torch.is_grad_enabled():  # create_graph: it is read again
            return
        if self._is_measuring:
            self._norms[parameter] = get_total_norm([gradient])
            parameter.grad = None
            return
        self._passes[parameter] = self._passes.get(parameter, 0) + 1
        if not self._is_updating or self._passes[parameter] < self.accumulate:
            return
        if self.max_norm is not None:
            _clip(parameter, self.max_norm, self.total_norm)
        group = self.optimizer.param_groups[number]
        self._settings.setdefault(number, _settings_of(group))
        norm = torch.linalg.vector_norm(gradient) if self.norms else None
        self._update(group, parameter)
        parameter.grad = spend(parameter, norm)

    def _update(self, group: Group, parameter: Tensor) -> None:
        if self._on_host is None:
            update_parameter(self.optimizer, group, parameter)
        else:
            self._on_host.update(group, parameter)

    def _begin_step(
        self, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, dict[str, Any]] | None:
        """Leave to `step()` what the backward pass did not update."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._prepare_step()
            return None
        run = self._prepare_after(closure)
        return (args[0], run, *args[2:]) if len(args) > 1 else args, (
            kwargs if len(args) > 1 else {**kwargs, "closure": run}
        )

    def _prepare_after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(closure)
        def run() -> Any:
            result = closure()
            self._prepare_step()
            return result

        return run

    def _prepare_step(self) -> None:
        self._refuse_new_settings()
        spent = self._drop_spent()
        if self.max_norm is not None and not spent:
            self.total_norm = clip_grad_norm_(list(self._parameters()), self.max_norm)
        if self._on_host is not None:
            spent += self._update_others()
            self._on_host.end_step()
        self._spent = spent

    def _update_others(self) -> list[tuple[Tensor, Tensor]]:
        """Update what the backward pass did not, one at a time; returns the gradients set aside."""
        updated: list[tuple[Tensor, Tensor]] = []
        for group in self.optimizer.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                self._update(group, parameter)
                updated.append((parameter, parameter.grad))
                parameter.grad = None
        return updated

    def _refuse_new_settings(self) -> None:
        for number, used in self._settings.items():
            now = _settings_of(self.optimizer.param_groups[number])
            changed = [k for k in used if not _is_same(used[k], now.get(k))]
            if changed:
                raise StepInBackwardError(
                    f"{changed[0]!r} of the optimizer was {used[changed[0]]} in the backward pass, "
                    f"which has updated with it, and is {now.get(changed[0])} in step(). Set it "
                    "before the backward pass"
                )
        self._settings.clear()
        self._passes.clear()

    def _drop_spent(self) -> list[tuple[Tensor, Tensor]]:
        spent: list[tuple[Tensor, Tensor]] = []
        for parameter in self._parameters():
            if isinstance(parameter.grad, SpentGradient):
                spent.append((parameter, parameter.grad))
                parameter.grad = None
        return spent

    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, spent in self._spent:
            parameter.grad = spent
        self._spent = []
        self._sort_state()

    def _sort_state(self) -> None:
        """Let the state be in the order of the parameters, as `step()` makes it."""
        state = self.optimizer.state
        if len(state) > self._num_states:
            made = {p: state.pop(p) for p in self._parameters() if p in state}
            state.update(made)
            self._num_states = len(state)

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]


def _hand_over(handle: "ref[StepInBackward]", number: int, parameter: Tensor) -> None:
    """The hook of a parameter. Python cannot free a cycle through it, so it holds no handle."""
    stepping = handle()
    if stepping is not None:
        stepping._take_gradient(number, parameter)


def _clip(parameter: Tensor, max_norm: float, total_norm: Tensor | None) -> None:
    assert total_norm is not None
    torch.nn.utils.clip_grads_with_norm_(parameter, max_norm, total_norm)


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group; of a tensor its value now, as it may be written in place."""
    return {
        k: v.clone() if isinstance(v, Tensor) else v
        for k, v in group.items()
        if k not in ("params", "param_names")
    }


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)
