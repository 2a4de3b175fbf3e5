"""A trace does not depend on what its function does not read: what it changes, and arguments."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torchremat.autodiff.joint import Joint
from torchremat.autodiff.matching import match_forward
from torchremat.remat.escapes.reach import Roots
from torchremat.remat.escapes.read_watch import (
    Spot,
    Watch,
    has_stand_ins,
    note_held,
    with_stand_ins,
)
from torchremat.remat.tracing.function_trace import FunctionTrace


def forget_unread(
    made: FunctionTrace,
    known: set[Spot],
    trace: Callable[[Mapping[Spot, Any]], FunctionTrace],
    arguments: tuple[Any, Any],
    counts_calls: bool,
) -> None:
    """Let what `made` only adds to have any value. `known` spots are read; others may join them.

    Another trace tells, in which the given spots are watched. A counter goes on in each call if
    `counts_calls`, else it stands still.
    """
    spots = {spot: value for spot, value in made.escapes.spots.items() if spot not in known}
    if not spots or has_stand_ins():
        return
    unread = _find_unread(made, spots, trace)
    known |= spots.keys() - unread.keys()
    roots = Roots(made.function, arguments)
    if counts_calls:
        made.escapes.count_on({spot: watch.steps for spot, watch in unread.items()}, roots)
    else:
        made.escapes.forget_unread(unread, roots)


def _find_unread(
    made: FunctionTrace,
    spots: Mapping[Spot, Any],
    trace: Callable[[Mapping[Spot, Any]], FunctionTrace],
) -> dict[Spot, Watch]:
    try:
        again = trace(spots)
    except Exception:  # code that cannot run on stand-ins has read them
        return {}
    if not _are_alike(made.region.joint, again.region.joint):
        return {}  # the reads of C, and `n is None`, are not noted
    return {spot: again.watches[spot] for spot in spots if not again.watches[spot].is_read}


def find_unread_numbers(
    made: FunctionTrace,
    numbers: Iterable[int],
    trace: Callable[[Mapping[int, Watch]], FunctionTrace],
) -> set[int]:
    """Find those `numbers` among the arguments, counted from 0, that the function does not read.

    Another trace tells, with stand-ins in their places.
    """
    watches = {number: Watch() for number in numbers}
    if not watches or made.escapes or has_stand_ins():
        return set()
    try:
        with with_stand_ins(watches.values()):
            again = trace(watches)
    except Exception:  # code that cannot run on stand-ins has read them
        return set()
    ours, theirs = made.region.joint, again.region.joint
    is_alike = not again.escapes and _targets(ours) == _targets(theirs) and _are_alike(ours, theirs)
    del again, theirs
    note_held(watches.values())
    return {i for i, watch in watches.items() if is_alike and not watch.is_read}


def _targets(joint: Joint) -> list[object]:
    return [node.target for node in joint.module.graph.nodes if node.op == "call_function"]


def _are_alike(a: Joint, b: Joint) -> bool:
    """Whether two graphs compute the same."""
    ours, theirs = a.find_live_forward_nodes(), b.find_live_forward_nodes()
    pairs = match_forward(a, b, ours, strict=False)
    found = match_forward(b, a, theirs, strict=False)
    same = match_forward(b, b, theirs)
    outputs = [same.get(node, node) for node in b.outputs]
    return (
        len(pairs) == len(ours)
        and len(found) == len(theirs)
        and [pairs.get(node, node) for node in a.outputs] == outputs
    )
