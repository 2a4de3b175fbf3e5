"""How often a policy is asked about the operators of a tape."""

import pytest
import torch

import torchremat as tr
from torchremat.checkpoint_policies import (
    dots_saveable,
    everything_saveable,
    nothing_saveable,
    save_only_these_names,
    save_ops,
)
from torchremat.policies.policy import Policy, as_policy


def positive(x):
    """Its sizes are those of the values, so that it is no graph."""
    return x[x > 0].sin().exp().sum()


class Asked(Policy):
    def __init__(self, reads_sizes):
        self._reads_sizes = reads_sizes
        self.lengths = []

    @property
    def reads_sizes(self):
        return self._reads_sizes

    def __call__(self, op, *avals, **params):
        if op is torch.ops.aten.sin.default:
            self.lengths.append(avals[0].shape[0])
        return bool(avals) and avals[0].shape[:1] == (3,)


@pytest.mark.parametrize(("reads_sizes", "lengths"), [(True, [3, 5, 4]), (False, [3])])
def test_a_policy_is_asked_for_each_size_if_it_reads_sizes(reads_sizes, lengths):
    policy = Asked(reads_sizes)
    f = tr.checkpoint(positive, policy=policy)
    for count in (3, 5, 4, 5):
        x = torch.tensor([1.0] * count + [-1.0], requires_grad=True)
        plain = x.detach().requires_grad_()
        f(x).backward()
        positive(plain).backward()
        assert torch.equal(x.grad, plain.grad)
    assert policy.lengths == lengths


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (nothing_saveable, False),
        (everything_saveable, False),
        (dots_saveable | save_only_these_names("a"), False),
        (~save_ops("aten.mm"), False),
        (as_policy(lambda op, *avals, **params: avals[0].shape == (3,)), True),
        (dots_saveable & (lambda op, *avals, **params: len(avals) > 1), True),
    ],
    ids=repr,
)
def test_policies_say_whether_they_read_sizes(policy, expected):
    assert policy.reads_sizes is expected
