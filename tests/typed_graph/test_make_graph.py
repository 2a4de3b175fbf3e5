import copy
import dataclasses
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.scan import scan

import torchremat as tr
from tests.helpers import assert_same, nothing_left_behind
from tests.programs import Program, inputs
from tests.typed_graph.checking import check_graph
from torchremat.core.avals import Aval
from torchremat.errors import ConcretizationError, EffectError, GraphError, TraceError

aten = torch.ops.aten


class Scale(torch.autograd.Function):
    """A gradient that no operator has: ten times the true one."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor * 10, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x, *, gain=1.0):
        return torch.tanh(self.inner(x)) * gain + self.shift


def scanned(x):
    return scan(lambda c, row: (c + row.sin(), c * row), x[0] * 2, x)[1]


def branching(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


@tr.checkpoint(policy="names:inside")
def remated(x):
    return tr.checkpoint_name(x.sin(), "inside").cos()


def ops_of(g):
    return [eqn.name for eqn in g.eqns]


# --- what is traced ------------------------------------------------------------------------------


def test_printed():
    w = torch.ones(3)
    g = tr.make_graph(lambda x: {"y": torch.exp(x).sum(1) * w.sum(), "n": 2})(torch.ones(2, 3))
    assert str(g) == (
        "{ lambda a:f32[3]; b:f32[2,3]. let\n"
        "    c:f32[2,3] = aten.exp b\n"
        "    d:f32[2] = aten.sum.dim_IntList[dim=[1]] c\n"
        "    e:f32[] = aten.sum a\n"
        "    f:f32[2] = aten.mul.Tensor d e\n"
        "  in (f, 2:i64[]) }"
    )


def test_printed_with_a_body_an_unused_output_and_sources():
    def f(x):
        values, _ = x.max(0)
        return remated(values)

    g = tr.make_graph(f)(torch.ones(2, 3))
    assert str(g) == (
        "{ lambda ; a:f32[2,3]. let\n"
        "    b:f32[3] _:i64[3] = aten.max.dim[dim=0] a\n"
        "    c:f32[3] = remat_p[\n"
        "      body={ lambda ; d:f32[3]. let\n"
        "          e:f32[3] = aten.sin d\n"
        "          f:f32[3] = name_p[name='inside'] e\n"
        "          g:f32[3] = aten.cos f\n"
        "        in (g,) }\n"
        "      policy=save_only_these_names('inside')\n"
        "    ] b\n"
        "  in (c,) }"
    )
    line = f.__code__.co_firstlineno + 1
    assert f"aten.max.dim[dim=0] a  # test_make_graph.py:{line} (f)" in g.text(sources=True)


def test_eqns_know_avals_params_lines_and_modules():
    model = nn.Sequential(Block(), nn.Tanh())
    g = tr.make_graph(model)(torch.ones(2, 3))
    addmm = next(eqn for eqn in g.eqns if eqn.op is aten.addmm.default)
    assert addmm.module == "0.inner"
    assert (addmm.out_avals, addmm.avals[1]) == (
        (Aval((2, 3), torch.float32),),
        Aval((2, 3), torch.float32),
    )
    add = next(eqn for eqn in g.eqns if eqn.name == "aten.add.Tensor")
    line = Block.forward.__code__.co_firstlineno + 1
    assert (add.module, add.source.line, add.source.function) == ("0", line, "forward")
    assert g.eqns[-1].module == "1"
    (gained,) = [eqn for eqn in g.eqns if eqn.name == "aten.mul.Tensor"]
    assert repr(gained.inputs[1]) == "1.0:f32[]"
    assert gained.inputs[1].aval.weak_type


def test_consts_are_the_very_tensors_each_once():
    model = Block()
    w, x = torch.ones(3), torch.ones(2, 3)
    g = tr.make_graph(lambda x: model(x) + w + w)(x)
    expected = {id(model.inner.weight), id(model.inner.bias), id(model.shift), id(w)}
    assert {id(c) for c in g.consts} == expected
    assert len(g.consts) == 4
    with torch.no_grad():
        w.fill_(5)
    assert_same(tr.eval_graph(g, x), model(x) + w + w)


def test_consts_get_gradients():
    model = Block()
    x = torch.randn(2, 3, requires_grad=True)
    g = tr.make_graph(model)(x)
    wrt = [x, *model.parameters()]
    found = torch.autograd.grad(tr.eval_graph(g, x).sum(), wrt)
    assert_same(found, torch.autograd.grad(model(x).sum(), wrt))


def test_method_partial_and_closure():
    model = Block()
    x = torch.randn(2, 3)
    for f in (model.forward, model.inner.forward, lambda x: model(x, gain=2.0)):
        assert_same(tr.eval_graph(tr.make_graph(f)(x), x), f(x))


def test_trees_keywords_and_python_values():
    def f(d, *, scale, flag, t):
        y = d["a"][0] * scale + t[1]
        return {"y": y, "rest": [d["a"][1], None, "text", flag]}

    args = ({"a": [torch.ones(2), torch.zeros(3)]},)
    kwargs = {"scale": 3.0, "flag": True, "t": (None, torch.arange(2.0))}
    g = tr.make_graph(f)(*args, **kwargs)
    assert_same(tr.eval_graph(g, *args, **kwargs), f(*args, **kwargs))
    assert [a.shape for a in g.in_avals] == [(2,), (3,), (2,)]
    assert g.in_tree.num_leaves == 3
    # None and "text" are Python values; True is a literal output
    assert [str(a) for a in g.out_avals] == ["f32[2]", "f32[3]", "bool[]"]
    assert g.out_tree.num_leaves == 3


def test_static_arguments():
    def f(x, activation, n):
        for _ in range(n):
            x = activation(x)
        return x

    x = torch.ones(3)
    g = tr.make_graph(f, static_argnums=(1, 2))(x, torch.sin, 2)
    assert ops_of(g) == ["aten.sin", "aten.sin"]
    assert_same(tr.eval_graph(g, x, torch.sin, 2), f(x, torch.sin, 2))
    with pytest.raises(
        ValueError, match=r"2 is part of the structure, but here is 3\. .*make_graph"
    ):
        tr.eval_graph(g, x, torch.sin, 3)


def test_return_shape():
    f = lambda x: {"y": x[0], "n": 1, "none": None}  # noqa: E731
    g, shape = tr.make_graph(f, return_shape=True)(torch.ones(2, 3))
    assert isinstance(g, tr.TypedGraph)
    assert shape == {
        "y": Aval((3,), torch.float32),
        "n": Aval((), torch.int64, weak_type=True),
        "none": None,
    }


def test_constants_made_inside_are_consts():
    g = tr.make_graph(lambda x: x * torch.tensor([1.0, 2.0]))(torch.ones(2))
    assert_same(g.consts, [torch.tensor([1.0, 2.0])])
    assert_same(tr.eval_graph(g, torch.ones(2)), torch.tensor([1.0, 2.0]))


def test_a_constant_result_is_a_fresh_copy():
    g = tr.make_graph(lambda x: torch.tensor([1.0, 2.0]))(torch.ones(2))
    tr.eval_graph(g, torch.ones(2)).fill_(7)
    assert_same(tr.eval_graph(g, torch.ones(2)), torch.tensor([1.0, 2.0]))


def test_the_identity_and_no_arguments():
    x = torch.ones(2)
    assert_same(tr.eval_graph(tr.make_graph(lambda x: x)(x), x), x)
    assert tr.eval_graph(tr.make_graph(lambda: 3)()) == 3


def test_inputs_may_lie_otherwise_in_memory():
    g = tr.make_graph(lambda x: x.view(6).sin())(torch.ones(2, 3))
    x = torch.randn(3, 2).t()
    assert_same(tr.eval_graph(g, x), x.reshape(6).sin())


def test_tracing_computes_nothing_and_leaves_nothing_behind():
    state = torch.get_rng_state()
    with nothing_left_behind():
        tr.make_graph(lambda x: F.dropout(x) + branching(x))(torch.ones(1, 2))
    assert_same(torch.get_rng_state(), state)


# --- what it means -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_are_bit_equal(seed):
    program, xs = Program(seed), inputs(seed)
    g = tr.make_graph(program)(*xs)
    check_graph(g)
    torch.manual_seed(1)
    expected = program(*xs)
    torch.manual_seed(1)
    assert_same(tr.eval_graph(g, *xs), expected)


@pytest.mark.parametrize("seed", range(8, 12))
def test_random_programs_have_their_derivatives(seed):
    program = Program(seed, without=("random", "dropout"))
    xs = [x.requires_grad_() for x in inputs(seed)]
    g = tr.make_graph(program)(*xs)
    wrt = [*xs, program.weight]
    results = []
    for f in (program, lambda *xs: tr.eval_graph(g, *xs)):
        loss = sum((y * i).sum() for i, y in enumerate(f(*xs), 1))
        first = torch.autograd.grad(loss, wrt, allow_unused=True, create_graph=True)
        second = sum((d**2).sum() for d in first if d is not None and d.requires_grad)
        higher = None
        if isinstance(second, torch.Tensor):
            higher = torch.autograd.grad(second, wrt, allow_unused=True)
        results.append(([None if d is None else d.detach() for d in first], higher))
    assert_same(*results, close=True)


def test_a_function_of_the_user_keeps_its_derivative():
    def f(x):
        return Scale.apply(x, 2.0).sin()

    x = torch.randn(3, requires_grad=True)
    g = tr.make_graph(f)(x)
    assert ops_of(g) == ["function_p", "aten.sin"]
    assert "Scale(*, 2.0)" in str(g)
    check_graph(g)
    found = torch.autograd.grad(tr.eval_graph(g, x).sum(), x)
    assert_same(found, torch.autograd.grad(f(x).sum(), x))


def test_no_grad_and_detach_stay():
    def f(x):
        with torch.no_grad():
            y = x.sin()
        return x * y + x.cos().detach() * x

    x = torch.randn(3, requires_grad=True)
    g = tr.make_graph(f)(x)
    assert ops_of(g).count("no_grad_p") == 1
    found = torch.autograd.grad(tr.eval_graph(g, x).sum(), x)
    assert_same(found, torch.autograd.grad(f(x).sum(), x))


def test_a_checkpoint_stays_a_checkpoint():
    x = torch.randn(3, requires_grad=True)
    g = tr.make_graph(lambda x: remated(x) * 2)(x)
    residuals = tr.saved_residuals(lambda x: tr.eval_graph(g, x), x)
    assert [str(r).split(" from")[0] for r in residuals] == [
        str(r).split(" from")[0] for r in tr.saved_residuals(lambda x: remated(x) * 2, x)
    ]
    assert_same(
        torch.autograd.grad(tr.eval_graph(g, x).sum(), x),
        torch.autograd.grad((remated(x) * 2).sum(), x),
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_cond(sign):
    x = torch.full((3,), sign)
    tr.make_graph(branching)(torch.ones(2))
    g = tr.make_graph(branching)(torch.ones(3))  # for another size PyTorch adds it to the operands
    check_graph(g)
    assert "true_fn={ lambda ; " in str(g)
    assert_same(tr.eval_graph(g, x), branching(x))


def test_scan():
    x = torch.randn(4, 2)
    g = tr.make_graph(scanned)(x)
    check_graph(g)
    assert "scan" in ops_of(g)
    assert_same(tr.eval_graph(g, x), scanned(x))


def test_writes_are_done_by_eval_graph():
    model = nn.BatchNorm1d(3)
    twin = copy.deepcopy(model)
    x = torch.randn(4, 3)
    g = tr.make_graph(model)(x)
    check_graph(g)
    assert_same(model.running_mean, torch.zeros(3))  # tracing wrote nothing
    assert_same(tr.eval_graph(g, x), twin(x))
    assert_same(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_writes_to_an_argument():
    def f(x, y):
        y += x
        return y * 2

    x, y, z = torch.ones(2), torch.ones(2), torch.ones(2)
    g = tr.make_graph(f)(x, y)
    assert g.writes == (1,)
    assert_same((tr.eval_graph(g, x, y), y), (f(x, z), z))


def test_random_operators_draw_anew():
    x = torch.ones(50)
    g = tr.make_graph(F.dropout)(x)
    a, b = tr.eval_graph(g, x), tr.eval_graph(g, x)
    assert not torch.equal(a, b)
    torch.manual_seed(3)
    a = tr.eval_graph(g, x)
    torch.manual_seed(3)
    assert_same(a, F.dropout(x))


def test_autocast_is_part_of_the_graph():
    x, w = torch.randn(2, 3), torch.randn(3, 3)

    def f(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ w

    g = tr.make_graph(f)(x, w)
    assert g.out_avals == [Aval((2, 3), torch.bfloat16)]
    assert_same(tr.eval_graph(g, x, w), f(x, w))
    plain = tr.make_graph(torch.mm)(x, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tr.eval_graph(plain, x, w).dtype == torch.float32


def test_eval_graph_under_torch_func_and_in_another_trace():
    w = torch.randn(3)
    f = lambda x: (x * w).sin()  # noqa: E731
    x = torch.randn(4, 3)
    g = tr.make_graph(f)(x[0])
    run = lambda x: tr.eval_graph(g, x)  # noqa: E731
    assert_same(torch.vmap(run)(x), torch.vmap(f)(x))
    assert_same(torch.func.jacrev(run)(x[0]), torch.func.jacrev(f)(x[0]))
    assert_same(torch.func.jacfwd(run)(x[0]), torch.func.jacfwd(f)(x[0]))
    again = tr.make_graph(run)(x[0])
    assert str(again) == str(g)
    assert again.consts[0] is w


# --- errors --------------------------------------------------------------------------------------


def test_no_function():
    with pytest.raises(TypeError, match=r"make_graph takes a function.*make_graph\(f\)\(x\)"):
        tr.make_graph(torch.ones(3))


def test_an_argument_that_is_no_tree_of_tensors():
    with pytest.raises(TraceError, match="object"):
        tr.make_graph(lambda x: x)(object())


def test_a_result_that_is_no_tree_of_tensors():
    with pytest.raises(TraceError, match="object"):
        tr.make_graph(lambda x: object())(torch.ones(2))


def test_a_value_that_python_needs():
    with pytest.raises(ConcretizationError, match=r"test_make_graph.py:\d+.*torch.cond"):
        tr.make_graph(lambda x: x if x.sum() > 0 else -x)(torch.ones(2))


def test_a_write_under_no_grad_to_what_may_have_a_gradient():
    def f(x):
        y = x * 2
        with torch.no_grad():
            y.add_(1)
        return y

    with pytest.raises(EffectError, match=r"under no_grad.*Compute a new value"):
        tr.make_graph(f)(torch.ones(2))


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ((torch.ones(3),), ValueError, "arguments like those.*the structure must be"),
        ((torch.ones(3), 3.0), ValueError, r"2\.0 is part of the structure, but here is 3\.0"),
        ((torch.ones(4), 2.0), TypeError, r"takes f32\[3\] on cpu for the input \w+, .*f32\[4\]"),
        ((torch.ones(3).double(), 2.0), TypeError, r"given f64\[3\] on cpu"),
        ((torch.ones(3, device="meta"), 2.0), TypeError, "on meta"),
        ((1.0, 2.0), TypeError, r"given 1\.0\."),
    ],
)
def test_arguments_unlike_the_traced(args, error, match):
    g = tr.make_graph(lambda x, c: x * c)(torch.ones(3), 2.0)
    with pytest.raises(error, match=match):
        tr.eval_graph(g, *args)


# --- the checker ---------------------------------------------------------------------------------


def graph_with_fault(plant):
    g = tr.make_graph(lambda x, y: remated(x.sin() * y).topk(2)[0])(torch.ones(3), torch.ones(3))
    check_graph(g)
    module = copy.deepcopy(g.graph_module)
    g = dataclasses.replace(g, graph_module=module)
    nodes = {n.target if n.op == "call_function" else n.op: n for n in module.graph.nodes}
    changed = plant(module.graph, nodes)
    return changed(g) if changed else g


def _wrong_aval(graph, nodes):
    nodes[aten.sin.default].meta["val"] = torch.ones(4)


def _wrong_dtype(graph, nodes):
    nodes[aten.mul.Tensor].meta["val"] = nodes[aten.mul.Tensor].meta["val"].double()


def _reads_what_comes_later(graph, nodes):
    nodes[aten.sin.default].prepend(nodes[aten.mul.Tensor])


def _late_placeholder(graph, nodes):
    with graph.inserting_after(nodes[aten.sin.default]):
        graph.placeholder("late")


def _in_place(graph, nodes):
    nodes[aten.mul.Tensor].target = aten.mul_.Tensor


def _no_such_attribute(graph, nodes):
    nodes["get_attr"].target = "nothing"


def _cannot_run(graph, nodes):
    nodes[aten.mul.Tensor].target = aten.mm.default


def _no_aval(graph, nodes):
    del next(iter(graph.nodes)).meta["val"]


def _a_method(graph, nodes):
    nodes[aten.sin.default].op = "call_method"


def _tuple_as_output(graph, nodes):
    nodes["output"].args = ((nodes[aten.topk.default],),)


def _text_as_output(graph, nodes):
    nodes["output"].args = (("text",),)


def _missing_output(graph, nodes):
    nodes["output"].args = ((),)


def _wrong_const(graph, nodes):
    return lambda g: dataclasses.replace(g, consts=[torch.ones(5)])


def _wrong_writes(graph, nodes):
    return lambda g: dataclasses.replace(g, writes=(9,))


def _fault_in_body(graph, nodes):
    body = graph.owning_module.get_submodule(nodes["get_attr"].target)
    (cos,) = body.graph.find_nodes(op="call_function", target=aten.cos.default)
    cos.meta["val"] = torch.ones(7)


def _item_out_of_range(graph, nodes):
    nodes[operator.getitem].args = (nodes[aten.topk.default], 5)


@pytest.mark.parametrize(
    ("plant", "match"),
    [
        (_wrong_aval, r"sin gives f32\[3\], but is noted as f32\[4\] \(from test_make"),
        (_wrong_dtype, r"gives f32\[3\], but is noted as f64\[3\]"),
        (_reads_what_comes_later, "mul reads sin, which does not stand before it"),
        (_late_placeholder, "the input late comes after an operator"),
        (_in_place, r"aten\.mul_\.Tensor writes to its arguments"),
        (_no_such_attribute, "reads nothing, which the module lacks"),
        (_cannot_run, "cannot run on what it reads"),
        (_no_aval, "has no aval"),
        (_a_method, "is a call_method, not one of"),
        (_tuple_as_output, "the output topk is not a tensor"),
        (_text_as_output, "'text' is neither a value nor a number"),
        (_missing_output, "the graph has 0 outputs, its structure 1"),
        (_wrong_const, r"is f32\[5\], but noted as f32\[3\]"),
        (_wrong_writes, r"writes \(9,\) are not different constants or inputs"),
        (_fault_in_body, r"cos gives f32\[3\], but is noted as f32\[7\]"),
        (_item_out_of_range, "getitem.* cannot run on what it reads"),
    ],
)
def test_the_checker_finds(plant, match):
    with pytest.raises(GraphError, match=match):
        check_graph(graph_with_fault(plant))


def test_the_checker_shows_the_graph_round_the_fault():
    g = tr.make_graph(lambda x: x.sin().cos().tan().exp().log().abs().neg().sin().cos().tan())(
        torch.ones(3)
    )
    (exp,) = g.graph_module.graph.find_nodes(op="call_function", target=aten.exp.default)
    exp.meta["val"] = torch.ones(1)
    with pytest.raises(GraphError, match="exp gives") as caught:
        check_graph(g)
    lines = str(caught.value).splitlines()[1:]
    assert lines[0] == "{ lambda ; a:f32[3]. let"
    assert [line for line in lines if line.endswith("<--")] == ["    e:f32[1] = aten.exp d  <--"]
    assert lines[-2:] == ["    ...", "  in (k,) }"]
