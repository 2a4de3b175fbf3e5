"""PyTorch's own samples of its operators, as graphs."""

import pytest
import torch

import torchremat as tr
from tests.helpers import assert_same
from tests.typed_graph.checking import check_graph

pytest.importorskip("expecttest", reason="PyTorch's own tests need it")
from torch.testing._internal.common_methods_invocations import op_db

NAMES = [
    "abs", "addcmul", "addmm", "amax", "atan2", "baddbmm", "cat", "clamp", "cumprod", "cumsum",
    "diagonal", "div", "einsum", "exp", "expand", "flip", "gather", "index_add", "index_select",
    "lerp", "linalg.cholesky", "linalg.inv", "linalg.norm", "log_softmax", "logsumexp",
    "masked_fill", "matmul", "mean", "mul", "nn.functional.conv2d", "nn.functional.gelu",
    "nn.functional.layer_norm", "nn.functional.linear", "nn.functional.max_pool2d",
    "nn.functional.mse_loss", "nn.functional.softplus", "norm", "permute", "pow", "prod", "roll",
    "scatter_add", "softmax", "sort", "split", "squeeze", "std", "tril", "where",
]  # fmt: skip
OPS = {op.name: op for op in reversed(op_db)}


def samples(name, count=3):
    op = OPS[name]
    found = []
    for sample in op.sample_inputs("cpu", torch.double):
        leaves, spec = torch.utils._pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def function(*values, leaves=leaves, spec=spec):
            left = iter(values)
            full = [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            x, args, kwargs = torch.utils._pytree.tree_unflatten(full, spec)
            return op(x, *args, **kwargs)

        found.append((function, [t.detach() for t in tensors]))
        if len(found) == count:
            break
    return found


# of PyTorch's vmap
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(3)
def test_op(name):
    cases = samples(name)
    assert cases
    for function, tensors in cases:
        expected = function(*tensors)
        g = tr.make_graph(function)(*tensors)
        check_graph(g)
        assert_same(tr.eval_graph(g, *tensors), expected, name)
        is_float = [t.is_floating_point() for t in tensors]
        if any(is_float):
            _check_jvp(g, function, tensors, is_float)
        _check_batch(g, function, tensors)


def _check_jvp(g, function, tensors, is_float):
    tangents = [torch.rand_like(t) if f else None for t, f in zip(tensors, is_float, strict=True)]
    given = [t for t in tangents if t is not None]

    def of_floats(*values):
        left = iter(values)
        full = [next(left) if f else t for t, f in zip(tensors, is_float, strict=True)]
        outputs = [o for o in torch.utils._pytree.tree_leaves(function(*full))]
        return [o for o in outputs if o.is_floating_point()]

    floats = tuple(t for t, f in zip(tensors, is_float, strict=True) if f)
    _, expected = torch.func.jvp(of_floats, floats, tuple(given))
    _, found = tr.eval_graph(tr.jvp_graph(g), *tensors, *tangents)
    found = [t for t in torch.utils._pytree.tree_leaves(found) if t is not None]
    assert_same(found, list(expected), close=True)


def _check_batch(g, function, tensors):
    many = [torch.stack([t, t]) for t in tensors]
    batched, _ = tr.batch_graph(g, 2, 0, 0)
    check_graph(batched)
    assert_same(tr.eval_graph(batched, *many), torch.vmap(function)(*many), close=True)
