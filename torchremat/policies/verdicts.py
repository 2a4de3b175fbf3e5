"""Verdicts: a policy's answer about one value, and how two answers combine.

A verdict is a permission. `Saveable` *lets* a value be saved; it is saved if the backward pass
needs it. Two verdicts say no: `NotSaved` leaves the last word to the library, which saves a value
whose recomputation is unsafe (`autodiff/replay_rules.py`); `Recompute` insists.

    p | q    the later of the two in `NotSaved, Recompute, Offloadable, Saveable`
    p & q    the earlier of the two in `Recompute, NotSaved, Offloadable, Saveable`
    ~p       `NotSaved` and `Recompute` become `Saveable`; all else becomes `NotSaved`

So a policy that insists overrules one that does not ask, in `|` and in `&`. Of two `Offloadable`
with different places the left one stands.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch

from torchremat.errors import PolicyError, PolicyValueError
from torchremat.graph.ops import op_name

_PLACES = ("device", "pinned_host")


@dataclass(frozen=True, slots=True)
class Saveable:
    """The value may be saved for the backward pass, where it is. `True` means this verdict."""


@dataclass(frozen=True, slots=True)
class NotSaved:
    """The policy does not ask for the value to be saved. `False` means this verdict.

    The value is recomputed, unless that is unsafe: the library saves what selects (`topk`,
    `sort`), what communicates, and what adds with atomics. `Recompute` insists instead. Like
    `False`, this verdict is false.

    >>> import torch
    >>> import torchremat as tr
    >>> def largest(x):
    ...     return x.sin().topk(2).values.exp()
    >>> x = torch.ones(3, requires_grad=True)
    >>> tr.explain(largest, x, policy=lambda op, *avals, **params: tr.NotSaved()).total
    24
    >>> tr.explain(largest, x, policy=lambda op, *avals, **params: tr.Recompute()).total
    0
    """

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Recompute:
    """The policy insists that the value is recomputed, even if the result may differ.

    `False` means `NotSaved`, which does not insist. What must never run twice, a random draw or a
    write to an argument, is saved under this verdict too. Like `False`, this verdict is false, so
    that `p(op) or q(op)` reads as it does for bools.
    """

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Offloadable:
    """The value may be saved in another memory: moved from `src` to `dst`, and back when needed.

    Values on the CPU or a GPU go to the host's memory, `"pinned_host"` or `torch.device("cpu")`.
    Elsewhere they stay, with an `OffloadWarning`.

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


Verdict: TypeAlias = Saveable | NotSaved | Recompute | Offloadable
Answer: TypeAlias = bool | Verdict

_UNION_ORDER = (NotSaved, Recompute, Offloadable, Saveable)
_INTERSECTION_ORDER = (Recompute, NotSaved, Offloadable, Saveable)


def as_verdict(answer: object, policy: object, op: object = None) -> Verdict:
    """The verdict that `answer` stands for, which `policy` gave for `op`.

    `True`, `False`, the verdicts and their classes (but `Offloadable`) stand for one. All else
    raises `PolicyError` (a `TypeError`), also an answer that is merely true or false (`1`,
    `numpy.True_`, a tensor): an accident in a policy is more likely than a meaning.

    >>> as_verdict(True, "my_policy"), as_verdict(False, "my_policy")
    (Saveable(), NotSaved())
    """
    if isinstance(answer, bool):
        return Saveable() if answer else NotSaved()
    if isinstance(answer, Verdict):
        return answer
    for kind in (Saveable, NotSaved, Recompute):
        if answer is kind:
            return kind()
    raise PolicyError(
        f"the policy {_describe(policy)}{_name_call(op)} answered {answer!r} "
        f"({type(answer).__name__}). A policy answers True or False, tr.Saveable, tr.Recompute or "
        f"tr.Offloadable(src, dst). {_suggest_cure(answer)}"
    )


def as_answer(verdict: Verdict) -> Answer:
    """The plainest answer that stands for `verdict`: a bool wherever one does.

    >>> as_answer(Saveable()), as_answer(NotSaved()), as_answer(Recompute())
    (True, False, Recompute())
    """
    return bool(verdict) if isinstance(verdict, Saveable | NotSaved) else verdict


def union(left: Verdict, right: Verdict) -> Verdict:
    """The verdict of `p | q` where `p` says `left` and `q` says `right`.

    >>> union(Recompute(), Offloadable("device", "pinned_host"))
    Offloadable(src='device', dst='pinned_host')
    """
    return max(left, right, key=lambda verdict: _UNION_ORDER.index(type(verdict)))


def intersection(left: Verdict, right: Verdict) -> Verdict:
    """The verdict of `p & q` where `p` says `left` and `q` says `right`.

    >>> intersection(Saveable(), Offloadable("device", "pinned_host"))
    Offloadable(src='device', dst='pinned_host')
    """
    return min(left, right, key=lambda verdict: _INTERSECTION_ORDER.index(type(verdict)))


def complement(verdict: Verdict) -> Verdict:
    """The verdict of `~p` where `p` says `verdict`.

    >>> complement(Recompute()), complement(Saveable())
    (Saveable(), NotSaved())
    """
    return Saveable() if isinstance(verdict, NotSaved | Recompute) else NotSaved()


def _check_place(end: str, place: object) -> None:
    if isinstance(place, torch.device):
        return
    rule = "a place is 'device', 'pinned_host' or a torch.device"
    if not isinstance(place, str):
        raise PolicyError(f"Offloadable: {end}={place!r} is a {type(place).__name__}; {rule}")
    if place not in _PLACES:
        raise PolicyValueError(
            f"Offloadable: {end}={place!r} is not a place; {rule}, such as torch.device('cuda:0')"
        )


def _describe(policy: object) -> str:
    source = getattr(policy, "source", None)
    return f"{policy!r}" if source is None else f"{policy!r} from {source}"


def _name_call(op: object) -> str:
    return "" if op is None else f", called for {op_name(op)},"


def _suggest_cure(answer: object) -> str:
    if answer is None:
        return "Does a branch of it lack a `return`?"
    if answer is Offloadable:
        return "Offloadable says from where and to where: tr.Offloadable('device', 'pinned_host')"
    if type(answer).__name__ == "CheckpointPolicy":
        return "A policy of torch.utils.checkpoint goes through checkpoint_policies.from_selective"
    return "What is only true or false goes through bool(...)"
