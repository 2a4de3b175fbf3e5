"""Policies that limit the bytes of whole calls on tapes: what a recorder needs of a budget.

forward   each value          is it saved?          `TapeCall.lets_save`, by what was planned
          each operator       too many bytes?       `TapeCall.limit`, then values are dropped
at the end                    the tape is known     `TapeCall.settle` says what stays saved
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchremat.policies.policy import Policy, Value
from torchremat.policies.verdicts import NotSaved, Verdict
from torchremat.remat.tape.contents import Content, Entry
from torchremat.remat.tape.tape import TapedTensor
from torchremat.remat.tape.tape_decisions import Site


@dataclass(frozen=True, eq=False)
class TapeRecord:
    """A call that is over, for those who decide what stays saved of it.

    Attributes:
        made: the contents that its operators made, in order.
        packed: what autograd saves.
        outputs: the contents of its results.
        roots: the nodes of autograd that made its results, with the number of the output of each.
        first_node: nodes of autograd with lower numbers were made before the call.
        available: contents that are in memory, by `id`: nothing else can stay saved.
    """

    made: Sequence[Content]
    packed: Sequence[TapedTensor]
    outputs: Sequence[Content]
    roots: Sequence[tuple[Any, int]]
    first_node: int
    available: frozenset[int]


class TapeCall(ABC):
    """The decisions on one call."""

    @abstractmethod
    def lets_save(self, place: Site, count: int) -> bool:
        """Whether the value is saved that is the `count`-th of this call at its place."""

    @abstractmethod
    def limit(self, plain_bytes: int) -> float:
        """The most bytes alive, if without rematerialisation so many were alive until now."""

    @property
    @abstractmethod
    def is_tight(self) -> bool:
        """Whether there must be room below the limit for what the next operator makes."""

    @abstractmethod
    def find_walls(
        self, made: Sequence[Content], is_there: Callable[[Content], bool]
    ) -> frozenset[int]:
        """Find the contents that must not be dropped, by `id`, of those that are in memory.

        `made`: the contents that operators made until now.
        """

    @abstractmethod
    def seconds_of(self, entry: Entry) -> float:
        """The time that an operator takes to run again."""

    @abstractmethod
    def settle(self, record: TapeRecord) -> frozenset[int]:
        """Choose the contents that stay saved, by `id`, of those that are available."""


class TapeJob(ABC):
    """The calls of one function, which have a plan in common."""

    num_plans: int

    @abstractmethod
    def begin_call(self) -> TapeCall:
        """Begin to decide on a call."""

    @abstractmethod
    def describe(self) -> str:
        """The bytes and the plans as a line of a report."""


class LimitingPolicy(Policy, ABC):
    """A policy on tapes that limits the bytes of whole calls; it decides on no value by itself."""

    reads_sizes = False

    def decide(self, value: Value) -> Verdict:
        return NotSaved()

    @abstractmethod
    def begin_tapes(self, has_begun: bool) -> TapeJob:
        """Begin to decide on the calls of one function, in a training that may have begun."""
