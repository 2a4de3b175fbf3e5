"""The two policies that offload: what they answer, what they refuse, how they are written."""

import pickle

import pytest
import torch

import torchremat as tr
from torchremat import checkpoint_policies as cp
from torchremat import name_p
from torchremat.errors import PolicyError, PolicyValueError, UnmatchedWarning
from torchremat.policies.policy import Value

aten = torch.ops.aten
TO_HOST = tr.Offloadable("device", "pinned_host")
DOTS = cp.offload_dot_with_no_batch_dims("device", "pinned_host")


def names(saved=(), offloaded=(), src="device", dst="pinned_host"):
    return cp.save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_src=src,
        offload_dst=dst,
    )


NAMES = names(["a"], ["b", "c"])


@pytest.mark.parametrize("op", ["mm", "addmm", "bmm", "mv", "convolution", "sin"])
def test_dots_are_those_of_the_policy_that_saves_them(op):
    op = getattr(aten, op).default
    saves = cp.dots_with_no_batch_dims_saveable(op)
    assert DOTS(op) == (TO_HOST if saves else False)


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        (("a",), tr.Saveable()),
        (("b",), TO_HOST),
        (("c", "d"), TO_HOST),
        (("a", "b"), tr.Saveable()),
        (("d",), tr.NotSaved()),
        ((), tr.NotSaved()),
    ],
)
def test_names(given, verdict):
    assert NAMES.decide(Value(aten.sin.default, names=given)) == verdict
    if len(given) == 1:
        found = NAMES(name_p, name=given[0])
        assert found == {tr.Saveable(): True, tr.NotSaved(): False}.get(verdict, verdict)
    assert NAMES(aten.mm.default) is False


@pytest.mark.parametrize(
    "policy", [DOTS, NAMES, names(["a"], [], torch.device("cuda"), torch.device("cpu"))]
)
def test_policies_are_values(policy):
    scope = vars(cp) | {"device": torch.device}
    again = eval(repr(policy), scope)
    assert again == policy == pickle.loads(pickle.dumps(policy))
    assert hash(again) == hash(policy)
    assert policy | cp.nothing_saveable == policy | cp.nothing_saveable


@pytest.mark.parametrize("policy", [DOTS, names([], ["a", "b"]), DOTS | names([], ["a"])])
def test_what_has_a_spelling_is_read_from_it(policy):
    assert tr.policy(policy.spelling) == policy


@pytest.mark.parametrize(
    "policy", [NAMES, cp.offload_dot_with_no_batch_dims("device", torch.device("cpu"))]
)
def test_what_no_spelling_says_has_none(policy):
    assert policy.spelling is None


def test_combinations():
    assert (DOTS | cp.dots_saveable)(aten.mm.default) is True
    assert (DOTS & cp.dots_saveable)(aten.mm.default) == TO_HOST
    assert (DOTS | cp.nothing_saveable)(aten.mm.default) == TO_HOST
    assert (~DOTS)(aten.mm.default) is False
    assert (~DOTS)(aten.sin.default) is True


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: names(["a", "b"], ["b"]), PolicyValueError, r"'b' would be both saved and offloa"),
        (lambda: names(["a"], [""]), PolicyValueError, "an empty name"),
        (lambda: names("a", []), PolicyError, r"names_which_can_be_saved='a'.*takes a list"),
        (lambda: names([1], []), PolicyError, "was given 1"),
        (lambda: names([], None), PolicyError, "takes a list"),
        (lambda: names([], ["a"], "device", "device"), PolicyValueError, "moves nothing"),
        (lambda: names([], ["a"], "device", "disk"), PolicyValueError, "'disk' is not a place"),
        (lambda: cp.offload_dot_with_no_batch_dims("gpu", "device"), PolicyValueError, "'gpu'"),
        (lambda: cp.offload_dot_with_no_batch_dims("device", 1), PolicyError, "dst=1 is a int"),
    ],
)
def test_what_is_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_a_name_that_no_value_has_is_told():
    f = tr.checkpoint(
        lambda x: tr.checkpoint_name(x.sin(), "attn").sin(), policy=names([], ["atn"])
    )
    with pytest.warns(UnmatchedWarning, match=r"'atn' matches nothing.*nearest: 'attn'"):
        f(torch.ones(3, requires_grad=True))
