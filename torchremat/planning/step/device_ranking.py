"""Whether a plan that was made by the costs of one device suits another.

A plan saves what is dear to recompute for its bytes. Which values are dear differs by device: where
memory is slow beside multiplication, an activation is worth more of it than a product.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, fx

from torchremat.autodiff.joint import Joint
from torchremat.graph.nodes import all_items, call_of, is_forward
from torchremat.graph.schedule import GraphSchedule
from torchremat.planning.memory.storage_bytes import storage_nbytes


@dataclass(frozen=True)
class _Choice:
    """An operator of the forward pass whose results a plan saves, or else makes again."""

    seconds: float
    nbytes: int
    is_saved: bool


def find_spared_share(
    joint: Joint, schedule: GraphSchedule, seconds: Callable[[fx.Node], float]
) -> float:
    """The time that the saved bytes spare, as a part of what as many bytes could spare at best.

    It is 1 where values are saved in the order of their time for each byte. Values that only the
    rest of a graph forces on a plan make it less, by the costs of every device.

    Args:
        joint: the graph.
        schedule: what is saved and recomputed of it.
        seconds: the time of an operator.
    """
    choices = _find_choices(joint, schedule, seconds)
    room = sum(choice.nbytes for choice in choices if choice.is_saved)
    spared = sum(choice.seconds for choice in choices if choice.is_saved)
    best = 0.0
    for choice in sorted(choices, key=lambda c: c.seconds / c.nbytes, reverse=True):
        taken = min(choice.nbytes, room)
        best += choice.seconds * taken / choice.nbytes
        room -= taken
    return spared / best if best else 1.0


def count_added_seconds(schedule: GraphSchedule, seconds: Callable[[fx.Node], float]) -> float:
    """The time of what a schedule runs again."""
    runs = Counter((*schedule.forward, *schedule.backward))
    return sum((count - 1) * seconds(call) for call, count in runs.items())


def _find_choices(
    joint: Joint, schedule: GraphSchedule, seconds: Callable[[fx.Node], float]
) -> list[_Choice]:
    saved: dict[fx.Node, int] = {}
    for node in schedule.saved:
        call = call_of(node)
        if call.op == "call_function":
            saved[call] = saved.get(call, 0) + _count_bytes(node)
    again = {call for call in schedule.backward if is_forward(call)} - saved.keys()
    recomputed = {
        call: sum(map(_count_bytes, all_items(call).values() or (call,))) for call in again
    }
    return [
        _Choice(seconds(call), nbytes, call in saved)
        for call, nbytes in (*saved.items(), *recomputed.items())
        if nbytes
    ]


def _count_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return storage_nbytes(value) if isinstance(value, Tensor) else 0
