"""A GPT that knows nothing of ragged batches, over sequences that differ in length."""

import pytest
import torch

import torchremat as tr
from tests.batching.ragged.small_gpt import GPT
from tests.helpers import skip_before_2_13
from torchremat.batching import Pile, pile_axis
from torchremat.errors import RaggedError

DEFECT = "torch.matmul of batches reads sizes as numbers, which a RaggedError says"
LENGTHS = (5, 16, 3, 9)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GPT(num_layers=1).double()


def sequences(lengths):
    return Pile.from_list([torch.randint(17, (n + 1,)) for n in lengths])


def loss_of(model, params, sequence):
    inputs = (sequence[None, :-1], sequence[None, 1:])
    return torch.func.functional_call(model, params, inputs)[1]


@pytest.mark.parametrize(
    "checkpointed",
    [
        pytest.param(False, id="plain"),
        pytest.param(True, id="checkpointed", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_each_sequence_are_those_of_a_loop(model, checkpointed):
    skip_before_2_13(DEFECT)
    if checkpointed:
        tr.nn.wrap(model, "full", select="h.*")
    params = dict(model.named_parameters())

    def loss(params, sequence):
        return loss_of(model, params, sequence)

    try:
        each = tr.vmap(tr.grad(loss), (None, pile_axis))
        for lengths in (LENGTHS, (16, 4)):
            pile = sequences(lengths)
            ours = each(params, pile)
            for i, sequence in enumerate(pile.to_list()):
                theirs = torch.func.grad(loss)(params, sequence)
                for name, expected in theirs.items():
                    torch.testing.assert_close(ours[name][i], expected, atol=1e-10, rtol=1e-8)
    finally:
        tr.nn.unwrap(model)


def test_the_loss_has_one_backward_pass_for_all(model):
    skip_before_2_13(DEFECT)
    pile = sequences(LENGTHS)
    losses = tr.vmap(lambda s: model(s[None, :-1], s[None, 1:])[1], pile_axis)(pile)
    theirs = torch.stack([model(s[None, :-1], s[None, 1:])[1] for s in pile.to_list()])
    torch.testing.assert_close(losses, theirs)
    params = list(model.parameters())
    ours = torch.autograd.grad(losses.sum(), params)
    torch.testing.assert_close(ours, torch.autograd.grad(theirs.sum(), params))


def test_a_sequence_that_is_too_long_is_refused_with_the_line(model):
    pile = sequences((5, 17))
    with pytest.raises(RaggedError, match=r"value of a size .*small_gpt.py:\d+ \(forward\)"):
        tr.vmap(lambda s: model(s[None, :-1])[0], pile_axis)(pile)
    with pytest.raises(AssertionError, match="too long"):
        tr.vmap(lambda s: model(s[None, :-1])[0], pile_axis)(sequences((17, 17)))


def test_logits_of_the_last_token(model):
    skip_before_2_13(DEFECT)
    pile = sequences(LENGTHS)
    logits = tr.vmap(lambda s: model(s[None])[0][0, 0], pile_axis)(
        Pile.from_list([s[:-1] for s in pile.to_list()])
    )
    theirs = torch.stack([model(s[None, :-1])[0][0, 0] for s in pile.to_list()])
    torch.testing.assert_close(logits, theirs)
