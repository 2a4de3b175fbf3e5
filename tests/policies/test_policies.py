import functools
import pickle

import pytest
import torch

from torchremat import NotSaved, Offloadable, Recompute, Saveable, name_p
from torchremat import checkpoint_policies as cp
from torchremat.core.avals import Aval
from torchremat.errors import PolicyError, PolicyValueError
from torchremat.policies.policy import Policy, Value, as_policy

aten = torch.ops.aten
X = Aval((2, 3), torch.float32)
OFFLOAD = Offloadable("device", "pinned_host")

SIN = Value(aten.sin.default, (X,))
SIN_A = Value(aten.sin.default, (X,), names=("a",), outputs=(X,))
SIN_AB = Value(aten.sin.default, (X,), names=("a", "b"), outputs=(X,))
MM = Value(aten.mm.default, (X, X), module="layers.0.attn.proj")
MM_A = Value(aten.mm.default, (X, X), names=("a",), module="layers.1.mlp")
ADDMM = Value(aten.addmm.default, (X, X, X), module="head")
BMM = Value(aten.bmm.default, (X, X), module="layers.1.attn")
CONV = Value(aten.convolution.default, (X, X), module="stem")
ALL = [SIN, SIN_A, SIN_AB, MM, MM_A, ADDMM, BMM, CONV]


def offload_sin(op, *avals, **params):
    return OFFLOAD if op is aten.sin.default else Recompute


def save_sin(op, *avals, **params):
    return op is aten.sin.default


def pickled(policy):
    return pickle.loads(pickle.dumps(policy))


def saved(policy):
    """Which of ALL the policy lets be saved."""
    return [value for value in ALL if policy.decide(value) == Saveable()]


BUILT = [
    cp.everything_saveable,
    cp.nothing_saveable,
    cp.dots_saveable,
    cp.dots_with_no_batch_dims_saveable,
    cp.save_only_these_names("a", "b"),
    cp.save_any_names_but_these("a"),
    cp.save_anything_except_these_names("a"),
    cp.save_ops("aten.mm", aten.bmm),
    cp.recompute_ops(aten.sin.default),
    cp.save_modules("layers.*.attn"),
    cp.recompute_modules("layers.*"),
    cp.save_only_these_names(),
    cp.from_selective([aten.mm.default, name_p]),
    cp.dots_saveable | cp.save_only_these_names("a") | cp.save_modules("head"),
    (cp.dots_saveable | cp.save_only_these_names("a")) & ~cp.save_ops("aten.mm"),
    ~(cp.dots_saveable & cp.save_only_these_names("a")) | cp.nothing_saveable,
    ~cp.dots_saveable,
]


# --- what each lets be saved ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (cp.everything_saveable, ALL),
        (cp.nothing_saveable, []),
        (cp.dots_saveable, [MM, MM_A, ADDMM, BMM, CONV]),
        (cp.dots_with_no_batch_dims_saveable, [MM, MM_A, ADDMM]),
        (cp.save_only_these_names("a"), [SIN_A, SIN_AB, MM_A]),
        (cp.save_only_these_names("b", "c"), [SIN_AB]),
        (cp.save_only_these_names(), []),
        (cp.save_any_names_but_these("b"), [SIN_A, MM_A]),
        (cp.save_any_names_but_these(), [SIN_A, SIN_AB, MM_A]),
        (cp.save_anything_except_these_names("a"), [SIN, MM, ADDMM, BMM, CONV]),
        (cp.save_anything_except_these_names("b"), [SIN, SIN_A, MM, MM_A, ADDMM, BMM, CONV]),
        (cp.save_anything_except_these_names(), ALL),
        (cp.save_ops("aten.sin", aten.bmm), [SIN, SIN_A, SIN_AB, BMM]),
        (cp.save_ops("aten.mm"), [MM, MM_A, ADDMM]),
        (cp.save_ops(name_p), [SIN_A, SIN_AB, MM_A]),
        (cp.recompute_ops("aten.mm"), [SIN, SIN_A, SIN_AB, BMM, CONV]),
        (cp.recompute_ops(name_p), [SIN, MM, ADDMM, BMM, CONV]),
        (cp.recompute_ops(), ALL),
        (cp.save_modules("layers.*.attn"), [MM, BMM]),
        (cp.save_modules("layers.1"), [MM_A, BMM]),
        (cp.save_modules("head", "st?m"), [ADDMM, CONV]),
        (cp.save_modules("*"), ALL),
        (cp.save_modules("attn"), []),
        (cp.recompute_modules("layers"), [SIN, SIN_A, SIN_AB, ADDMM, CONV]),
        (cp.save_from_both_policies(cp.save_ops("aten.bmm"), "names:b"), [SIN_AB, BMM]),
        (cp.dots_saveable & cp.save_only_these_names("a"), [MM_A]),
        (cp.dots_saveable & ~cp.save_only_these_names("a"), [MM, ADDMM, BMM, CONV]),
        (~cp.save_only_these_names("a"), [SIN, MM, ADDMM, BMM, CONV]),
        (~cp.everything_saveable, []),
        (as_policy(save_sin), [SIN, SIN_A, SIN_AB]),
        (save_sin | cp.save_ops("aten.bmm"), [SIN, SIN_A, SIN_AB, BMM]),
        ("names:b" | cp.save_ops("aten.bmm"), [SIN_AB, BMM]),
        (save_sin & cp.save_only_these_names("b"), [SIN_AB]),
        (~as_policy(save_sin), [MM, MM_A, ADDMM, BMM, CONV]),
    ],
    ids=lambda value: repr(value) if isinstance(value, Policy) else "",
)
def test_what_is_saved(policy, expected):
    assert saved(policy) == expected


@pytest.mark.parametrize(
    ("policy", "op", "params", "expected"),
    [
        (cp.everything_saveable, aten.sin.default, {}, True),
        (cp.nothing_saveable, aten.sin.default, {}, False),
        (cp.dots_saveable, aten.bmm.default, {}, True),
        (cp.dots_with_no_batch_dims_saveable, aten.bmm.default, {}, False),
        (cp.save_only_these_names("a"), name_p, {"name": "a"}, True),
        (cp.save_only_these_names("a"), name_p, {"name": "b"}, False),
        (cp.save_only_these_names("a"), aten.sin.default, {"name": "a"}, False),
        (cp.save_any_names_but_these("a"), name_p, {"name": "b"}, True),
        (cp.save_any_names_but_these("a"), aten.sin.default, {}, False),
        (cp.save_anything_except_these_names("a"), name_p, {"name": "a"}, Recompute()),
        (cp.save_anything_except_these_names("a"), aten.sin.default, {}, True),
        (cp.save_ops("aten.pow"), aten.pow.Scalar, {"self": 2}, True),
        (cp.recompute_ops("aten.pow"), aten.pow.Scalar, {"self": 2}, Recompute()),
        (cp.save_modules("head"), aten.sin.default, {}, False),
        (cp.recompute_modules("head"), aten.sin.default, {}, True),
        (cp.dots_saveable | cp.save_only_these_names("a"), name_p, {"name": "a"}, True),
        (cp.dots_saveable & cp.save_only_these_names("a"), aten.mm.default, {}, False),
        (~cp.dots_saveable, aten.mm.default, {}, False),
        (as_policy(save_sin), aten.sin.default, {}, True),
        (as_policy(offload_sin), aten.sin.default, {}, OFFLOAD),
        (cp.nothing_saveable | as_policy(offload_sin), aten.sin.default, {}, OFFLOAD),
    ],
)
def test_policies_are_called_as_in_jax(policy, op, params, expected):
    assert policy(op, X, **params) == expected


def test_jax_names():
    assert cp.checkpoint_dots is cp.dots_saveable
    assert cp.checkpoint_dots_with_no_batch_dims is cp.dots_with_no_batch_dims_saveable
    assert sorted(cp.__all__) == cp.__all__
    assert all(hasattr(cp, name) for name in cp.__all__)


def test_offloading_combines():
    offload = as_policy(offload_sin)
    assert offload.decide(SIN) == OFFLOAD
    assert (offload | cp.save_only_these_names("a")).decide(SIN_A) == Saveable()
    assert (offload & cp.everything_saveable).decide(SIN) == OFFLOAD
    assert (~offload).decide(SIN) == NotSaved()
    assert cp.save_from_both_policies(offload, cp.nothing_saveable).decide(SIN) == OFFLOAD


def wrap_in_function(policy):
    return lambda op, *avals, **params: policy(op, *avals, **params)


def wrap_in_selective(policy):
    return cp.from_selective(lambda ctx, op, *args, **kwargs: policy(op, *args, **kwargs))


@pytest.mark.parametrize("wrap", [wrap_in_function, lambda p: ~~p, lambda p: pickled(p)])
@pytest.mark.parametrize("policy", [*BUILT, as_policy(offload_sin)], ids=repr)
def test_a_policy_decides_the_same_however_it_is_wrapped(policy, wrap):
    wrapped = as_policy(wrap(policy))
    assert [wrapped.decide(value) for value in ALL] == [policy.decide(value) for value in ALL]
    again = as_policy(wrap_in_function(wrapped | cp.nothing_saveable) | cp.nothing_saveable)
    assert [again.decide(value) for value in ALL] == [policy.decide(value) for value in ALL]


def test_from_selective_keeps_the_difference():
    insisting = wrap_in_selective(cp.recompute_ops(aten.sin))
    assert insisting.decide(SIN) == Recompute()
    assert wrap_in_selective(cp.save_ops(aten.mm)).decide(SIN) == NotSaved()


def test_twice_the_complement_is_the_policy():
    assert all(~~policy == policy for policy in BUILT)
    assert repr(~~cp.dots_saveable) == "dots_saveable"


def test_a_policy_asked_about_another_call_answers_for_that_call():
    """Only the very call that is in question stands for the value, with its names and module."""
    heads = cp.save_modules("layers.*")
    assert as_policy(wrap_in_function(heads)).decide(MM) == Saveable()
    assert as_policy(lambda op, *avals, **params: heads(op, *avals[1:])).decide(MM) == NotSaved()
    assert heads(MM.op, *MM.avals) is False


def test_a_verdict_of_no_is_false():
    def policy(op, *avals, **params):
        return cp.recompute_ops("aten.sin")(op, *avals, **params) or op is aten.sin.default

    assert as_policy(policy).decide(SIN) == Saveable()


def test_a_users_callable_is_asked_of_the_op_and_of_each_name():
    asked = []

    def policy(op, *avals, **params):
        asked.append((op, avals, params))
        return params.get("name") == "b"

    assert as_policy(policy).decide(SIN_AB) == Saveable()
    assert asked == [
        (aten.sin.default, (X,), {}),
        (name_p, (X,), {"name": "a"}),
        (name_p, (X,), {"name": "b"}),
    ]


def test_the_name_of_one_of_several_outputs_comes_with_its_aval():
    asked = []
    policy = as_policy(lambda op, *avals, **params: bool(asked.append(avals)))
    other = Aval((7,), torch.int64)
    policy.decide(Value(aten.sort.default, (X,), names=("i",), outputs=(X, other), index=1))
    assert asked == [(X,), (other,)]


# --- policies as values --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", BUILT, ids=repr)
def test_repr_rebuilds(policy):
    rebuilt = eval(repr(policy), {"torch": torch, **vars(cp)})
    assert rebuilt == policy
    assert hash(rebuilt) == hash(policy)
    assert saved(rebuilt) == saved(policy)


@pytest.mark.parametrize("policy", [*BUILT, as_policy(save_sin), save_sin | BUILT[0]], ids=repr)
def test_pickle(policy):
    copy = pickle.loads(pickle.dumps(policy))
    assert copy == policy
    assert hash(copy) == hash(policy)


def test_all_are_different():
    assert len(set(BUILT)) == len(BUILT)


def test_equality():
    p, q, r = cp.dots_saveable, cp.save_ops("aten.sin"), cp.save_only_these_names("a")
    assert (p | q) | r == p | (q | r)
    assert (p & q) & r == p & (q & r)
    assert p | q != p & q
    assert cp.save_from_both_policies(p, q) == p | q
    assert cp.save_ops(aten.mm) == cp.save_ops("aten.mm") == cp.save_ops("aten::mm")
    assert cp.save_ops(aten.mm) != cp.save_ops(aten.mm.default)
    assert cp.save_only_these_names("a", "a") == cp.save_only_these_names("a")
    assert cp.save_only_these_names("a") != cp.save_any_names_but_these("a")
    assert as_policy(save_sin) == as_policy(save_sin)


# --- what is taken for a policy ------------------------------------------------------------------


def test_as_policy():
    assert as_policy(None) == cp.nothing_saveable
    assert as_policy("dots") == cp.dots_saveable
    assert as_policy(cp.dots_saveable) is cp.dots_saveable
    assert repr(as_policy(save_sin)) == "as_policy(save_sin)"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (3, r"unknown policy 3 \(int\). A policy is one of checkpoint_policies"),
        (True, r"unknown policy True \(bool\)"),
        (Saveable, r"unknown policy <class"),
        (
            ["dots"],
            r"unknown policy \['dots'\] \(list\).*joined with \|, as in 'dots\|names:attn'$",
        ),
        (0.5, r"unknown policy 0.5 \(float\).*budget of peak memory, write memory_budget\(0.5\)$"),
        (torch.ops.aten.mm.default, r"write save_ops\(aten.mm.default\)$"),
        (torch.ops.aten.mm, r"write save_ops\(aten.mm\)$"),
        (torch.mm, r"unknown policy <built-in method mm.*write save_ops\('aten.mm'\)$"),
        (isinstance, r"unknown policy <built-in function isinstance>.*save nothing$"),
        ([torch.ops.aten.mm], r"operators compute, write save_ops\(\*ops\)$"),
        (cp.save_only_these_names, r"save_only_these_names was given as a policy: it makes one"),
        (cp.recompute_ops, r"as in recompute_ops\('...'\)"),
    ],
)
def test_what_is_no_policy_is_a_type_error(given, match):
    with pytest.raises(PolicyError, match=match):
        as_policy(given)
    with pytest.raises(PolicyError, match=match):
        cp.dots_saveable | given
    with pytest.raises(PolicyError, match=match):
        given & cp.dots_saveable
    with pytest.raises(TypeError, match=match):
        cp.save_from_both_policies(cp.dots_saveable, given)


class Nonsense:
    def __call__(self, op, *avals, **params):
        return 3


def nonsense(policy, op, *avals, **params):
    return 3


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (lambda op, *avals, **params: 3, r"as_policy\(<lambda>\) from test_policies.py:\d+ "),
        (Nonsense(), r"from test_policies.py:\d+ \(Nonsense.__call__\)"),
        (functools.partial(nonsense, 0), r"from test_policies.py:\d+ \(nonsense\)"),
    ],
)
@pytest.mark.parametrize("combine", [lambda p: p, lambda p: ~p, lambda p: p | BUILT[0]])
def test_a_nonsense_answer_names_policy_line_op_and_answer(policy, match, combine):
    policy = combine(as_policy(policy))
    for ask in (lambda: policy.decide(SIN), lambda: policy(aten.sin.default, X)):
        with pytest.raises(PolicyError, match=match + r".*aten.sin.default, answered 3 \(int\)"):
            ask()


def test_a_policy_that_does_not_take_what_it_is_asked_says_so():
    policy = as_policy(lambda op, *avals: True)
    match = r"from test_policies.py:\d+ .*cannot be called for .*take \(f32.*, name\)"
    with pytest.raises(PolicyError, match=match):
        policy(name_p, X, name="a")

    def wrong_inside(op, *avals, **params):
        return len(3)

    with pytest.raises(TypeError, match=r"has no len"):
        as_policy(wrong_inside)(aten.sin.default, X)


@pytest.mark.parametrize(
    "make",
    [
        cp.save_only_these_names,
        cp.save_any_names_but_these,
        cp.save_anything_except_these_names,
        cp.save_modules,
        cp.recompute_modules,
    ],
)
def test_names_and_patterns_are_strings(make):
    with pytest.raises(PolicyError, match=rf"{make.__name__}.*each a str.*given 3 \(int\)$"):
        make("a", 3)
    with pytest.raises(PolicyError, match=rf"a collection is unpacked: {make.__name__}\(\*"):
        make(["a", "b"])
    with pytest.raises(PolicyValueError, match=rf"{make.__name__}\(''\) was given an empty"):
        make("")


@pytest.mark.parametrize("make", [cp.save_ops, cp.recompute_ops])
def test_ops_are_ops(make):
    with pytest.raises(PolicyError, match=r"3 \(int\) is not an operator"):
        make("aten.mm", 3)
    with pytest.raises(PolicyValueError, match=r"'' names no operator"):
        make("")


# --- what matches nothing ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "messages"),
    [
        (cp.everything_saveable, []),
        (as_policy(save_sin), []),
        (cp.save_only_these_names("a", "b"), []),
        (
            cp.save_only_these_names("a", "bb"),
            [
                "save_only_these_names('a', 'bb'): 'bb' matches nothing in what was traced. Of the "
                "names given by checkpoint_name, nearest: 'b'"
            ],
        ),
        (
            cp.save_anything_except_these_names("scores"),
            [
                "save_anything_except_these_names('scores'): 'scores' matches nothing in what was "
                "traced. Of the names given by checkpoint_name, there are: 'a', 'b'"
            ],
        ),
        (cp.save_ops("aten.mm", name_p), []),
        (
            cp.recompute_ops("aten.sinh"),
            [
                "recompute_ops('aten.sinh'): 'aten.sinh' matches nothing in what was traced. Of "
                "the operators, nearest: 'aten.sin', 'aten.mm'"
            ],
        ),
        (cp.save_modules("layers.*.attn", "*"), []),
        (
            cp.save_modules("layer.0.attn"),
            [
                "save_modules('layer.0.attn'): 'layer.0.attn' matches nothing in what was traced. "
                "Of the modules, nearest: 'layers.0.attn', 'layers.1.attn', 'layers.0.attn.proj'"
            ],
        ),
    ],
)
def test_unmatched(policy, messages):
    assert policy.find_unmatched(ALL) == messages
    assert (~policy).find_unmatched(ALL) == messages
    assert (policy | policy).find_unmatched(ALL) == messages
    assert (cp.dots_saveable & policy).find_unmatched(ALL) == messages


def test_unmatched_where_there_is_nothing_to_match():
    (message,) = cp.save_only_these_names("a").find_unmatched([SIN])
    assert message.endswith("Of the names given by checkpoint_name, there are none")
    (message,) = cp.save_modules("a").find_unmatched([SIN])
    assert message.endswith("Of the modules, there are none")


def test_mm_is_matched_by_the_addmm_of_a_linear():
    assert cp.save_ops("aten.mm").find_unmatched([ADDMM]) == []
