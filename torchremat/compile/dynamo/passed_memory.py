"""The memory that passes between the graphs of a step: what one gives and others read.

    forward     graph 1  --a-->  graph 2  --b-->  Python  --c-->  graph 3

It is found from the tensors of a real step. A graph saves what its backward pass reads. What is
alive when the backward pass begins, and no graph saves, is the user's. All else is freed after its
last reader, or later, where a variable of Python has it.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchremat import _torch

Sizes: TypeAlias = dict[_torch.StorageReference, int]
"""Pieces of memory and their bytes."""


@dataclass(frozen=True, eq=False)
class CallTensors:
    """The tensors of one call of a graph, by their memory.

    Attributes:
        places: of each argument; `None` for what takes no memory of the step: numbers, parts of
            weights.
        reads: the memory of the arguments.
        gives: that of the results, but for views of arguments.
        leaves: the parameters, whose gradients stay.
        made: the memory of arguments that autograd knows to be made in this step.
        differentiable: all that has a gradient, but for parameters.
        alive: what earlier calls gave, or Python made, and was there after the call; see
            `note_alive`.
    """

    places: list[_torch.StorageReference | None]
    reads: Sizes
    gives: Sizes
    leaves: list[weakref.ref[Tensor]]
    made: set[_torch.StorageReference]
    differentiable: set[_torch.StorageReference]
    alive: set[_torch.StorageReference]

    @classmethod
    def of(cls, args: Sequence[Any], results: Sequence[Any]) -> "CallTensors":
        found = cls([], {}, {}, [], set(), set(), set())
        for arg in args:
            found.places.append(found._add_argument(arg) if _has_memory(arg) else None)
        for result in filter(_has_memory, results):
            reference = _torch.StorageReference(result.untyped_storage())
            if reference not in found.reads and not _torch.is_view_of_leaf(result):
                found.gives[reference] = result.untyped_storage().nbytes()
                if result.grad_fn is not None:
                    found.differentiable.add(reference)
        return found

    def note_alive(self, before: Iterable["CallTensors"]) -> None:
        """Note what earlier calls gave, or Python made, and is there now."""
        made = {reference for call in before for reference in (*call.gives, *call.made)}
        self.alive.update(reference for reference in made if not reference.expired())

    def _add_argument(self, arg: Tensor) -> _torch.StorageReference | None:
        if arg.is_leaf and arg.requires_grad:
            self.leaves.append(weakref.ref(arg))
            return None
        if _torch.is_view_of_leaf(arg):
            return None
        reference = _torch.StorageReference(arg.untyped_storage())
        self.reads[reference] = arg.untyped_storage().nbytes()
        if arg.grad_fn is not None:
            self.made.add(reference)
            self.differentiable.add(reference)
        return reference


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


@dataclass(frozen=True)
class CallSaves:
    """The arguments and results of a call that autograd saves.

    Attributes:
        inputs: positions of arguments.
        num_inputs: how many there are; if the call has more or fewer, all are taken to be saved.
        has_outputs: whether results are saved.
    """

    inputs: frozenset[int]
    num_inputs: int
    has_outputs: bool


@dataclass(frozen=True)
class _Piece:
    """One piece of memory made in the step.

    Attributes:
        made: the call that gives it, or before which Python made it.
        is_given: whether a call gives it.
        seen: the last call after which it was there.
        readers: the calls that read it, each with the position of the argument.
        is_alive: whether it is there when the backward pass begins.
        has_gradient: whether a cotangent of its size waits in the backward pass.
    """

    nbytes: int
    made: int
    is_given: bool
    is_alive: bool
    has_gradient: bool = False
    seen: int = 0
    readers: tuple[tuple[int, int], ...] = ()

    @property
    def last_read(self) -> int:
        return max((call for call, _ in self.readers), default=self.made)

    @property
    def last(self) -> int:
        """The last call before it is freed, if autograd does not save it."""
        return self.last_read if self.is_alive else max(self.seen, self.last_read)

    def is_there(self, call: int) -> bool:
        """Whether it is made before `call` runs."""
        return self.made < call or (self.made == call and not self.is_given)

    def is_saved(self, saves: Sequence[CallSaves], counts: Sequence[int]) -> bool:
        if self.is_given and saves[self.made].has_outputs:
            return True
        return any(
            position in saves[call].inputs or saves[call].num_inputs != counts[call]
            for call, position in self.readers
        )


class PassedMemory:
    """The memory between the `calls` of a forward pass, given in their order.

    It is made when the backward pass begins. `saves` are those of this step. Plans are for values
    that are `room` times as large.
    """

    def __init__(
        self, calls: Sequence[CallTensors], saves: Sequence[CallSaves], room: float = 1.0
    ) -> None:
        self._room = room
        self._counts = [len(call.places) for call in calls]
        self._pieces = list(_find_pieces(calls))
        self._gradients_after = list(_count_gradients_after(calls))
        self._users = {
            i for i, p in enumerate(self._pieces) if p.is_alive and not self._is_saved(p, saves)
        }

    def _is_saved(self, piece: _Piece, saves: Sequence[CallSaves]) -> bool:
        return piece.is_saved(saves, self._counts)

    def count_bytes(self, saves: Sequence[CallSaves]) -> list[int]:
        """The bytes alive while each call runs, besides what graphs save inside.

        In the backward pass there are gradients of later calls. A call's own plan has its results
        alive to the end, so those that are freed before its backward pass are taken off.
        """
        lasting = [i in self._users or self._is_saved(p, saves) for i, p in enumerate(self._pieces)]
        pairs = list(zip(self._pieces, lasting, strict=True))
        found = []
        for i, gradients in enumerate(self._gradients_after):
            others = [(p, lasts) for p, lasts in pairs if p.is_there(i)]
            forward = sum(p.nbytes for p, lasts in others if lasts or p.last >= i)
            backward = sum(p.nbytes for p, lasts in others if lasts)
            backward += sum(p.nbytes for p, _ in others if p.has_gradient and p.last_read > i)
            freed = (p for p, lasts in pairs if p.made == i and p.is_given and not lasts)
            backward -= sum(p.nbytes for p in freed)
            larger = max(forward, backward + int(gradients / self._room))
            found.append(int(self._room * larger))
        return found


def _count_gradients_after(calls: Sequence[CallTensors]) -> Iterator[int]:
    """For each call the bytes of the gradients that later ones make, each once."""
    leaves = [[leaf() for leaf in call.leaves] for call in calls]
    for i, _ in enumerate(calls):
        later = {id(leaf): leaf for some in leaves[i + 1 :] for leaf in some if leaf is not None}
        yield sum(leaf.numel() * leaf.element_size() for leaf in later.values())


def _find_pieces(calls: Sequence[CallTensors]) -> Iterator[_Piece]:
    found: dict[_torch.StorageReference, _Piece] = {}
    for i, call in enumerate(calls):
        for reference in call.made - found.keys():
            alive = not reference.expired()
            found[reference] = _Piece(call.reads[reference], i, is_given=False, is_alive=alive)
        for position, place in enumerate(call.places):
            if place in found:
                piece = found[place]
                found[place] = replace(piece, readers=(*piece.readers, (i, position)))
        for reference, nbytes in call.gives.items():
            alive = not reference.expired()
            found[reference] = _Piece(nbytes, i, is_given=True, is_alive=alive)
        for reference in call.differentiable & found.keys():
            found[reference] = replace(found[reference], has_gradient=True)
        for reference in call.alive & found.keys():
            found[reference] = replace(found[reference], seen=i)
    yield from found.values()
