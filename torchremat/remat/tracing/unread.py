"""A trace does not depend on what its function changes but does not read."""

from collections.abc import Callable, Mapping
from typing import Any

from torchremat.autodiff.joint import Joint
from torchremat.autodiff.matching import match_forward
from torchremat.remat.escapes.reach import Roots
from torchremat.remat.escapes.read_watch import Spot, has_stand_ins
from torchremat.remat.tracing.function_trace import FunctionTrace


def forget_unread(
    made: FunctionTrace,
    known: set[Spot],
    trace: Callable[[Mapping[Spot, Any]], FunctionTrace],
    roots: Roots,
) -> None:
    """Let what `made` only adds to have any value. `known` spots are read; others may join them.

    Another trace tells, in which the given spots are watched.
    """
    spots = {spot: value for spot, value in made.escapes.spots.items() if spot not in known}
    if spots and not has_stand_ins():
        read = _find_reads(made, spots, trace)
        known |= read
        made.escapes.forget_unread(spots.keys() - read, roots)


def _find_reads(
    made: FunctionTrace,
    spots: Mapping[Spot, Any],
    trace: Callable[[Mapping[Spot, Any]], FunctionTrace],
) -> set[Spot]:
    try:
        again = trace(spots)
    except Exception:  # code that cannot run on stand-ins has read them
        return set(spots)
    if not _are_alike(made.region.joint, again.region.joint):
        return set(spots)  # the reads of C, and `n is None`, are not noted
    return {spot for spot in spots if again.watches[spot].is_read}


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
