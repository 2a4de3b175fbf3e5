"""`Pile`: its parts, its text, as a tree, from and to lists and nested tensors."""

import copy
import pickle
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from torchremat.batching import Pile, PileTy, pile_axis
from torchremat.batching.ragged.run import as_pile, run_ragged
from torchremat.errors import RaggedError, RaggedTypeError

shapes = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def iotas(lengths=(3, 1, 4)):
    return Pile.from_list([torch.arange(n) for n in lengths], dim=0)


def test_data_are_concatenated_along_the_dim_that_differs():
    assert iotas().data.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert Pile.from_list([torch.ones(7, n) for n in (3, 1, 4)]).data.shape == (7, 8)
    assert Pile.from_list([torch.ones(n, 7) for n in (3, 1, 4)]).data.shape == (8, 7)


def test_text_of_the_type_is_that_of_jax():
    aval = iotas().aval
    assert isinstance(aval, PileTy)
    assert aval.length == 3
    assert re.fullmatch(r"Var\d+:3 => i64\[\[3 1 4\]\.Var\d+\]", str(aval))
    matrices = Pile.from_list([torch.ones(n, 2) for n in (3, 1)])
    assert re.fullmatch(r"f32\[\[3 1\]\.Var\d+,2\]", str(matrices.aval.elt_ty))


def test_lengths_and_data_are_its_leaves():
    pile = iotas()
    leaves, spec = pytree.tree_flatten(pile)
    assert [leaf.tolist() for leaf in leaves] == [[3, 1, 4], pile.data.tolist()]
    again = pytree.tree_unflatten(leaves, spec)
    assert again.data is pile.data
    assert again.lengths is pile.lengths
    assert str(again.aval) == str(pile.aval)


def test_trees_of_piles_are_alike_while_the_longest_is_within_a_power_of_two():
    specs = [
        pytree.tree_flatten(iotas(lengths))[1] for lengths in ((3, 1, 4), (0, 4, 4), (5, 1, 1))
    ]
    assert specs[0] == specs[1]
    assert specs[0] != specs[2]


@given(shapes)
def test_a_list_and_back(lengths):
    tensors = [torch.randn(n, 2) for n in lengths]
    pile = Pile.from_list(tensors)
    assert all(map(torch.equal, pile.to_list(), tensors))
    assert len(pile) == len(tensors)
    assert pile.offsets.diff().tolist() == pile.lengths.tolist() or lengths == [2] * len(lengths)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5))
def test_elements_may_differ_in_several_dims(sizes):
    tensors = [torch.randn(n, 2, m) for n, m in sizes]
    pile = Pile.from_list(tensors, dim=(0, 2))
    assert pile.data.dim() == 1
    assert all(map(torch.equal, pile.to_list(), tensors))
    assert pile.offsets.tolist()[-1] == pile.data.shape[0]


def test_elements_are_found_by_their_number():
    pile = iotas()
    assert pile[-1].tolist() == [0, 1, 2, 3]
    assert [len(x) for x in pile] == [3, 1, 4]
    with pytest.raises(IndexError, match="index 3 is out of range for a Pile of 3"):
        pile[3]
    with pytest.raises(RaggedTypeError, match="indexed by an int"):
        pile[1:]


def test_a_nested_tensor_and_back_share_the_data():
    pile = Pile.from_list([torch.randn(n, 2) for n in (3, 1, 4)])
    nested = pile.to_nested()
    assert nested.values().data_ptr() == pile.data.data_ptr()
    again = Pile.from_nested(nested)
    assert again.data.data_ptr() == pile.data.data_ptr()
    assert again.lengths.tolist() == [3, 1, 4]
    columns = Pile.from_list([torch.randn(2, n) for n in (3, 1, 4)])
    nested = columns.to_nested()
    assert all(map(torch.equal, nested.unbind(), columns.to_list()))
    assert all(map(torch.equal, Pile.from_nested(nested).to_list(), columns.to_list()))


def test_elements_have_gradients():
    pile = Pile.from_list([torch.randn(2), torch.randn(3)])
    pile.data.requires_grad_()
    (pile[1] ** 2).sum().backward()
    torch.testing.assert_close(pile.data.grad, torch.cat([torch.zeros(2), 2 * pile[1].detach()]))


def test_it_can_be_copied_and_pickled():
    pile = iotas()
    for again in (copy.deepcopy(pile), pickle.loads(pickle.dumps(pile))):
        assert all(map(torch.equal, again.to_list(), pile.to_list()))
    assert repr(pile_axis) == "pile_axis"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Pile.from_list([]), RaggedError, "one tensor at least"),
        (lambda: Pile.from_list([torch.ones(1), 2]), RaggedTypeError, "item 1 is 2"),
        (lambda: Pile.from_list([torch.ones(1), torch.ones(1, 1)]), RaggedTypeError, "one ndim"),
        (lambda: Pile.from_list([torch.tensor(1)]), RaggedError, "at least one dim"),
        (
            lambda: Pile.from_list([torch.ones(1, 2), torch.ones(2, 1)], dim=0),
            RaggedError,
            r"may differ in dims \[0\], and differ in \[0, 1\]",
        ),
        (lambda: Pile.from_nested(torch.ones(2)), RaggedTypeError, "layout torch.jagged"),
        (
            lambda: Pile.from_list([torch.ones(1, 2), torch.ones(2, 1)]).to_nested(),
            RaggedError,
            "differ in 2",
        ),
    ],
)
def test_errors_say_what_is_wrong(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_plain_elements_are_a_pile_too():
    (out,) = run_ragged(lambda xs: [xs[0].sum()], [iotas()], [pile_axis], 3)
    pile = as_pile(out, 3)
    assert pile.data.tolist() == [3, 0, 6]
    assert str(pile.aval.elt_ty) == "i64[]"
    assert [x.item() for x in pile] == [3, 0, 6]


def test_its_leaves_have_paths():
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(iotas())[0]]
    assert paths == [".lengths[0]", ".data"]


def test_from_nested_takes_a_tensor():
    with pytest.raises(RaggedTypeError, match="is given a list; Pile.from_list"):
        Pile.from_nested([torch.ones(2)])
