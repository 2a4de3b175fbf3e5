import itertools
import pickle

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from torchremat.errors import PolicyError, PolicyValueError
from torchremat.policies.verdicts import (
    Offloadable,
    Recompute,
    Saveable,
    as_answer,
    as_verdict,
    both,
    either,
    opposite,
)

OFFLOAD = Offloadable("device", "pinned_host")
ELSEWHERE = Offloadable("device", torch.device("cpu"))
ALL = [Recompute(), OFFLOAD, Saveable()]


@pytest.mark.parametrize("verdict", [*ALL, ELSEWHERE])
def test_verdicts_are_values(verdict):
    assert pickle.loads(pickle.dumps(verdict)) == verdict
    assert hash(pickle.loads(pickle.dumps(verdict))) == hash(verdict)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (True, Saveable()),
        (False, Recompute()),
        (Saveable, Saveable()),
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
        (3, r"the policy 'p', asked about aten.sin.default, answered 3 \(int\)"),
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


def test_or_keeps_the_most_and_and_the_least():
    for i, j in itertools.product(range(3), repeat=2):
        assert either(ALL[i], ALL[j]) == ALL[max(i, j)]
        assert both(ALL[i], ALL[j]) == ALL[min(i, j)]


def test_of_two_ways_to_offload_the_left_one_stands():
    assert either(OFFLOAD, ELSEWHERE) == both(OFFLOAD, ELSEWHERE) == OFFLOAD
    assert either(ELSEWHERE, OFFLOAD) == both(ELSEWHERE, OFFLOAD) == ELSEWHERE


def test_opposite():
    assert [opposite(verdict) for verdict in ALL] == [Saveable(), Recompute(), Recompute()]


@pytest.mark.parametrize(
    ("src", "dst", "error", "match"),
    [
        ("device", "device", PolicyValueError, r"moves nothing.*tr.Saveable"),
        ("device", "host", PolicyValueError, r"dst='host' is no place.*torch.device\('cuda:0'\)"),
        ("cpu", "device", PolicyValueError, r"src='cpu' is no place"),
        (0, "device", PolicyError, r"src=0 is a int; a place is 'device', 'pinned_host'"),
    ],
)
def test_bad_places(src, dst, error, match):
    with pytest.raises(error, match=match):
        Offloadable(src, dst)
