"""Inputs and outputs of every kind: right to the bit in values and gradients, or refused with why.

Each case is called three times, beside the plain function: value, gradients, dtypes, strides and
which outputs share memory with which inputs are the same.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchremat as tr
from tests.helpers import IS_2_11, assert_same, bits, leaves_of, nothing_left_behind, weighted_sum
from torchremat.errors import TraceError

POLICIES = [None, "dots", "none"]
D = torch.double


def leaf(*shape: int, dtype: torch.dtype = D, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


def facts(fun: Callable[..., Any], args: Sequence[Tensor], wrt: Sequence[Tensor]) -> dict[str, Any]:
    """All that a caller can tell of a call and its derivative."""
    result = fun(*args)
    outputs = leaves_of(result)
    recorded = [o if o.requires_grad and "float8" not in str(o.dtype) else None for o in outputs]
    grads = ()
    if any(o is not None for o in recorded):
        grads = torch.autograd.grad(weighted_sum(recorded), wrt, allow_unused=True)
    return {
        "values": [(o.dtype, o.shape, o.stride(), bits(o)) for o in outputs],
        "others": [v for v in torch.utils._pytree.tree_leaves(result) if not isinstance(v, Tensor)],
        "requires_grad": [o.requires_grad for o in outputs],
        "gradients": [None if g is None else (g.dtype, bits(g)) for g in grads],
        "memory": [[shares(o, a) for a in args] for o in outputs],
        "one another": [[shares(a, b) for a in outputs] for b in outputs],
        "arguments": [bits(a) for a in args],
    }


def shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


Made = tuple[Sequence[Tensor], Sequence[Tensor]]


def check(fun: Callable[..., Any], make: Callable[[], Made], policy: Any) -> None:
    """`make` gives the arguments, and those tensors among their leaves that are differentiated."""
    checkpointed = tr.checkpoint(fun, policy=policy)
    for number in range(3):
        expected = facts(fun, *make())
        found = facts(checkpointed, *make())
        assert expected == found, f"call {number}"


# --- kinds of numbers ----------------------------------------------------------------------------


def of(*tensors: Tensor) -> Callable[[], Made]:
    """Makes the same arguments each time; those that require a gradient are differentiated."""
    return lambda: (tensors, [t for t in tensors if t.requires_grad])


def mapped(*leaves: Tensor, by: Callable[..., Any]) -> Callable[[], Made]:
    """Arguments that are computed from leaves."""
    return lambda: (as_tuple(by(*leaves)), leaves)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


C64, C128 = torch.complex64, torch.complex128
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
INTS = torch.arange(3)
MASK = torch.tensor([True, False, True])


def scaled_mm(x, w):
    one = torch.tensor(1.0)
    q, r = (t.detach().to(E4) for t in (x, w))
    return x.sum() * torch._scaled_mm(q, r.t(), one, one, out_dtype=torch.bfloat16).float()


Case = tuple[Callable[..., Any], Callable[[], Made]]
NUMBERS: dict[str, Case] = {
    "complex64": (lambda x: (x * x.conj()).sum(0) + x, of(leaf(3, 4, dtype=C64))),
    "complex128": (lambda x: x.sin() * x.abs(), of(leaf(3, 4, dtype=C128))),
    "complex to real": (torch.view_as_real, of(leaf(3, dtype=C64))),
    "real to complex": (lambda x: torch.fft.rfft(x) * 2, of(leaf(6))),
    "conjugated argument": (lambda x: x * 2j, mapped(leaf(3, dtype=C64), by=torch.conj)),
    "conjugated result": (torch.conj, of(leaf(3, dtype=C64))),
    "negated argument": (lambda x: x * 2, mapped(leaf(3, dtype=C64), by=lambda x: x.conj().imag)),
    "negated result": (lambda x: x.conj().imag, of(leaf(3, dtype=C64))),
    "bfloat16": (lambda x: (x * x.sin()).sum(0), of(leaf(3, 4, dtype=torch.bfloat16))),
    "float16": (lambda x: (x @ x.t()).tanh(), of(leaf(3, 4, dtype=torch.float16))),
    "two halves": (
        torch.mul,
        of(leaf(3, dtype=torch.bfloat16), leaf(3, dtype=torch.float16)),
    ),
    "integers": (lambda x, n: (x * n, n + 1, n // 2, n.bool(), n.double()), of(leaf(3), INTS)),
    "booleans": (lambda x, m: (torch.where(m, x, 0.0), ~m, m.sum()), of(leaf(3), MASK)),
    **{
        f"{dtype} alone": (lambda n: (n, n.float(), n == 1), of(torch.ones(3, dtype=dtype)))
        for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16)
    },
    **{
        f"{dtype} in": (lambda x, q: x * q.to(x.dtype), of(leaf(3), torch.arange(3.0).to(dtype)))
        for dtype in (E4, E5)
    },
    **{
        f"{dtype} out": (lambda x, d=dtype: (x.sin(), x.detach().to(d)), of(leaf(3)))
        for dtype in (E4, E5)
    },
    **{
        f"{dtype} and back": (lambda x, d=dtype: x * x.to(d).to(x.dtype), of(leaf(3)))
        for dtype in (E4, E5)
    },
    "float8 product": (
        scaled_mm,
        of(leaf(16, 16, dtype=torch.float32), leaf(16, 16, dtype=torch.float32)),
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name, policy):
    check(*NUMBERS[name], policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_python_asks_of_a_lazily_conjugated_tensor(policy):
    def body(x):
        return (x * 2 if x.is_conj() else x * 3).sin() * x, x.is_conj(), x.resolve_conj() * 2

    fun = tr.checkpoint(body, policy=policy)
    x = leaf(3, dtype=C64)
    for _ in range(2):
        for t in (x, x.conj(), x):
            assert_same(fun(t), body(t))
            grads = (torch.autograd.grad(weighted_sum(f(t)[::2]), x) for f in (fun, body))
            assert_same(next(grads), next(grads))


def test_what_python_asks_of_a_lazily_negated_tensor():
    fun = tr.checkpoint(lambda x: (x * (2 if x.is_neg() else 3), x.is_neg()))
    x = torch.view_as_real(leaf(3, dtype=C64))[:, 1]
    negated = torch._neg_view(x)
    for _ in range(2):
        for t in (x, negated, x):
            value, is_neg = fun(t)
            assert is_neg is t.is_neg()
            assert_same(value, t * (2 if t.is_neg() else 3))


@pytest.mark.parametrize("sizes", [(3, 3), (3, 4, 5, 6)])
def test_lazily_conjugated_tensors_that_are_closed_over(sizes):
    weight = leaf(3, dtype=C64)
    fun = tr.checkpoint(lambda x: x.sum() * weight * (2 if weight.is_conj() else 3))
    leaves = weight
    for number, size in enumerate(sizes):
        weight = leaves.conj() if number % 2 else leaves
        x = leaf(size, dtype=C64)
        assert_same(fun(x), x.sum() * weight * (3 - number % 2))


@pytest.mark.parametrize("read", [torch.conj, torch._neg_view], ids=["conj", "neg"])
def test_lazily_read_tensors_reach_a_checkpoint_in_a_graph(read):
    def outer(f):
        return lambda x: f(read(x)).sin()

    inner = tr.checkpoint(lambda x: x * x.sin())
    x = leaf(3, dtype=C64)
    expected = outer(inner.fun)(x)
    assert_same(tr.eval_graph(tr.make_graph(outer(inner))(x), x), expected)
    assert_same(tr.jit(outer(inner), backend="eager")(x), expected)
    tangents = (tr.linearize(outer(f), x)[1](x) for f in (inner, inner.fun))
    assert_same(next(tangents), next(tangents))


# --- layouts -------------------------------------------------------------------------------------

LAYOUTS: dict[str, Case] = {
    "empty": (lambda x: (x.sin(), x.sum(), x @ x.t()), of(leaf(0, 4))),
    "empty within": (lambda x: (x.sin(), x.sum(0), x.mean(1)), of(leaf(4, 0))),
    "0-d": (lambda x: x.sin() * x, of(leaf())),
    "0-d and more": (torch.mul, of(leaf(), leaf(3, dtype=torch.float32))),
    "0-d integer": (torch.mul, of(torch.tensor(2), leaf(3, dtype=torch.float32))),
    "expanded": (lambda x: x.sin() * 2, mapped(leaf(3, 1), by=lambda x: x.expand(3, 5))),
    "transposed": (lambda x: x.sin().view(x.shape), mapped(leaf(3, 4), by=torch.t)),
    "strided": (lambda x: (x * 2, x[1:]), mapped(leaf(6, 4), by=lambda x: x[::2, 1:3])),
    "channels last": (
        lambda x: F.conv2d(x, torch.ones(2, 3, 1, 1, dtype=D)),
        mapped(leaf(2, 3, 4, 4), by=lambda x: x.to(memory_format=torch.channels_last)),
    ),
    "overlapping itself": (
        lambda x: x.sin(),
        mapped(leaf(6), by=lambda x: x.as_strided((3, 3), (1, 1))),
    ),
    "as_strided": (lambda x: x.as_strided((2, 2), (3, 1)), mapped(leaf(6), by=torch.clone)),
    "sparse inside": (
        lambda x: torch.sparse.mm(torch.eye(3, dtype=D).to_sparse(), x),
        of(leaf(3, 3)),
    ),
    "sparse from an argument": (lambda x: torch.sparse.mm(x.to_sparse(), x), of(leaf(3, 3))),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, policy):
    check(*LAYOUTS[name], policy)


def test_layouts_in_turn():
    """One function, one shape: contiguous, transposed, expanded, a part of something else."""

    def fun(x):
        return (x.sin() @ x.t()).reshape(-1), x.stride(), x.is_contiguous()

    checkpointed = tr.checkpoint(fun)
    base = leaf(4, 4)
    views = (base, base.t(), base[:1].expand(4, 4), leaf(8, 8)[2:6, ::2], base)
    for view in (*views, *reversed(views)):
        assert facts(fun, [view], [view]) == facts(checkpointed, [view], [view])


def test_as_strided_with_an_offset_into_the_storage():
    check(
        lambda x: x.as_strided((2,), (1,), 0),
        mapped(leaf(6), by=lambda x: (x * 1)[2:]),
        None,
    )


def test_sparse_gradients_of_an_embedding():
    plain, net = (nn.Embedding(5, 3, sparse=True) for _ in range(2))
    net.load_state_dict(plain.state_dict())
    fun = tr.checkpoint(net)
    for _ in range(2):
        for f in (plain, fun):
            f(torch.tensor([0, 2, 2])).square().sum().backward()
    assert plain.weight.grad.is_sparse and net.weight.grad.is_sparse
    assert_same(plain.weight.grad.to_dense(), net.weight.grad.to_dense())


# --- aliases -------------------------------------------------------------------------------------


def same_or_not() -> Iterator[Made]:
    x, y = leaf(3), leaf(3, seed=1)
    yield from (((x, x), (x, y)), ((x, y), (x, y)), ((y, y), (x, y)), ((x, x), (x, y)))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_tensor_twice_and_then_two(policy):
    def fun(x, y):
        return x.sin() * y

    checkpointed = tr.checkpoint(fun, policy=policy)
    for args, wrt in same_or_not():
        assert facts(fun, args, wrt) == facts(checkpointed, args, wrt)


ALIASES: dict[str, Case] = {
    "views of one another": (
        lambda x, y, z: x * y + z.sum(),
        mapped(leaf(3, 3), by=lambda x: (x, x.t(), x[0])),
    ),
    "an argument and a result": (lambda x: (x, x.sin()), mapped(leaf(3), by=torch.clone)),
    "an argument twice": (lambda x: (x, x), mapped(leaf(3), by=torch.clone)),
    "a leaf": (lambda x: x, of(leaf(3))),
    "views of an argument": (
        lambda x: (x.t(), x[0], x.view(-1), x.expand(2, 3, 3)),
        mapped(leaf(3, 3), by=torch.clone),
    ),
    "views of a result": (
        lambda x: (lambda h: (h, h.t(), h[0], h))(x.sin()),
        mapped(leaf(3, 3), by=torch.clone),
    ),
    "an expanded result": (lambda x: x.sin().sum().expand(4), of(leaf(3))),
    "an argument without gradient": (lambda x, y: (x.sin(), y, y[1:]), of(leaf(3), INTS)),
    "a detached argument": (lambda x: (x.sin(), x.detach()), of(leaf(3))),
    "an unused argument": (lambda x, y: x.sin(), of(leaf(3), leaf(3))),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ALIASES)
def test_aliases(name, policy):
    check(*ALIASES[name], policy)


@pytest.mark.parametrize("part", [True, False], ids=["a view", "itself"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_closed_over_tensor_that_is_returned(part, policy):
    w, table = leaf(3), torch.arange(3.0)

    def fun(x):
        return x.sin(), w[1:] if part else w, table[1:] if part else table

    check(fun, lambda: ((leaf(3),), (w,)), policy)


@pytest.mark.parametrize("name", ["T", "mT", "H", "data", "real", "imag"])
def test_attributes_of_a_closed_over_tensor_that_are_computed(name):
    w = leaf(3, 3, dtype=C128 if name == "imag" else D)
    check(lambda x: x @ getattr(w, name), lambda: ((leaf(2, 3),), (w,)), None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "fun",
    [
        lambda x, y: torch.as_strided_scatter(x, y, (2,), (1,), 1),
        lambda x, y: torch.view_as_real(torch.complex(x[:2], y)),
    ],
    ids=["as_strided", "view_as_complex"],
)
def test_an_expanded_gradient_of_what_reads_memory(fun, policy):
    x, y = leaf(3), leaf(2)
    expected = torch.autograd.grad(fun(x, y).sum(), (x, y))
    found = torch.autograd.grad(tr.checkpoint(fun, policy=policy)(x, y).sum(), (x, y))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- subclasses and what no graph can take -------------------------------------------------------


class Marked(Tensor):
    """A subclass that changes nothing."""


class Doubling(Tensor):
    """A subclass whose sine is another."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is Tensor.sin else out


@pytest.mark.parametrize("closed_over", [False, True])
def test_a_plain_subclass(closed_over):
    x, y = leaf(3), leaf(3, seed=1)
    marked = y.as_subclass(Marked)
    checkpointed = tr.checkpoint((lambda x: x * marked) if closed_over else torch.mul)
    for _ in range(2):
        found = checkpointed(x) if closed_over else checkpointed(x, marked)
        assert type(found) is Marked
        assert_same(found.as_subclass(Tensor).detach(), (x * y).detach())
        assert_same(
            [g.as_subclass(Tensor) for g in torch.autograd.grad(found.sum(), [x, y])],
            list(torch.autograd.grad((x * y).sum(), [x, y])),
        )


@pytest.mark.parametrize("closed_over", [False, True])
def test_a_subclass_with_functions_of_its_own_is_refused(closed_over):
    doubling = leaf(3).as_subclass(Doubling)
    with nothing_left_behind(), pytest.raises(TraceError, match="Doubling.*__torch_function__"):
        if closed_over:
            tr.checkpoint(lambda x: x * doubling.sin())(leaf(3))
        else:
            tr.checkpoint(lambda x: x.sin())(doubling)


def test_parameters_and_buffers():
    p, b = nn.Parameter(leaf(3).detach()), nn.Buffer(torch.ones(3, dtype=D))
    check(lambda p, b: p.sin() * b, of(p, b), None)
    check(lambda x: x * p.sin() * b, lambda: ((leaf(3),), (p,)), None)


def test_a_lazy_module_is_made_by_its_first_call():
    net = tr.nn.wrap(nn.LazyLinear(4))
    x = leaf(2, 3, dtype=torch.float32)
    for _ in range(2):
        assert_same(net(x), F.linear(x, net.weight, net.bias))


def jagged() -> Tensor:
    parts = [torch.ones(2, 3), torch.ones(3, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def from_jagged(values: Tensor, offsets: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets)


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "jagged": (torch.sin, lambda: [jagged()], "torch.jagged"),
    "jagged made inside": (
        lambda v, o: from_jagged(v, o).sin().values(),
        lambda: [leaf(5, 3), torch.tensor([0, 2, 5])],
        "torch.jagged",
    ),
    "jagged, with the cure": (torch.sin, lambda: [jagged()], r"x.values\(\) and x.offsets\(\)"),
    "quantized": (lambda q: q.dequantize(), lambda: [quantized()], "quantized.*dequantize"),
    "mkldnn": (lambda m: m.to_dense(), lambda: [torch.ones(3, 3).to_mkldnn()], "_mkldnn"),
    "csr": (torch.sum, lambda: [torch.eye(3).to_sparse_csr()], "torch.sparse_csr"),
    "a sparse result": (lambda x: x.to_sparse(), lambda: [leaf(3, 3)], "torch.sparse_coo"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, ")
@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_take_is_refused(name):
    fun, make, match = REFUSED[name]
    args = make()
    with nothing_left_behind(), pytest.raises(TraceError, match=match):
        tr.checkpoint(fun)(*args)


# --- distributed tensors -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A mesh of this process alone."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("PyTorch was built without torch.distributed")
    store = tmp_path_factory.mktemp("store") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def placed(mesh: Any, *placements: str) -> list[Tensor]:
    """A matrix for each placement: sharded by rows (`0`) or columns (`1`), or replicated (`r`)."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return [
        distribute_tensor(
            leaf(6, 6, seed=i).detach(), mesh, [Replicate() if p == "r" else Shard(int(p))]
        ).requires_grad_()
        for i, p in enumerate(placements)
    ]


def local_facts(fun: Callable[..., Any], args: Sequence[Tensor], wrt: Sequence[Tensor]) -> Any:
    out = fun(*args)
    grads = torch.autograd.grad(out.sin().sum(), wrt)
    return [
        (
            type(t),
            # on a mesh of one device PyTorch 2.11 replicates what is sharded on more
            None if IS_2_11 and t is not out else getattr(t, "placements", None),
            bits(t.to_local() if hasattr(t, "to_local") else t),
        )
        for t in (out, *grads)
    ]


DISTRIBUTED: dict[str, tuple[Callable[..., Any], str]] = {
    "by rows": (lambda x, w: (x @ w).sin(), "0r"),
    "by columns": (lambda x, w: (x @ w).sin(), "10"),
    "partial result": (lambda x, w: x @ w, "10"),
    "softmax and norm": (lambda x, w: F.layer_norm(torch.softmax(x @ w, -1), (6,)), "0r"),
    "new tensors": (lambda x, w: x @ w + torch.zeros_like(x), "0r"),
    "views": (lambda x, w: (x @ w).view(2, 3, 6).transpose(0, 1)[0], "rr"),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_distributed_tensors(name, policy, mesh):
    """The graph's operators run on them: placements of results and gradients are the plain ones."""
    fun, placements = DISTRIBUTED[name]
    args = placed(mesh, *placements)
    checkpointed = tr.checkpoint(fun, policy=policy)
    for _ in range(2):
        assert local_facts(fun, args, args) == local_facts(checkpointed, args, args)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_distributed_module(policy, mesh):
    from torch.distributed.tensor import distribute_module

    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
    distribute_module(net, mesh)
    (x,) = placed(mesh, "0")
    wrt = [x, *net.parameters()]
    for _ in range(2):
        assert local_facts(net, [x], wrt) == local_facts(
            tr.checkpoint(net, policy=policy), [x], wrt
        )


def test_distributed_and_plain_tensors_in_turn(mesh):
    fun = tr.checkpoint(lambda x, w: (x @ w).sin())
    plain = [leaf(6, 6), leaf(6, 6, seed=1)]
    for args in (plain, placed(mesh, "0", "r"), plain, placed(mesh, "1", "0")):
        assert local_facts(lambda x, w: (x @ w).sin(), args, args) == local_facts(fun, args, args)


def goes_local(mesh: Any) -> Callable[..., Any]:
    return lambda x: x.to_local().sin()


def stays_inside(mesh: Any) -> Callable[..., Any]:
    from torch.distributed.tensor import DTensor, Shard

    return lambda x: DTensor.from_local(x, mesh, [Shard(0)]).sin().to_local()


def comes_out(mesh: Any) -> Callable[..., Any]:
    from torch.distributed.tensor import DTensor, Shard

    return lambda x: DTensor.from_local(x, mesh, [Shard(0)]).sin()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [goes_local, comes_out])
def test_a_distributed_tensor_on_one_side(make, policy, mesh):
    fun = make(mesh)
    args = placed(mesh, "0") if make is goes_local else [leaf(6, 6)]
    checkpointed = tr.checkpoint(fun, policy=policy)
    for _ in range(2):
        assert local_facts(fun, args, args) == local_facts(checkpointed, args, args)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_distributed_tensor_made_inside(policy, mesh):
    check(stays_inside(mesh), of(leaf(6, 6)), policy)


def test_a_graph_of_distributed_tensors_is_refused(mesh):
    with nothing_left_behind(), pytest.raises(TraceError, match="to_local"):
        tr.make_graph(torch.sin)(*placed(mesh, "0"))


# --- wrappers of torch.func ----------------------------------------------------------------------


def test_functional_tensors():
    fun = tr.checkpoint(lambda x: x.sin() * 2)
    x = leaf(3).detach()
    for _ in range(2):
        assert_same(torch.func.functionalize(fun)(x), x.sin() * 2)
        wrapped = torch._to_functional_tensor(x)
        assert_same(torch._from_functional_tensor(fun(wrapped)), x.sin() * 2)


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    fun = tr.checkpoint(lambda x: x.sin() * 2)
    with FakeTensorMode():
        x = torch.ones(3, requires_grad=True)
    for _ in range(2):
        out = fun(x)
        out.sum().backward()
        assert isinstance(out, FakeTensor) and isinstance(x.grad, FakeTensor)
    y = leaf(3)
    assert_same(fun(y), y.sin() * 2)


def test_a_wrapper_that_outlived_its_vmap_raises_as_in_plain():
    kept: list[Tensor] = []
    torch.func.vmap(lambda x: kept.append(x) or x)(torch.ones(3))
    for fun in (torch.sin, tr.checkpoint(torch.sin)):
        with pytest.raises(RuntimeError, match="may have escaped"):
            fun(kept[0])
