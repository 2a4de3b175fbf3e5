import functools
import pickle
from collections import Counter

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchremat import NotSaved, Offloadable, Recompute, Saveable
from torchremat.checkpoint_policies import from_selective
from torchremat.core.avals import Aval
from torchremat.errors import PolicyError
from torchremat.graph.ops import split_arguments
from torchremat.policies.policy import Value

aten = torch.ops.aten
X = Aval((2, 3), torch.float32)
Y = Aval((3, 4), torch.bfloat16)
MM = Value(aten.mm.default, (X, Y))


def value(op, *args, **kwargs):
    return Value(op, *split_arguments(op, args, kwargs))


def every_second_mm():
    """The policy that torchtitan's selective checkpointing made popular; it has a state."""
    count = Counter()

    def policy_fn(ctx, op, *args, **kwargs):
        mode = "recompute" if ctx.is_recompute else "forward"
        count[mode] += op == aten.mm.default
        save = op == aten.mm.default and count[mode] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy_fn


@pytest.mark.parametrize("answer", [*CheckpointPolicy, True, False], ids=str)
def test_answers(answer):
    kind = {True: "SAVE", False: "RECOMPUTE"}.get(answer) or answer.name
    verdict = from_selective(lambda ctx, op, *args, **kwargs: answer).decide(MM)
    if kind.endswith("CPU_OFFLOAD"):
        assert verdict == Offloadable("device", "pinned_host")
    else:
        no = Recompute() if kind == "MUST_RECOMPUTE" else NotSaved()
        assert verdict == (Saveable() if kind.endswith("SAVE") else no)


def test_the_function_is_called_as_pytorch_calls_it():
    """Same calls, in the same order, as under torch.utils.checkpoint itself."""
    calls = []

    def policy_fn(ctx, op, *args, **kwargs):
        def shown(x):
            return (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x

        tree = torch.utils._pytree.tree_map(shown, (args, kwargs, ctx.is_recompute))
        calls.append((op, *tree))
        return CheckpointPolicy.PREFER_RECOMPUTE

    def f(x, w, b):
        y = torch.addmm(b, x, w, beta=2)
        y = torch.cat([y, y.sin()], 1).sum(1, keepdim=True).to(torch.float64)
        return torch.nn.functional.layer_norm(y, (1,))

    args = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4), torch.ones(4)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy_fn)
    checkpoint(f, *args, use_reentrant=False, context_fn=contexts)
    expected = calls.copy()
    calls.clear()

    policy = from_selective(policy_fn)
    x, w, b, y = (Aval(s, torch.float32) for s in [(2, 3), (3, 4), (4,), (2, 4)])
    both, total = Aval((2, 8), torch.float32), Aval((2, 1), torch.float32)
    policy.decide(value(aten.addmm.default, b, x, w, beta=2))
    policy.decide(value(aten.sin.default, y))
    policy.decide(value(aten.cat.default, [y, y], 1))
    policy.decide(value(aten.sum.dim_IntList, both, [1], True))
    policy.decide(value(aten._to_copy.default, total, dtype=torch.float64))
    wide = Aval((2, 1), torch.float64)
    policy.decide(value(aten.native_layer_norm.default, wide, [1], None, None, 1e-5))
    assert calls == expected


def test_it_is_asked_once_a_value_and_never_about_detach():
    policy = from_selective(every_second_mm())
    values = [MM, Value(aten.detach.default, (X,)), MM, MM]
    verdicts = [policy.decide(value) for value in values]
    assert verdicts == [Saveable(), NotSaved(), NotSaved(), Saveable()]


def test_the_outputs_are_shown_if_known():
    seen = []

    def policy_fn(ctx, op, *args, **kwargs):
        seen.append(ctx.op_output)
        return True

    policy = from_selective(policy_fn)
    policy.decide(Value(aten.sin.default, (Y,), outputs=(Y,)))
    policy.decide(Value(aten.sort.default, (X,), outputs=(X, X)))
    assert (seen[0].shape, seen[0].dtype, seen[0].device.type) == ((3, 4), torch.bfloat16, "meta")
    assert [tuple(t.shape) for t in seen[1]] == [(2, 3), (2, 3)]


def test_nothing_of_a_surrounding_trace_is_disturbed():
    policy = from_selective(lambda ctx, op, *args, **kwargs: args[1].dtype == torch.bfloat16)
    make_fx = torch.fx.experimental.proxy_tensor.make_fx

    def f(x):
        assert policy.decide(MM) == Saveable()
        return x.sin()

    graph = make_fx(f, tracing_mode="fake")(torch.ones(2)).graph
    assert [node.target for node in graph.nodes][1:-1] == [aten.sin.default]


def test_a_list_saves_exactly_its_overloads():
    policy = from_selective([aten.mm.default])
    assert policy.decide(MM) == Saveable()
    assert policy.decide(Value(aten.addmm.default, (X, X, X))) == NotSaved()
    assert pickle.loads(pickle.dumps(policy)) == policy == from_selective((aten.mm.default,))


def test_names_do_not_matter():
    value = Value(aten.mm.default, (X, Y), names=("a",))
    assert from_selective([aten.sin.default]).decide(value) == NotSaved()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (3, r"from_selective\(3\) takes what create_selective_checkpoint_contexts takes.*a int"),
        ("aten.mm", r"from_selective\('aten.mm'\)"),
        (from_selective([]), r"a Selective$"),
        ([aten.mm], r"takes overloads.*torch.ops.aten.mm.default.*Packets.*save_ops"),
        (["aten.mm"], r"given 'aten.mm' \(str\)"),
    ],
)
def test_what_is_no_selective_policy(given, match):
    with pytest.raises(PolicyError, match=match):
        from_selective(given)


def test_a_nonsense_answer():
    def my_policy(ctx, op, *args, **kwargs):
        return "save"

    policy = from_selective(my_policy)
    match = r"my_policy\) from test_from_selective.py:\d+ .*, called for aten.mm.*answered 'save'"
    with pytest.raises(PolicyError, match=match):
        policy.decide(MM)
