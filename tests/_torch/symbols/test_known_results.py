"""Results that are kept for operators on symbols, against those that PyTorch's rules give anew."""

import itertools

import pytest
import sympy
import torch
from torch.utils import _pytree as pytree

from tests.op_samples import OPS, samples
from torchremat import _torch
from torchremat._torch.symbols import known_results
from torchremat._torch.symbols.known_results import KnownResults

FEW = sorted(OPS)[::12]


class Checked(KnownResults):
    """Compares each result that was kept with one that is found anew."""

    def __init__(self):
        super().__init__()
        self.hits = 0

    def find(self, mode, func, arguments, find_anew):
        is_new = []

        def note_and_find():
            is_new.append(True)
            return find_anew()

        found = super().find(mode, func, arguments, note_and_find)
        if not is_new:
            self.hits += 1
            tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
            expected = find_anew()
            if not isinstance(found, tuple):
                found_all, expected_all = (found,), (expected,)
            else:
                found_all, expected_all = found, expected
            for ours, theirs in zip(found_all, expected_all, strict=True):
                assert describe(ours, tensors) == describe(theirs, tensors), func
        return found


def describe(tensor, arguments):
    if tensor is None:
        return None
    sizes = [*tensor.shape, *tensor.stride(), tensor.storage_offset()]
    exact = [s if isinstance(s, int) else sympy.expand(s.node.expr) for s in sizes]
    storage = tensor.untyped_storage()._cdata
    shares = [i for i, a in enumerate(arguments) if a.untyped_storage()._cdata == storage]
    keys = torch._C._dispatch_key_set(tensor)
    return (type(tensor), exact, tensor.dtype, tensor.fake_device, shares, str(keys))


def fake_like(mode, shapes, tensor, names):
    sizes = [n if n < 2 else _torch.new_symbol(shapes, n, f"n{next(names)}") for n in tensor.shape]
    with mode:
        return torch.empty(sizes, dtype=tensor.dtype).requires_grad_(tensor.requires_grad)


def compare_hits(name, count, monkeypatch):
    """How many results were kept and compared."""
    hits = 0
    for sample in samples(name, count):
        kept = []
        monkeypatch.setattr(
            "torchremat._torch.fake_proxy.KnownResults", lambda: kept.append(Checked()) or kept[0]
        )
        shapes = _torch.new_shape_env()
        mode = _torch.new_fake_mode(shapes)
        names = itertools.count()
        tensors, _ = sample.fresh()
        fakes = [fake_like(mode, shapes, t, names) for t in tensors]
        for _ in range(2):
            try:
                with mode:
                    results = pytree.tree_leaves(sample.function(*fakes))
                    inputs = [f for f in fakes if f.requires_grad]
                    outputs = [r for r in results if getattr(r, "requires_grad", False)]
                    torch.autograd.grad(
                        outputs, inputs, list(map(torch.ones_like, outputs)), allow_unused=True
                    )
            except AssertionError:
                raise
            except Exception:  # PyTorch has no rule for symbols; what ran until then was compared
                break
        hits += kept[0].hits
    return hits


def test_some_operators(monkeypatch):
    assert sum(compare_hits(name, 1, monkeypatch) for name in FEW) > 200


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what PyTorch deprecates
@pytest.mark.parametrize("name", sorted(OPS))
def test_all_operators(name, monkeypatch):
    compare_hits(name, 4, monkeypatch)


def test_what_differs_in_anything_is_found_anew():
    shapes = _torch.new_shape_env()
    mode = _torch.new_fake_mode(shapes)
    n = _torch.new_symbol(shapes, 6, "n")
    with mode:
        x = torch.empty(n, 4)
        assert torch.sin(x).dtype is torch.float32
        assert torch.sin(x.double()).dtype is torch.float64
        assert torch.sum(x, 0).shape == (4,)
        assert torch.sum(x, [0], keepdim=True).shape == (1, 4)
        assert torch.add(x, 1).dtype is torch.float32
        assert torch.add(x, 1j).dtype is torch.complex64
        assert torch.zeros_like(x, dtype=torch.int8).dtype is torch.int8
        assert torch.conj(x.cfloat()).is_conj()
        assert torch.conj(x.cfloat()).resolve_conj().is_conj() is False
        y = x.t()
        assert y.contiguous().stride() == (n, 1)
        assert torch.sin(y).stride() == (1, 4)


def test_views_share_the_memory_of_their_own_base():
    shapes = _torch.new_shape_env()
    mode = _torch.new_fake_mode(shapes)
    n = _torch.new_symbol(shapes, 6, "n")
    with mode:
        bases = [torch.empty(n, 4) for _ in range(3)]
        for base in bases:
            rows = base[1:].view(-1)
            assert rows.storage_offset() == 4
            shared = [b.untyped_storage()._cdata == rows.untyped_storage()._cdata for b in bases]
            assert shared == [b is base for b in bases]
            assert torch.sin(base).untyped_storage()._cdata != base.untyped_storage()._cdata


def test_guards_are_those_of_a_trace_without_kept_results(monkeypatch):
    def guards():
        shapes = _torch.new_shape_env()
        mode = _torch.new_fake_mode(shapes)
        n, m = (_torch.new_symbol(shapes, 6, name) for name in "nm")
        with mode:
            x, y = torch.empty(n, 4), torch.empty(m, 4)
            for _ in range(3):
                (x + y).view(-1, 2).sum(0)
        return _torch.guards_of(shapes, [n, m], ["n", "m"])

    found = guards()
    monkeypatch.setattr(known_results, "_describe", lambda results, tensors: None)
    assert found == guards()
    assert eval(found, dict(_torch.NAMES_IN_SIZES), {"n": 7, "m": 7})
    assert not eval(found, dict(_torch.NAMES_IN_SIZES), {"n": 7, "m": 8})
