import itertools
import pickle

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from torchremat import NotSaved, Offloadable, Recompute, Saveable
from torchremat.errors import PolicyError, PolicyValueError
from torchremat.policies.verdicts import as_answer, as_verdict, complement, intersection, union

OFFLOAD = Offloadable("device", "pinned_host")
ELSEWHERE = Offloadable("device", torch.device("cpu"))
ALL = [NotSaved(), Recompute(), OFFLOAD, Saveable()]


@pytest.mark.parametrize("verdict", [*ALL, ELSEWHERE])
def test_verdicts_are_values(verdict):
    assert pickle.loads(pickle.dumps(verdict)) == verdict
    assert hash(pickle.loads(pickle.dumps(verdict))) == hash(verdict)
    assert eval(repr(verdict).replace("device(type=", "torch.device(type=")) == verdict


def test_two_verdicts_that_differ_are_two_values():
    assert len({*ALL, ELSEWHERE}) == 5
    assert False not in ALL
    assert [bool(verdict) for verdict in ALL] == [False, False, True, True]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (True, Saveable()),
        (False, NotSaved()),
        (Saveable, Saveable()),
        (NotSaved, NotSaved()),
        (Recompute, Recompute()),
        *((verdict, verdict) for verdict in ALL),
    ],
)
def test_answers(answer, verdict):
    assert as_verdict(answer, "p") == verdict
    assert as_verdict(as_answer(verdict), "p") == verdict


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (3, r"the policy 'p', called for aten.sin.default, answered 3 \(int\)"),
        (1, r"A policy answers True or False, tr.Saveable, tr.Recompute or tr.Offloadable"),
        (np.True_, r"answered np.True_ \(bool\w*\).*goes through bool\(\.\.\.\)"),
        (torch.tensor(True), r"answered tensor\(True\) \(Tensor\)"),
        (None, r"answered None \(NoneType\).*lack a `return`"),
        (Offloadable, r"answered <class .*tr.Offloadable\('device', 'pinned_host'\)"),
        (CheckpointPolicy.MUST_SAVE, r"goes through checkpoint_policies.from_selective"),
        ("save", r"answered 'save' \(str\)"),
    ],
)
def test_what_is_no_answer_is_a_type_error(answer, match):
    with pytest.raises(PolicyError, match=match) as info:
        as_verdict(answer, "p", torch.ops.aten.sin.default)
    assert isinstance(info.value, TypeError)


def test_union_saves_the_most_and_intersection_the_least():
    """A verdict that insists overrules one that does not ask, in both."""
    least_first = [Recompute(), NotSaved(), OFFLOAD, Saveable()]
    for i, j in itertools.product(range(4), repeat=2):
        assert union(ALL[i], ALL[j]) == ALL[max(i, j)]
        assert intersection(least_first[i], least_first[j]) == least_first[min(i, j)]


def test_of_two_ways_to_offload_the_left_one_stands():
    assert union(OFFLOAD, ELSEWHERE) == intersection(OFFLOAD, ELSEWHERE) == OFFLOAD
    assert union(ELSEWHERE, OFFLOAD) == intersection(ELSEWHERE, OFFLOAD) == ELSEWHERE


def test_complement():
    assert [complement(v) for v in ALL] == [Saveable(), Saveable(), NotSaved(), NotSaved()]


@pytest.mark.parametrize(
    ("src", "dst", "error", "match"),
    [
        ("device", "device", PolicyValueError, r"moves nothing.*tr.Saveable"),
        (
            "device",
            "host",
            PolicyValueError,
            r"dst='host' is not a place.*torch.device\('cuda:0'\)",
        ),
        ("cpu", "device", PolicyValueError, r"src='cpu' is not a place"),
        (0, "device", PolicyError, r"src=0 is a int; a place is 'device', 'pinned_host'"),
    ],
)
def test_bad_places(src, dst, error, match):
    with pytest.raises(error, match=match):
        Offloadable(src, dst)
