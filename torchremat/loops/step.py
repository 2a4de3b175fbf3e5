"""One step of a loop, as a function of tensors alone.

    def body(h):                        step([h], [], [w])  ->  [new h], []
        return torch.tanh(h @ w)

The tensors that the user's functions close over are found when the first step runs, and are
arguments of every other: they have gradients, and transformations of `torch.func` see them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchremat import _torch
from torchremat.core.accelerators import get_all_generator_states, set_all_generator_states
from torchremat.core.trees import Structure
from torchremat.errors import ArgumentTypeError, EffectError
from torchremat.loops.captured import Arguments, Collector, Found, version_of
from torchremat.tracing.outer_arguments import handle_function_calls

Tensors = list[Tensor]

_CLOSED_OVER = "a tensor that it closes over"


@dataclass(frozen=True)
class StepLayout:
    """How many tensors a step has of each kind.

    Attributes:
        state: those that it passes to the next step.
        slices: those of `xs`, of which each step reads its part.
        shared: those that all steps read.
        stacked: results that are stacked over the steps.
    """

    state: int
    slices: int
    shared: int
    stacked: int

    def split(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The state, slices and shared ones of the inputs of a loop."""
        first, second = self.state, self.state + self.slices
        return list(tensors[:first]), list(tensors[first:second]), list(tensors[second:])


class Step(Protocol):
    """A step, of the user or made of another one."""

    @property
    def layout(self) -> StepLayout: ...

    def __call__(
        self, state: Tensors, slices: Tensors, shared: Tensors
    ) -> tuple[Tensors, Tensors]: ...

    def asks(self, state: Tensors, shared: Tensors) -> Any:
        """Whether the loop goes on: a truth value, or a tensor of one."""


class UserStep:
    """The functions of a user, which take and return trees.

    Args:
        body: takes the state, and a slice of `xs` if there is one.
        cond: whether another step runs, of the state; `None` if the number of steps is known.
        state: the structure of the state, of which `first` is the first.
        slices: the structure of `xs`, or `None`.

    Attributes:
        captured: the tensors that the functions close over.
        found: others of these, that a step after the first read.
        draws: whether a step draws random numbers.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        cond: Callable[[Any], Any] | None,
        state: Structure,
        first: Tensors,
        slices: Structure | None = None,
    ) -> None:
        self._body, self._cond = body, cond
        self._state, self._slices = state, slices
        self._stacked: Structure | None = None
        self._specs = [_spec(tensor) for tensor in first]
        self.captured: Tensors = []
        self.found = Found()
        self.draws = False
        self._versions: list[tuple[Tensor, int | None]] = []

    def look(self, state: Tensors, slices: Tensors) -> bool:
        """Run a first step to see what it reads, and what it returns. Its draws are undone.

        It does not run, and the answer is `False`, if the condition says that there is none.
        """
        before = get_all_generator_states()
        collector = Collector(self.captured, [*state, *slices])
        with torch.no_grad(), handle_function_calls(), _check_unwritten(state), collector.enter():
            if self._cond is not None and _is_false(self.asks_plainly(state)):
                return False
            result = self._call_body(state, slices)
        self._flatten(result)
        self._versions = collector.versions
        self.check_versions()
        after = get_all_generator_states()
        self.draws = any(not torch.equal(after[device], s) for device, s in before.items())
        set_all_generator_states(before.items())
        return True

    def take_found(self) -> None:
        """Make what steps have found further inputs of the loop."""
        self.captured += self.found.inputs
        self._versions += [(tensor, version_of(tensor)) for tensor in self.found.inputs]
        self.found.inputs.clear()
        self.found.others.clear()

    def check_versions(self) -> None:
        """Raise `EffectError` if a step wrote to what its functions close over."""
        for tensor, version in self._versions:
            _check_version(tensor, version, _CLOSED_OVER)
        if self.found.was_written():
            raise _writing_error(_CLOSED_OVER)
        self.found.others.clear()

    @property
    def layout(self) -> StepLayout:
        assert self._stacked is not None
        num_slices = 0 if self._slices is None else self._slices.num_values
        return StepLayout(
            self._state.num_values, num_slices, len(self.captured), self._stacked.num_values
        )

    def unflatten_stacked(self, values: Sequence[Tensor]) -> Any:
        assert self._stacked is not None
        return self._stacked.unflatten(values)

    def __call__(self, state: Tensors, slices: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        mode = Arguments(self.captured, shared, [*state, *slices], self.found)
        with _check_unwritten(state), mode.enter():
            result = self._call_body(state, slices)
        return self._flatten(result)

    def asks(self, state: Tensors, shared: Tensors) -> Any:
        with Arguments(self.captured, shared, state, self.found).enter():
            return self.asks_plainly(state)

    def run_plainly(self, state: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
        """One step, in which the functions read what they close over as it is."""
        return self._flatten(self._call_body(state, slices))

    def asks_plainly(self, state: Tensors) -> Any:
        assert self._cond is not None
        answer = self._cond(self._state.unflatten(state))
        if answer is None:
            raise ArgumentTypeError("cond_fun returned None: it must return whether to go on")
        return answer

    def _call_body(self, state: Tensors, slices: Tensors) -> Any:
        carry = self._state.unflatten(state)
        if self._slices is None:
            return self._body(carry), ()
        return self._body(carry, self._slices.unflatten(slices))

    def _flatten(self, result: Any) -> tuple[Tensors, Tensors]:
        if not isinstance(result, tuple) or len(result) != 2:
            raise ArgumentTypeError(
                "scan: the function must return a pair, the new state and a result to stack "
                f"(None for none), and returned {type(result).__name__}"
            )
        return self._flatten_state(result[0]), self._flatten_stacked(result[1])

    def _flatten_state(self, new: Any) -> Tensors:
        try:
            values = [as_tensor(leaf) for leaf in self._state.flatten(new)]
        except ValueError as error:
            raise ArgumentTypeError(
                f"the function must return a state like the first one: {error}"
            ) from None
        found = [_spec(tensor) for tensor in values]
        if found != self._specs:
            paths = zip(self._state.paths(), found, self._specs, strict=True)
            path, now, first = next(each for each in paths if each[1] != each[2])
            raise ArgumentTypeError(
                "each step must return a state like the first one, but state"
                f"{_torch.keystr(path)} was {_describe(first)}, and a step returned "
                f"{_describe(now)}"
            )
        return values

    def _flatten_stacked(self, result: Any) -> Tensors:
        if self._stacked is None:
            self._stacked = Structure.of(result, is_leaf_of_state, is_result=True)
        return [as_tensor(leaf) for leaf in self._stacked.flatten(result)]


def is_leaf_of_state(leaf: Any) -> bool:
    """Whether `leaf` is a tensor of a loop, or a number, which becomes one."""
    return isinstance(leaf, Tensor | bool | int | float | complex)


def as_tensor(leaf: Any) -> Tensor:
    return leaf if isinstance(leaf, Tensor) else torch.tensor(leaf)


def pick(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """The values whose flag is set.

    >>> pick("abc", (True, False, True))
    ['a', 'c']
    """
    return [value for value, flag in zip(values, flags, strict=True) if flag]


def is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_false(answer: Any) -> bool:
    """Whether the loop ends here. Of a batch each element has an answer of its own."""
    is_plain = not isinstance(answer, Tensor) or _torch.innermost_tensor(answer) is answer
    return is_plain and not answer


def _spec(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _describe(spec: tuple[Any, ...]) -> str:
    shape, dtype, device = spec
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


@contextmanager
def _check_unwritten(state: Tensors) -> Iterator[None]:
    """Raise `EffectError` if the block writes to a tensor of `state`."""
    versions = [version_of(tensor) for tensor in state]
    yield
    for tensor, version in zip(state, versions, strict=True):
        _check_version(tensor, version, "its state")


def _check_version(tensor: Tensor, version: int | None, whose: str) -> None:
    if version_of(tensor) != version:
        raise _writing_error(whose)


def _writing_error(whose: str) -> EffectError:
    return EffectError(
        f"the function of a loop writes to {whose}, in place. It runs again in the backward pass, "
        "and would write twice: return new values as parts of the state"
    )
