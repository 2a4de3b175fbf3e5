"""Verdicts: what a policy answers of a value, and how answers combine.

A verdict is a permission. `Saveable` *lets* a value be saved; it is, if the backward pass needs it.
The verdicts are ordered by what they keep on the device, `Recompute < Offloadable < Saveable`:

    p | q    the greater of the two    (any keeps it: it is kept, by the quickest way)
    p & q    the lesser of the two     (any recomputes it: it is recomputed)
    ~p       Recompute becomes Saveable; Saveable and Offloadable become Recompute

Of two `Offloadable` with different places the left one stands, in `|` and `&` alike.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch

from torchremat.errors import PolicyError, PolicyValueError
from torchremat.graph.ops import op_name

_PLACES = ("device", "pinned_host")


@dataclass(frozen=True, slots=True)
class Saveable:
    """The value may be saved for the backward pass, where it is. `True` says the same."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """The value may not be saved: what needs it recomputes it. `False` says the same."""


@dataclass(frozen=True, slots=True)
class Offloadable:
    """The value may be kept in another memory: moved from `src` to `dst`, and back when needed.

    Values on the CPU or a GPU go to the host's memory, `"pinned_host"` or `torch.device("cpu")`:
    see `remat/host_pool.py`. Elsewhere they stay, with an `OffloadWarning`.

    `src` and `dst` are each `"device"`, `"pinned_host"` or a `torch.device`, and differ; else
    `PolicyError` (a `TypeError`) or `PolicyValueError` (a `ValueError`) is raised.

    >>> Offloadable("device", "pinned_host")
    Offloadable(src='device', dst='pinned_host')
    """

    src: str | torch.device
    dst: str | torch.device

    def __post_init__(self) -> None:
        for end, place in (("src", self.src), ("dst", self.dst)):
            _check_place(end, place)
        if self.src == self.dst:
            raise PolicyValueError(
                f"Offloadable(src={self.src!r}, dst={self.dst!r}) moves nothing: src and dst must "
                "differ. To keep a value where it is answer tr.Saveable"
            )


Verdict: TypeAlias = Saveable | Recompute | Offloadable

UNSAID = Recompute()
"""The verdict, equal to any `Recompute`, on what a policy leaves out: it does not insist."""

_RANKS: dict[type, int] = {Recompute: 0, Offloadable: 1, Saveable: 2}


def as_verdict(answer: object, policy: object, op: object = None) -> Verdict:
    """The verdict that `answer`, given by `policy` when asked about `op`, stands for.

    `True`, `False`, the verdicts and the classes `Saveable` and `Recompute` stand for one. All else
    raises `PolicyError` (a `TypeError`), also what is merely true or false (`1`, `numpy.True_`, a
    tensor): an accident in a policy is more likely than a meaning.

    >>> as_verdict(True, "my_policy"), as_verdict(Recompute, "my_policy")
    (Saveable(), Recompute())
    """
    if isinstance(answer, bool):
        return Saveable() if answer else UNSAID
    if isinstance(answer, Saveable | Recompute | Offloadable):
        return answer
    if answer is Saveable or answer is Recompute:
        return Saveable() if answer is Saveable else Recompute()
    raise PolicyError(
        f"the policy {_described(policy)}{_asked(op)} answered {answer!r} "
        f"({type(answer).__name__}). A policy answers True or False, tr.Saveable, tr.Recompute or "
        f"tr.Offloadable(src, dst). {_cure(answer)}"
    )


def as_answer(verdict: Verdict) -> bool | Offloadable:
    """The plainest answer that stands for `verdict`: a bool wherever one does.

    >>> as_answer(Saveable()), as_answer(Recompute())
    (True, False)
    """
    return verdict if isinstance(verdict, Offloadable) else isinstance(verdict, Saveable)


def either(left: Verdict, right: Verdict) -> Verdict:
    """What `p | q` says where `p` says `left` and `q` says `right`.

    >>> either(Recompute(), Offloadable("device", "pinned_host"))
    Offloadable(src='device', dst='pinned_host')
    """
    if left is UNSAID:
        return right
    return right if _RANKS[type(right)] > _RANKS[type(left)] else left


def both(left: Verdict, right: Verdict) -> Verdict:
    """What `p & q` says where `p` says `left` and `q` says `right`.

    >>> both(Saveable(), Offloadable("device", "pinned_host"))
    Offloadable(src='device', dst='pinned_host')
    """
    if left is UNSAID:
        return right if isinstance(right, Recompute) else left
    return right if _RANKS[type(right)] < _RANKS[type(left)] else left


def opposite(verdict: Verdict) -> Verdict:
    """What `~p` says where `p` says `verdict`.

    >>> opposite(Offloadable("device", "pinned_host"))
    Recompute()
    """
    return Saveable() if isinstance(verdict, Recompute) else UNSAID


def insists(verdict: Verdict) -> bool:
    """Whether the policy means this very value to be computed again, and not just all the others.

    >>> insists(Recompute()), insists(as_verdict(False, "my_policy"))
    (True, False)
    """
    return isinstance(verdict, Recompute) and verdict is not UNSAID


def _check_place(end: str, place: object) -> None:
    if isinstance(place, torch.device):
        return
    rule = "a place is 'device', 'pinned_host' or a torch.device"
    if not isinstance(place, str):
        raise PolicyError(f"Offloadable: {end}={place!r} is a {type(place).__name__}; {rule}")
    if place not in _PLACES:
        raise PolicyValueError(
            f"Offloadable: {end}={place!r} is no place; {rule}, such as torch.device('cuda:0')"
        )


def _described(policy: object) -> str:
    source = getattr(policy, "source", None)
    return f"{policy!r}" if source is None else f"{policy!r} from {source}"


def _asked(op: object) -> str:
    return "" if op is None else f", asked about {op_name(op)},"


def _cure(answer: object) -> str:
    if answer is None:
        return "Does a branch of it lack a `return`?"
    if answer is Offloadable:
        return "Offloadable says from where and to where: tr.Offloadable('device', 'pinned_host')"
    if type(answer).__name__ == "CheckpointPolicy":
        return "A policy of torch.utils.checkpoint goes through checkpoint_policies.from_selective"
    return "What is only true or false goes through bool(...)"
