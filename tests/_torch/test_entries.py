"""Each private thing of PyTorch that the library uses is there and does what the library needs.

A new release of PyTorch is ready for use when these pass.
"""

import ast
import copy
import importlib.util
import inspect
import sys
import weakref
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed, fx
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.module_tracker import ModuleTracker

from tests.helpers import IS_BEFORE_2_13
from torchremat import _torch
from torchremat._torch.parts import all_parts, find_all_missing

aten = torch.ops.aten
CHECKS = {}


def check(*names):
    """The decorated function is the check of these names."""

    def register(function):
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return register


@check("tree_flatten", "tree_unflatten", "tree_map", "TreeSpec")
def trees():
    leaves, spec = _torch.tree_flatten({"a": (1, [2]), "b": None})
    assert isinstance(spec, _torch.TreeSpec)
    assert leaves == [1, 2, None]
    assert _torch.tree_unflatten(leaves, spec) == {"a": (1, [2]), "b": None}
    assert _torch.tree_map(str, (1, [2])) == ("1", ["2"])
    assert spec == _torch.tree_flatten({"a": (3, [4]), "b": 5})[1]


@check("tree_flatten_with_path", "keystr")
def paths_in_trees():
    pairs, _ = _torch.tree_flatten_with_path({"w": [1]})
    assert [(_torch.keystr(path), leaf) for path, leaf in pairs] == [("['w'][0]", 1)]


@check("functorch_is_active", "differentiates", "innermost_transform", "TransformType")
def levels():
    def inside(x):
        seen.append((_torch.functorch_is_active(), _torch.differentiates()))
        seen.append(_torch.innermost_transform())
        return x.sum()

    seen = []
    assert not _torch.functorch_is_active()
    assert _torch.innermost_transform() is None
    torch.func.grad(inside)(torch.ones(2))
    torch.vmap(inside)(torch.ones(2, 2))
    torch.func.jvp(inside, (torch.ones(2),), (torch.ones(2),))
    kinds = _torch.TransformType
    assert seen == [
        (True, True), kinds.Grad, (True, False), kinds.Vmap, (True, False), kinds.Jvp
    ]  # fmt: skip


@check("requires_grad_at_any_level", "innermost_tensor")
def wrapped_tensors():
    plain = torch.ones(2, requires_grad=True)

    def inside(x):
        assert _torch.requires_grad_at_any_level(x * plain)
        assert not _torch.functorch_is_active() or _torch.innermost_tensor(x) is not x
        return x.sum()

    torch.func.grad(inside)(torch.ones(2))
    torch.vmap(inside)(torch.ones(2, 2))
    assert not _torch.requires_grad_at_any_level(torch.ones(2))
    assert _torch.innermost_tensor(plain) is plain


def _double(primals, tangents):
    return [p * 2 for p in primals], [None if t is None else t * 2 for t in tangents]


@check("push_forward_at_current_level")
def forward_at_a_level():
    def fun(x):
        (y,) = _torch.push_forward_at_current_level(_double, [x])
        return y

    found = torch.func.jvp(fun, (torch.ones(2),), (torch.full((2,), 3.0),))
    assert [t.tolist() for t in found] == [[2, 2], [6, 6]]


@check("record_at_current_level", "RecordRule", "leaf_at_current_level", "unwrap_dead_wrappers")
def recorded_at_a_level():
    def rule(inputs, perturbed, lower):
        seen.append((list(perturbed), _torch.transform_depth()))
        with lower():
            seen.append(_torch.transform_depth())
            outputs = [inputs[0] * 2]
        leaf = _torch.leaf_at_current_level(torch.zeros(2))
        assert leaf.requires_grad
        return outputs, inputs, lambda kept, cts: [cts[0] * kept[0], None]

    seen = []
    x = torch.full((2,), 3.0)
    fun = lambda x: _torch.record_at_current_level(rule, [x, torch.ones(2)])[0].sum()  # noqa: E731
    gradient, value = torch.func.grad_and_value(fun)(x)
    assert (gradient.tolist(), value) == ([3, 3], 12)
    assert seen == [([True, False], 1), 0]
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(x)
    assert _torch.unwrap_dead_wrappers(tuple(kept))[0] is x


@check("map_at_current_level")
def mapped_at_a_level():
    def rule(inputs, in_dims, size, randomness):
        assert (in_dims, size, randomness) == ((1,), 3, "error")
        return [inputs[0] * 2], [1]

    fun = lambda x: _torch.map_at_current_level(rule, [x])[0]  # noqa: E731
    assert torch.func.vmap(fun, in_dims=1)(torch.ones(2, 3)).tolist() == [[2, 2]] * 3


@check("without_level")
def closures_below_a_level():
    def rule(primals, tangents):
        seen.extend(_torch.without_level(t, 1)[1] for t in closures)
        return [primals[0] + _torch.without_level(closures[0], 1)[0]], tangents

    def fun(x):
        closures[:] = [x * 1, torch.ones(2) * 1]
        return _torch.push_forward_at_current_level(rule, [x])[0]

    seen, closures = [], []
    found = torch.func.jvp(fun, (torch.ones(2),), (torch.ones(2),))[0]
    assert (seen, found.tolist()) == ([True, False], [2, 2])


@check("wrap_at_current_level")
def wrap_for_writes():
    def write(x, y):
        _torch.wrap_at_current_level(y).copy_(x)
        return x.sum()

    y = torch.zeros(2)
    torch.func.grad(lambda x: write(x, y))(torch.ones(2))
    assert y.tolist() == [1.0, 1.0]


@check("without_batch")
def the_axis_of_a_level():
    def fun(x):
        assert _torch.without_batch(x, 2) == (x, None)  # of another level
        value, axis = _torch.without_batch(x, 1)
        assert (value.tolist(), axis) == ([[1, 1, 1]] * 2, 0)
        return x

    assert torch.func.vmap(fun)(torch.ones(2, 3)).tolist() == [[1, 1, 1]] * 2


@check("dual_level_as_functorch_level")
def dual_level_inside():
    with forward_ad.dual_level(), _torch.dual_level_as_functorch_level():
        assert torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))[1].tolist() == [1]


@check("keeps_graph_after_backward")
def keeps_graph():
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    seen = []
    y.register_hook(lambda _: seen.append(_torch.keeps_graph_after_backward()))
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]


@check("step_without_hooks")
def step_of_the_class():
    x = torch.ones(1, requires_grad=True)
    x.grad = torch.ones(1)
    optimizer = torch.optim.SGD([x], lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook ran"))
    _torch.step_without_hooks(optimizer)
    assert x.item() == 0.5


@check("backward_pass_id", "call_after_backward")
def passes_of_the_engine():
    def hook(_):
        seen.append(_torch.backward_pass_id())
        _torch.call_after_backward(lambda: seen.append("over"))

    x = torch.ones(1, requires_grad=True)
    y = x * 2
    seen = []
    y.register_hook(hook)
    for tensor in (y, x):
        tensor.register_hook(lambda _: seen.append(_torch.backward_pass_id()))
    y.backward(retain_graph=True)
    y.backward()
    first, second = seen[0], seen[4]
    assert seen == [first] * 3 + ["over"] + [second] * 3 + ["over"]
    assert -1 not in (first, second)
    assert first != second
    assert _torch.backward_pass_id() == -1


@check("next_node_number", "node_number_of", "cotangents_of")
def nodes_of_autograd():
    x = torch.ones(2, 3, requires_grad=True)
    first = _torch.next_node_number()
    y = x * 2
    z = y.sum(0)
    assert [_torch.node_number_of(t.grad_fn) for t in (y, z)] == [first, first + 1]
    assert _torch.next_node_number() == first + 2
    assert _torch.cotangents_of(z.grad_fn) == [((3,), torch.float32)]
    ((leaf, _), *_) = y.grad_fn.next_functions
    assert _torch.node_number_of(leaf) > first + 2


@check("out_of_compiler")
def out_of_compiler():
    @_torch.out_of_compiler("because")
    def fun(x):
        return x, torch.compiler.is_compiling()

    assert torch.compile(lambda x: fun(x + 1), backend="eager")(torch.ones(1)) == (2, False)
    with pytest.raises(Exception, match="because"):
        torch.compile(lambda x: fun(x + 1), backend="eager", fullgraph=True)(torch.ones(1))


@check("hide_fakes")
def hide_fakes():
    with _torch.new_fake_mode():
        fake = torch.ones(1)
    asked = []
    with _torch.hide_fakes(asked):
        assert not isinstance(fake, torch._subclasses.FakeTensor)
        assert isinstance(fake, _torch.FakeTensor)
        assert torch._subclasses.fake_tensor.is_fake(fake)
        with _torch.hide_fakes(None):
            assert isinstance(fake, torch._subclasses.FakeTensor)
    assert isinstance(fake, torch._subclasses.FakeTensor)
    assert asked == [__file__]


@check("mark_as_constant")
def mark_as_constant():
    calls = []

    def is_true():
        calls.append(sys._getframe())
        return True

    _torch.mark_as_constant(is_true)
    compiled = torch.compile(lambda x: x + is_true(), backend="eager", fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(2)] == [2, 2]
    assert len(calls) == 1


@check("push_dual_numbers_forward", "has_tangents", "in_dual_level")
def dual_numbers():
    assert not _torch.in_dual_level()
    with forward_ad.dual_level():
        assert _torch.in_dual_level()
        dual = forward_ad.make_dual(torch.ones(2), torch.full((2,), 3.0))
        assert _torch.has_tangents([torch.ones(1), dual])
        assert not _torch.has_tangents([torch.ones(1)])
        with_tangent, without = _torch.push_dual_numbers_forward(_double, [dual, torch.ones(1)])
        assert forward_ad.unpack_dual(with_tangent).tangent.tolist() == [6, 6]
        assert forward_ad.unpack_dual(without).tangent is None


@check("apply_to_functional")
def functionalized():
    def fun(x):
        (y,) = _torch.apply_to_functional(lambda inner: (inner[0] * 2,), [x])
        return y.add_(1)

    assert torch.func.functionalize(fun)(torch.ones(2)).tolist() == [3, 3]


class _Edges(torch.autograd.Function):
    """Notes which of its edges run."""

    @staticmethod
    def forward(ctx, *inputs):
        return sum(inputs)

    @staticmethod
    def backward(ctx, grad):
        _Edges.seen = _torch.edges_that_run(ctx.next_functions)
        return grad, grad, grad


@check("edges_that_run")
def edges():
    leaf, constant = torch.ones(2, requires_grad=True), torch.ones(2)
    inner = torch.ones(2, requires_grad=True) * 1
    for wrt, expected in {leaf: (True, False, False), inner: (False, False, True)}.items():
        torch.autograd.grad(_Edges.apply(leaf, constant, inner).sum(), wrt)
        assert _Edges.seen == expected
    _Edges.apply(leaf, constant, inner).sum().backward()
    assert _Edges.seen == (True, False, True)


@check("run_backward")
def backward():
    x, unused = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    y = (x * x).sin()
    found = _torch.run_backward((y,), (x, unused), (torch.ones(2),), create_graph=True)
    assert found[1] is None
    assert torch.equal(found[0], torch.autograd.grad(y.sum(), x)[0])
    assert found[0].requires_grad


@check("DATA_DEPENDENT_ERRORS", "new_fake_mode", "FakeTensor", "FakeTensorMode")
def fake_tensors():
    mode = _torch.new_fake_mode()
    assert isinstance(mode, _torch.FakeTensorMode)
    with mode:
        x = torch.ones(2)
        assert isinstance(x, _torch.FakeTensor)
        assert x.fake_mode is mode
        for ask in (torch.Tensor.item, torch.nonzero):
            with pytest.raises(_torch.DATA_DEPENDENT_ERRORS):
                ask(x[:1] > 0)


def test_tangents_of_views_have_the_storage_offset_of_their_view():
    zeros = torch.ops.aten._new_zeros_with_same_feature_meta
    tangent, values = torch.ones(1, 3), torch.ones(3, 3)
    with _torch.new_fake_mode() as mode:
        tangent, part = mode.from_tensor(tangent), mode.from_tensor(values)[2:]
        for _ in range(2):  # PyTorch's cache answers from the second on
            assert zeros(tangent, part).storage_offset() == 6


@check("isolate", "TorchDispatchMode")
def isolation():
    class Refuse(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError

    def inside(x):
        with _torch.isolate():
            assert not _torch.functorch_is_active()
            torch.ones(2).sin()
        return x.sum()

    torch.func.grad(inside)(torch.ones(2))
    with Refuse(), _torch.isolate():
        torch.ones(2).sin()


@check("leave_function_mode")
def a_function_mode_below_another():
    class Sees(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(self)
            return func(*args, **(kwargs or {}))

    seen, below, above = [], Sees(), Sees()
    below.__enter__()
    with above:
        _torch.leave_function_mode(below)
        torch.ones(2).sin()
    torch.ones(2).sin()
    assert set(seen) == {above}


@check("set_saved_tensors_hooks_aside")
def hooks_aside():
    packed = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        with _torch.set_saved_tensors_hooks_aside():
            x.sin()
        assert packed == []
        x.sin()
    assert len(packed) == 1


def _traced(fun, *shapes):
    """The graph of `fun`, and the tracer that wrote it."""
    tracer = _torch.new_tracer()
    mode = _torch.new_fake_mode()
    with _torch.enter_proxy_modes(tracer, mode):
        inputs = []
        for i, shape in enumerate(shapes):
            with _torch.isolate(), mode:
                inputs.append(torch.empty(shape))
            proxy = tracer.create_proxy("placeholder", f"x{i}", (), {})
            _torch.track(inputs[-1], proxy, tracer)
        output = fun(*inputs)
        tracer.graph.output(_torch.proxy_of(output, tracer).node)
    assert _torch.proxy_of(torch.ones(1), tracer) is None
    return fx.GraphModule(tracer.root, tracer.graph), tracer


@check("enter_proxy_modes", "track", "proxy_of", "PythonKeyTracer", "innermost_proxy_mode")
@check("ProxyTorchDispatchMode")
def tracing():
    def fun(x):
        mode = _torch.innermost_proxy_mode()
        assert isinstance(mode, _torch.ProxyTorchDispatchMode)
        modes.append(mode)
        return x.sin().sum()

    modes = []
    module, tracer = _traced(fun, (3,))
    assert modes[0].tracer is tracer
    targets = [str(n.target) for n in module.graph.nodes if n.op == "call_function"]
    assert targets == ["aten.sin.default", "aten.sum.default"]
    assert _torch.innermost_proxy_mode() is None


@check("let_modes_see_views_of_zeros")
def views_of_zeros():
    _torch.let_modes_see_views_of_zeros()
    with _torch.new_fake_mode():
        zeros = torch._efficientzerotensor((2, 3))
        assert isinstance(zeros.view(3, 2), _torch.FakeTensor)
    real = torch._efficientzerotensor((2, 3)).view(3, 2)
    assert real._is_zerotensor()
    assert real.sum() == 0


@check("is_active", "without_function_modes", "TorchFunctionMetadataMode")
def function_modes():
    class Mode(_torch.TorchFunctionMetadataMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    mode = Mode(_torch.PythonKeyTracer())
    assert not _torch.is_active(mode)
    with mode:
        assert _torch.is_active(mode)
        torch.ones(1)
        assert len(seen) == 1
        with _torch.without_function_modes():
            torch.ones(1)
        assert len(seen) == 1


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(x, by=2):
        return x * by

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.by, None


@check(
    "FunctionHandler", "handle_function_calls", "is_function_of_user", "direct_apply",
    "node_class_of",
)  # fmt: skip
def functions():
    def handler(cls, args, apply):
        calls.append(cls)
        return apply(*args)

    calls = []
    bound = _Square.apply
    with _torch.handle_function_calls(handler):
        assert _Square.apply(torch.ones(1)) == bound(torch.ones(1)) == 1
    assert calls == [_Square, _Square]
    bound(torch.ones(1))
    assert len(calls) == 2
    functions_with_setup_context()
    assert _torch.is_function_of_user(_Square)
    assert not _torch.is_function_of_user(torch.autograd.forward_ad.dual_level)
    x = torch.ones(1, requires_grad=True)
    y = _torch.direct_apply(_Square)(x)
    assert type(y.grad_fn) is _torch.node_class_of(_Square)
    torch.autograd.grad(y, x)


@check("wrap_tensor_hooks")
def hooks_that_are_wrapped():
    class Identity(_Square):
        @staticmethod
        def backward(ctx, cotangent):
            return cotangent

    def wrap(hook):
        return lambda gradient: 3 * hook(gradient)

    x = torch.ones(1, requires_grad=True)
    _torch.wrap_tensor_hooks(_torch.node_class_of(Identity), wrap)
    y = _torch.direct_apply(Identity)(x)
    z = y * 1
    handle = y.register_hook(lambda gradient: 5 * gradient)
    z.register_hook(lambda gradient: 7 * gradient)  # not of that class
    assert torch.autograd.grad(z, x, retain_graph=True)[0] == 105
    handle.remove()
    assert torch.autograd.grad(z, x)[0] == 7


def functions_with_setup_context():
    def handler(cls, args, apply):
        calls.append((cls, args))
        return apply(args[0] + 1, *args[1:])

    calls = []
    x = torch.ones(1, requires_grad=True)
    bound = _Scale.apply
    with _torch.handle_function_calls(handler):
        named = {} if IS_BEFORE_2_13 else {"by": 4}  # it takes no keyword arguments there
        found = bound(x), _Scale.apply(x, 3), _Scale.apply(x, *([] if named else [4]), **named)
        gradient = torch.func.grad(lambda x: _Scale.apply(x, 4).sum())(torch.ones(1))
        refused = pytest.raises(RuntimeError, match="must override the setup_context")
        with _torch.dispatch_restored(), refused:
            torch.func.grad(lambda x: _Square.apply(x).sum())(torch.ones(1))
        with pytest.raises(TypeError):
            _Scale.apply()
        assert _torch.direct_apply(_Scale)(x, 5) == 5
    assert [y.item() for y in found] == [4, 6, 8]
    assert [torch.autograd.grad(y, x)[0].item() for y in found] == [2, 3, 4]
    assert gradient == 4
    assert [cls for cls, _ in calls[:3]] == [_Scale] * 3
    assert [args[1:] for _, args in calls[:3]] == [(2,), (3,), (4,)]
    # at the level of `grad`, and below it
    assert [_torch.is_function_of_user(cls) for cls, _ in calls[3:5]] == [False, True]
    assert torch.func.grad(lambda x: _Scale.apply(x, 4).sum())(torch.ones(1)) == 4


@check("OpOverload", "OpOverloadPacket", "schema_arguments", "schema_of", "get_boxed_call")
def operators():
    assert isinstance(aten.add.Tensor, _torch.OpOverload)
    assert isinstance(aten.add, _torch.OpOverloadPacket)
    assert _torch.schema_of(aten.add_.Tensor).is_mutable
    arguments = _torch.schema_arguments(aten.add.Tensor)
    assert [a.name for a in arguments] == ["self", "other", "alpha"]
    assert [a.kwarg_only for a in arguments] == [False, False, True]
    assert arguments[2].default_value == 1
    assert _torch.get_boxed_call(aten.add.Tensor)(torch.ones(1), torch.ones(1)) == 2


@check("Gpu", "stand_for_gpu")
def gpus_that_are_not_here():
    assert _torch.Gpu("sm_90").version == (9, 0)
    x = torch.ones(4, 4, requires_grad=True)
    with _torch.new_fake_mode(None) as mode:
        fake = mode.from_tensor(x)
        plain = torch.dropout(fake, 0.5, True).grad_fn.name()
        with _torch.stand_for_gpu(_torch.Gpu("sm_90")):
            assert torch.dropout(fake, 0.5, True).grad_fn.name() == "NativeDropoutBackward0"
        assert torch.dropout(fake, 0.5, True).grad_fn.name() == plain == "MulBackward0"


@check("FREES_COTANGENTS")
def cotangents_that_are_freed():
    class Double(torch.autograd.Function):
        boxed_grads_call = True

        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, *given):
            assert isinstance(given[0], list) is _torch.FREES_COTANGENTS
            (cotangent,) = given[0] if _torch.FREES_COTANGENTS else given
            alive.append(weakref.ref(cotangent.untyped_storage()))
            if _torch.FREES_COTANGENTS:
                given[0].clear()
            gradient = 2 * cotangent
            del cotangent
            alive.append(alive[0]() is not None)
            return gradient

    alive = []
    Double.apply(torch.ones(2, requires_grad=True)).square().sum().backward()
    assert alive[1] is not _torch.FREES_COTANGENTS


@check("below_autograd", "is_below_autograd", "DispatchKey")
def beneath_autograd():
    x = torch.ones(2, requires_grad=True)
    assert not _torch.is_below_autograd()
    with _torch.below_autograd():
        assert _torch.is_below_autograd()
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad
    assert _torch.DispatchKey.AutogradFunctionality is not None


@check("HigherOrderOperator", "register_simple_rules", "register_derivative_rules")
@check("dispatch_call", "restore_vmap")
def higher_order_operators():
    class Twice(_torch.HigherOrderOperator):
        def __init__(self):
            super().__init__("twice_for_a_test")

        def __call__(self, x):
            return super().__call__(x)

    class Apply(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return _torch.dispatch_call(twice, x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    twice = Twice()
    _torch.register_simple_rules(twice, lambda x: x * 2)
    keys = [getattr(torch.DispatchKey, k) for k in dir(torch.DispatchKey) if k[:8] == "Autocast"]
    assert len(keys) >= 5  # of which PyTorch skips three
    assert not any(map(twice.non_fallthrough_keys.has, keys))
    _torch.register_derivative_rules(twice, Apply.apply)
    x = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad(twice(x).sum(), x)
    assert grad.tolist() == [2, 2]
    assert torch.func.grad(lambda x: twice(x).sum())(torch.ones(2)).tolist() == [2, 2]
    module, _ = _traced(twice, (2,))
    (node,) = module.graph.find_nodes(op="call_function", target=twice)
    assert node.args[0].op == "placeholder"
    found, dims = _torch.restore_vmap(lambda x: x * 2, (0,), 3, "error")(torch.ones(3, 2))
    assert (found.shape, dims) == ((3, 2), 0)


@check(
    "flash_attention_on_cpu", "flash_attention_on_cpu_backward", "FLASH_ATTENTION",
    "FLASH_ATTENTION_BACKWARD",
)  # fmt: skip
def attention_on_the_cpu():
    q, cotangent = torch.randn(2, 4, 5, 3), torch.randn(2, 4, 5, 3)
    k, v = torch.randn(2, 2, 7, 3), torch.randn(2, 2, 7, 3)  # fewer heads, other lengths
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *inputs, is_causal=True, scale=0.3, enable_gqa=True
    )
    with torch.no_grad():
        out, lse = _torch.flash_attention_on_cpu(*inputs, 0.0, True, scale=0.3)
        grads = _torch.flash_attention_on_cpu_backward(
            cotangent, *inputs, out, lse, 0.0, True, scale=0.3
        )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, inputs, cotangent))
    assert lse.shape == (2, 4, 5)


@check("attend_ragged", "attend_ragged_backward")
def attention_on_a_gpu():
    """What there is without a GPU: the arguments are those that it is called with."""
    forward, backward = aten._flash_attention_forward, aten._flash_attention_backward
    names = [[a.name for a in op.default._schema.arguments] for op in (forward, backward)]
    inputs, cuts = ["query", "key", "value"], ["cum_seq_q", "cum_seq_k", "max_q", "max_k"]
    options = ["dropout_p", "is_causal"]
    assert names[0][:10] == [*inputs, *cuts, *options, "return_debug_mask"]
    results = ["out", "logsumexp"]
    random = ["rng_state", "unused"]
    assert names[1][:14] == ["grad_out", *inputs, *results, *cuts, *options, *random]
    assert all("scale" in each for each in names)


@check("autograd_as_at_the_top")
def differentiating_in_a_kernel():
    def tangent_of_cube(x):
        return torch.func.jvp(lambda x: x**3, (x,), (torch.ones_like(x),))[1]

    @torch.library.custom_op("torchremat_test_torch::cube_twice", mutates_args=())
    def cube_twice(x: torch.Tensor) -> torch.Tensor:
        with _torch.autograd_as_at_the_top():
            return torch.func.grad(tangent_of_cube)(x)

    x = torch.tensor(2.0)
    with _torch.below_autograd(), torch.utils.flop_counter.FlopCounterMode(display=False):
        actual = cube_twice(x.clone().requires_grad_())
    assert actual.item() == 12
    assert not actual.requires_grad


@check("register_function")
def derivatives_of_a_custom_operator():
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(run, x):
            return run(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, cotangent):
            return None, 3 * cotangent

        @staticmethod
        def jvp(ctx, _, tangent):
            return 3 * tangent

    def triple(x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    torch.library.custom_op("torchremat_test_torch::triple", triple, mutates_args=())
    op = torch.ops.torchremat_test_torch.triple.default
    _torch.register_function(op, Triple)
    x = torch.tensor(2.0, requires_grad=True)
    op(x).backward()
    assert x.grad == 3
    for outer in (torch.func.jacfwd, torch.func.jacrev):
        for inner in (torch.func.jacfwd, torch.func.jacrev):
            second = outer(inner(lambda x: op(x).sin()))(torch.tensor(2.0))
            torch.testing.assert_close(second, -9 * torch.tensor(6.0).sin())
    derivatives_of_an_operator_that_is_not_linear()


def derivatives_of_an_operator_that_is_not_linear():
    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(run, *xs_and_factor):
            return run(*xs_and_factor)

        @staticmethod
        def setup_context(ctx, inputs, output):
            _, *xs, ctx.factor = inputs
            ctx.save_for_backward(*xs)

        @staticmethod
        def backward(ctx, *cotangents):
            pairs = zip(cotangents, ctx.saved_tensors, strict=True)
            return None, *(2 * ctx.factor * c * x for c, x in pairs), None

    def squares(xs: Sequence[torch.Tensor], factor: float) -> list[torch.Tensor]:
        return [factor * x * x for x in xs]

    def push(args, tangents):
        return [2 * args[-1] * x * t for x, t in zip(args[:-1], tangents[:-1], strict=True)]

    torch.library.custom_op("torchremat_test_torch::squares", squares, mutates_args=())
    op = torch.ops.torchremat_test_torch.squares.default
    _torch.register_function(op, Squares, push)
    x = torch.tensor(2.0, requires_grad=True)
    (grad,) = torch.autograd.grad(op([x], 3.0)[0], x)
    assert grad == 12
    for outer in (torch.func.jacfwd, torch.func.jacrev):
        for inner in (torch.func.jacfwd, torch.func.jacrev):
            assert outer(inner(lambda x: op([x], 3.0)[0]))(torch.tensor(2.0)) == 6
    with forward_ad.dual_level():  # forward over reverse, at one level
        dual = forward_ad.make_dual(x, torch.tensor(1.0))
        (grad,) = torch.autograd.grad(op([dual], 3.0)[0], dual, create_graph=True)
        assert forward_ad.unpack_dual(grad).tangent == 6


@check("is_mapped_at")
def mapped_dimensions():
    def outer(x):
        def inner(y):
            inner_level = _torch.transform_depth()
            assert _torch.is_mapped_at(x * y, inner_level)
            assert _torch.is_mapped_at(x * y, inner_level - 1)
            assert not _torch.is_mapped_at(x, inner_level)
            assert not _torch.is_mapped_at(w, inner_level)
            return x * y + _torch.add_batch_dim(torch.arange(3.0), 0, inner_level - 1)

        return torch.vmap(inner)(torch.ones(2))

    w = torch.ones(2)
    rows = torch.vmap(outer)(torch.ones(3))
    assert torch.equal(rows, torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]))


@check("is_of_level_above")
def levels_that_wrap():
    def fun(x):
        depth = _torch.transform_depth()
        assert _torch.is_of_level_above(x, depth - 1)
        assert not _torch.is_of_level_above(x, depth)
        return x.sum()

    torch.func.grad(fun)(torch.ones(2))
    assert not _torch.is_of_level_above(torch.ones(2), 0)


@check("let_functions_know_axes")
def functions_that_are_mapped():
    class Twice(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, cotangent):
            return 2 * cotangent

    def known(function):
        seen.append((function, _torch.transform_depth()))
        return function

    seen = []
    _torch.let_functions_know_axes(known)
    try:
        gradient = torch.func.grad(lambda x: torch.vmap(Twice.apply)(x).sum())(torch.ones(3))
    finally:
        _torch.patches._knowers.remove(known)
    assert torch.equal(gradient, torch.full((3,), 2.0))
    assert seen == [(Twice, 2)]


@check("register_axis_rules", "without_dead_levels")
def rules_that_see_every_level():
    class Negated(torch.autograd.Function):
        @staticmethod
        def forward(run, op, params, x):
            return run(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            _, ctx.op, ctx.params, _ = inputs

        @staticmethod
        def backward(ctx, cotangent):
            return None, None, None, ctx.op(cotangent, **ctx.params)

        @staticmethod
        def jvp(ctx, _, __, ___, tangent):
            return ctx.op(tangent, **ctx.params)

    class Op(_torch.HigherOrderOperator):
        def __call__(self, x, /, **params):
            return super().__call__(_torch.without_dead_levels(x), **params)

    def batched(level, size, pair, **params):
        seen.append((level, size, pair[1]))
        return op(pair[0], **params), pair[1]

    op = Op("torchremat_test_axis_rules")
    _torch.register_simple_rules(op, lambda x, *, by: -by * x)
    _torch.register_axis_rules(op, Negated, batched)
    seen = []
    for outer in (torch.func.jacfwd, torch.func.jacrev):
        for inner in (torch.func.jacfwd, torch.func.jacrev):
            second = outer(inner(lambda x: op(x, by=3.0).sin()))(torch.tensor(2.0))
            torch.testing.assert_close(second, 9 * torch.tensor(6.0).sin())
    seen.clear()
    unmapped = torch.tensor(2.0)
    torch.vmap(lambda x: x + op(unmapped, by=1.0))(torch.ones(3))
    assert seen == [(1, 3, None)]
    x = torch.tensor(2.0, requires_grad=True)
    op(x, by=3.0).backward()
    assert x.grad == -3
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x * 2)(torch.tensor(2.0))
    assert op(kept[0], by=3.0) == -6


@check("tensor_guard", "TensorGuards")
def guards():
    x = torch.ones(2, 3)
    guard = _torch.tensor_guard([x], [()])
    assert isinstance(guard, _torch.TensorGuards)
    assert guard.check(torch.zeros(2, 3))
    others = [
        torch.ones(3, 2), torch.ones(3, 2).t(), x.double(), torch.ones(2, 3, requires_grad=True),
        torch.nn.Parameter(x, requires_grad=False),
    ]  # fmt: skip
    assert not any(guard.check(other) for other in others)
    guard = _torch.tensor_guard([x], [(0,)])
    assert guard.check(torch.ones(5, 3))
    assert not guard.check(torch.ones(2, 4))


@check(
    "NAMES_IN_SIZES", "ShapeEnv", "are_known_equal", "assume_sizes", "guards_of", "hint_of",
    "find_assumed_sizes", "names_in_size", "size_name",
    "new_shape_env", "new_symbol", "num_guards", "print_size", "settle_size", "shape_env_of",
)  # fmt: skip
def sizes():
    shapes = _torch.new_shape_env()
    a, b = (_torch.new_symbol(shapes, 6, name) for name in "ab")
    assert isinstance(shapes, _torch.ShapeEnv)
    assert _torch.shape_env_of(a) is shapes
    half = a // 2 + b
    assert len(_torch.names_in_size(half)) == 2
    assert _torch.hint_of(half) == 9
    before = _torch.num_guards(shapes)
    assert not _torch.are_known_equal(a, b) and _torch.are_known_equal(a * 2, a + a)
    assert _torch.num_guards(shapes) == before
    assert a == b
    assert _torch.num_guards(shapes) > before
    (name,) = _torch.names_in_size(half)  # b is a now
    assert eval(_torch.print_size(half), dict(_torch.NAMES_IN_SIZES), {name: 10}) == 15
    assert _torch.find_assumed_sizes() is None
    with _torch.assume_sizes({name: 10}):
        assert _torch.find_assumed_sizes() == {name: 10}
        assert _torch.hint_of(half) == 15
    assert [*map(_torch.size_name, (a, half, 3))] == [name, None, None]
    guards = _torch.guards_of(shapes, [a, b], ["x", "y"])
    assert eval(guards, dict(_torch.NAMES_IN_SIZES), {"x": 7, "y": 7})
    assert not eval(guards, dict(_torch.NAMES_IN_SIZES), {"x": 7, "y": 8})
    assert _torch.settle_size(a) is a
    assert a * 2 == 12
    assert _torch.settle_size(a) == 6


@check("track_size")
def sizes_in_traces():
    shapes = _torch.new_shape_env()
    size = _torch.new_symbol(shapes, 6, "a")
    tracer = _torch.PythonKeyTracer()
    tracer.graph = fx.Graph()
    tracer.root = torch.nn.Module()
    for _ in range(2):
        _torch.track_size(size, tracer, sizes_in_traces)
    (node,) = tracer.graph.nodes
    assert node.target is sizes_in_traces


@check("has_saved_tensors_hooks")
def hooks_of_the_surroundings():
    assert not _torch.has_saved_tensors_hooks()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert _torch.has_saved_tensors_hooks()
    assert not _torch.has_saved_tensors_hooks()


@check("new_tracer")
def generators_in_a_graph():
    generator = torch.Generator()
    graph, tracer = _traced(
        lambda x: x.bernoulli(generator=generator).bernoulli(generator=generator), 2
    )
    (held,) = {node.target for node in graph.graph.find_nodes(op="get_attr")}
    generator.manual_seed(7)
    assert getattr(tracer.root, held).initial_seed() == 7  # perhaps another object of the same one
    assert type(tracer) is _torch.PythonKeyTracer  # PyTorch traces the bodies of `cond` only then


@check("is_faking", "untraced")
def on_fake_tensors():
    assert not _torch.is_faking()
    with _torch.new_fake_mode():
        assert _torch.is_faking()
    tracer = _torch.new_tracer()
    with _torch.enter_proxy_modes(tracer, _torch.new_fake_mode()):
        assert _torch.innermost_proxy_mode() is not None
        with _torch.untraced():
            assert _torch.innermost_proxy_mode() is None


@check("offset_of")
def offsets():
    x = torch.ones(5)[2:]
    assert _torch.offset_of(x) == 2
    assert torch.vmap(lambda row: row + _torch.offset_of(row))(torch.ones(4, 2)[1:])[0, 0] == 1


@check("function_modes")
def function_modes_of_the_user():
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    assert list(_torch.function_modes()) == []
    with torch.device("cpu"), Mode() as mode:
        assert list(_torch.function_modes()) == [mode]


@check("SWITCHES")
def switches():
    before = [ask() for ask in _torch.SWITCHES]
    with torch.inference_mode():
        assert [ask() for ask in _torch.SWITCHES] != before
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert [ask() for ask in _torch.SWITCHES] != before
    assert [ask() for ask in _torch.SWITCHES] == before


@check("GLOBAL_MODULE_HOOKS")
def hooks_of_all_modules():
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert any(_torch.GLOBAL_MODULE_HOOKS)
    hook.remove()


@check("RECURRENT")
def recurrent_layers():
    seen = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seen():
        torch.nn.LSTM(2, 2, 2, dropout=0.5)(torch.ones(3, 1, 2))
    assert any(func in _torch.RECURRENT for func in seen)


@check("is_traceable_wrapper_subclass")
def subclasses():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert _torch.is_traceable_wrapper_subclass(nested)
    assert not _torch.is_traceable_wrapper_subclass(torch.ones(2))


@check("PLAIN_TORCH_FUNCTIONS")
def functions_of_subclasses():
    assert vars(torch.Tensor)["__torch_function__"] in _torch.PLAIN_TORCH_FUNCTIONS
    assert torch.nn.Parameter.__torch_function__ in _torch.PLAIN_TORCH_FUNCTIONS


@check("is_any_autocast_enabled")
def autocast():
    assert not _torch.is_any_autocast_enabled()
    with torch.autocast("cpu"):
        assert _torch.is_any_autocast_enabled()


@check("is_transformed_or_watched", "is_fake")
def transformed_or_watched():
    seen = []
    assert not _torch.is_transformed_or_watched()
    torch.func.vmap(lambda x: seen.append(_torch.is_transformed_or_watched()) or x)(torch.ones(2))
    with _torch.new_fake_mode() as mode:
        seen.append(_torch.is_transformed_or_watched())
        seen.append(_torch.is_fake(mode.from_tensor(torch.ones(2))))
    assert all(seen)
    assert not _torch.is_fake(torch.ones(2))


@check("is_compiled_by_inductor")
def what_compiles():
    assert _torch.is_compiled_by_inductor(torch.compile(torch.nn.Linear(2, 2)))
    assert _torch.is_compiled_by_inductor(torch.compile(lambda x: x))
    assert not _torch.is_compiled_by_inductor(torch.compile(lambda x: x, backend="eager"))
    assert not _torch.is_compiled_by_inductor(torch.compile(torch.nn.Linear(2, 2), backend="eager"))
    assert not _torch.is_compiled_by_inductor(torch.sin)


# --- compilers ----------------------------------------------------------------------------------


@check("to_user")
def an_error_of_a_backend_reaches_the_user_as_it_is():
    class Told(ValueError):
        pass

    def backend(module, inputs):
        raise _torch.to_user(Told("no"), sys._getframe())

    torch._dynamo.reset()
    with pytest.raises(Told, match="^no"):
        torch.compile(torch.sin, backend=backend)(torch.ones(3))
    torch._dynamo.reset()


@check("has_triton")
def triton():
    assert _torch.has_triton() == (importlib.util.find_spec("triton") is not None)


@check("inductor_option_names", "inductor_option_type", "inductor_modes", "inductor_decompositions")
def settings_of_inductor():
    assert _torch.inductor_option_type("max_autotune") is bool
    assert "max_autotune" in _torch.inductor_option_names()
    assert "max-autotune" in _torch.inductor_modes()
    assert torch.ops.aten.gelu.default in _torch.inductor_decompositions()


def _compile(backend):
    """Compile a function that writes to an argument; the gradient of its result."""
    torch._dynamo.reset()

    def f(x, buffer):
        buffer.add_(1)
        return torch.sin(torch.sin(x)).sum()

    x = torch.ones(3, requires_grad=True)
    torch.compile(f, backend=backend, fullgraph=True)(x, torch.zeros(3)).backward()
    torch._dynamo.reset()
    expected = torch.cos(torch.sin(torch.ones(3))) * torch.cos(torch.ones(3))
    torch.testing.assert_close(x.grad, expected)


class _Cuts:
    """A partition function that keeps nothing but inputs, and notes what it saw."""

    def __init__(self, partition=_torch.default_partition):
        self.partition = partition
        self.written = []
        self.backwards = []

    def __call__(self, module, inputs, **options):
        self.written += [node.name for node in _torch.find_written_inputs(module).values()]
        for node in module.graph.nodes:
            if node.op == "call_function" and node.meta["partitioner_tag"] == "is_forward":
                node.meta["recompute"] = _torch.MUST_RECOMPUTE
        forward, backward = self.partition(module, inputs, **options)
        self.backwards.append(str(backward.graph))
        return forward, backward


@check("aot_autograd", "find_written_inputs", "default_partition", "MUST_RECOMPUTE", "Partitioner")
def partition_of_aot_autograd():
    cuts = _Cuts()

    def backend(module, inputs):
        def compiler(graph):
            return lambda inputs: graph(*inputs)

        return _torch.aot_autograd(module, inputs, compiler=compiler, partition=cuts)

    _compile(backend)
    assert len(cuts.written) == 1
    assert "aten.sin" in cuts.backwards[0]


@check("run_outside_dynamo")
def a_graph_whose_float_became_a_constant():
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    def make():
        if not TensorifyState.should_specialize("zf0"):
            TensorifyState.specialize("zf0")
            raise TensorifyScalarRestartAnalysis
        return "made"

    assert _torch.run_outside_dynamo(make) == "made"
    assert TensorifyState.empty()


@check("keep_compile_context", "ends_in_graph_break")
def context_of_a_compiled_graph():
    kept, ends = [], []

    def backend(module, inputs):
        fakes, enter = _torch.keep_compile_context(inputs)
        graph = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
        kept.append((graph, fakes, enter))
        ends.append(_torch.ends_in_graph_break(module))
        return module.forward

    def f(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y, x.cos()

    x = torch.ones(3, requires_grad=True)
    torch.compile(f, backend=backend)(x)
    assert ends == [True, False]
    graph, fakes, enter = kept[0]
    assert _torch.is_fake(fakes[0]) and fakes[0].shape == (3,)
    cuts = _Cuts()
    with enter():
        again = _torch.aot_autograd(
            graph, fakes, compiler=lambda g: lambda xs: g(*xs), partition=cuts
        )
    (y,) = again(x)
    assert torch.equal(y, x.sin())
    assert "aten.cos" in cuts.backwards[0]
    torch._dynamo.reset()


@check("is_reduction")
def reductions():
    assert _torch.is_reduction(aten.var_mean.correction)
    assert not _torch.is_reduction(aten.mm.default)
    assert not _torch.is_reduction(len)


@check("compile_fx", "inductor_partitioner", "min_cut_partition")
def partition_of_inductor():
    cuts = _Cuts(_torch.min_cut_partition)
    custom = _torch.inductor_partitioner(cuts, "a key of this test")

    asked = []

    def may_fuse(one, other):
        asked.extend(node for loop in (*one, *other) for node in loop)
        return True

    def backend(module, inputs):
        config = {"custom_partitioner_fn": custom}
        return _torch.compile_fx(
            module, inputs, config=config, keeps_as_cut=True, may_fuse=may_fuse
        )

    with torch._inductor.utils.fresh_inductor_cache():
        _compile(backend)
    assert "aten.sin" in cuts.backwards[0]
    assert all(isinstance(node, torch.fx.Node) for node in asked)


@pytest.mark.slow
def test_a_kernel_that_reads_what_another_writes_is_fused_with_it_if_allowed():
    asked = []

    def may_fuse(one, other):
        asked.extend({str(n.target) for loop in loops for n in loop} for loops in (one, other))
        return True

    def backend(module, inputs):
        return _torch.compile_fx(module, inputs, config={}, may_fuse=may_fuse)

    torch._dynamo.reset()
    with torch._inductor.utils.fresh_inductor_cache():
        f = torch.compile(lambda x: x - x.sum(-1, keepdim=True), backend=backend)
        assert torch.equal(f(torch.ones(8, 8)), torch.full((8, 8), -7.0))
    assert asked[:2] == [{"aten.sum.dim_IntList"}, {"aten.sub.Tensor"}]


@check("MARK_OF_DYNAMO")
def what_dynamo_notes_on_a_parameter():
    model = torch.nn.Linear(2, 2)
    torch.compile(model, backend="eager")(torch.ones(2))
    torch._dynamo.mark_static_address(model.weight, guard=False)
    assert _torch.MARK_OF_DYNAMO in vars(model.weight)


@check("is_exporting")
def what_a_module_is_traced_for():
    class Looks(torch.nn.Module):
        def forward(self, x):
            return x.sin() if _torch.is_exporting() else x.cos()

    x = torch.ones(2)
    assert torch.equal(torch.compile(Looks(), backend="eager", fullgraph=True)(x), x.cos())
    for strict in (True, False):
        assert torch.equal(torch.export.export(Looks(), (x,), strict=strict).module()(x), x.sin())


@check("CheckpointHandler", "handle_checkpoints", "selective_policy_of")
def checkpoints_of_pytorch():
    def handler(*call):
        calls.append(call)
        return "handled"

    def contexts():
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(lambda *_: True)

    calls = []
    run = torch.utils.checkpoint.checkpoint  # held from before
    for use_reentrant in (False, True):
        with _torch.handle_checkpoints(handler):
            result = run(torch.add, 1, 2, alpha=3, context_fn=contexts, use_reentrant=use_reentrant)
        assert result == "handled"
    assert calls == [(torch.add, (1, 2), {"alpha": 3}, contexts)] * 2
    x = torch.ones(2, requires_grad=True)
    assert run(torch.sin, x, use_reentrant=False).requires_grad
    assert _torch.selective_policy_of(contexts()[0]) is not None
    assert _torch.selective_policy_of(torch.no_grad()) is None


@check("is_in_stock_compiler", "selective_policy_at_work", "node_in_compiler", "MUST_SAVE")
def inside_a_checkpoint_that_is_compiled():
    seen = []

    library = torch.library.Library("torchremat_test", "FRAGMENT")
    library.define("look(Tensor(a) x) -> Tensor(a)")

    def look(x):
        if _torch.is_in_stock_compiler() and _torch.innermost_proxy_mode() is not None:
            node = _torch.node_in_compiler(x)
            seen.append((_torch.selective_policy_at_work(), node and str(node.target)))
        return x

    library.impl("look", look, "CompositeImplicitAutograd")

    def policy(_, op, *args, **kwargs):
        return _torch.MUST_SAVE

    def contexts():
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(policy)

    def f(x):
        return torch.ops.torchremat_test.look(torch.sin(x))

    def g(x):
        run = torch.utils.checkpoint.checkpoint
        return run(f, x, use_reentrant=False, context_fn=contexts).sum()

    assert not _torch.is_in_stock_compiler()
    assert _torch.selective_policy_at_work() is None
    torch._dynamo.reset()
    torch.compile(g, backend="aot_eager")(torch.ones(3, requires_grad=True))
    torch._dynamo.reset()
    assert (policy, "aten.sin.default") in seen


@check("decompose", "merge_alike", "compile_with_inductor", "simplify_for_inductor")
def graphs_for_inductor():
    def f(x):
        return torch.nn.functional.gelu(x) + torch.nn.functional.gelu(x), torch.rand_like(x)

    x = torch.ones(3)
    module = torch.fx.experimental.proxy_tensor.make_fx(f)(x)
    graph = _torch.merge_alike(module.graph)
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)) == 1
    fake = _torch.new_fake_mode().from_tensor(x)
    plain = _torch.decompose(module, [fake], _torch.inductor_decompositions())
    assert "gelu" not in str(plain.graph)
    with torch._inductor.virtualized.V.set_fake_mode(fake.fake_mode):
        _torch.simplify_for_inductor(plain)
    assert len(plain.graph.find_nodes(op="call_function", target=torch.ops.aten.erf.default)) == 1
    run, code = _torch.compile_with_inductor(module, [fake])
    torch.manual_seed(0)
    inputs = [x]
    ours = run(inputs)
    assert inputs == []
    torch.manual_seed(0)
    for mine, plain_result in zip(ours, f(x), strict=True):
        torch.testing.assert_close(mine, plain_result)
    assert "def call" in code


@check("is_view", "tensor_uses", "storage_uses")
def who_uses_a_tensor():
    def uses(x):
        return _torch.is_view(x), _torch.tensor_uses(x), _torch.storage_uses(x)

    x = torch.ones(4)
    assert uses(x) == (False, 1, 1)
    view = x[1:]
    assert uses(x) == (False, 2, 2)
    assert _torch.is_view(view)
    del view
    detached = x.detach()
    assert uses(x) == (False, 1, 2)
    del detached
    kept = x * torch.ones(4, requires_grad=True)
    assert uses(x) == (False, 2, 1)
    del kept
    array = x.numpy()
    assert uses(x) == (False, 1, 2)
    del array
    again = x
    assert uses(again) == (False, 1, 1)


@check("StorageReference", "is_view_of_leaf")
def references_to_memory():
    weight = torch.ones(4, requires_grad=True)
    doubled = weight * 2
    assert [*map(_torch.is_view_of_leaf, (weight, weight[1:], doubled, doubled[1:]))] == [
        False,
        True,
        False,
        False,
    ]
    reference = _torch.StorageReference(doubled.untyped_storage())
    assert reference == _torch.StorageReference(doubled[1:].untyped_storage())
    assert reference in {_torch.StorageReference(doubled.untyped_storage())}
    assert not reference.expired()
    del doubled
    assert reference.expired()


@check("version_of", "storage_id", "parts_of_coo")
def memory_of_tensors():
    x = torch.ones(4)
    before = _torch.version_of(x)
    x[1:].add_(1)
    assert _torch.version_of(x) == before + 1
    assert _torch.storage_id(x) == _torch.storage_id(x[1:]) != _torch.storage_id(x.clone())
    with _torch.new_fake_mode():
        fake = torch.ones(4)
        assert _torch.storage_id(fake) == _torch.storage_id(fake[1:])
    with torch.sparse.check_sparse_tensor_invariants():  # PyTorch 2.11 warns without
        sparse = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,))
    indices, values = _torch.parts_of_coo(sparse)
    assert (indices.tolist(), values.tolist()) == ([[1, 1]], [2.0, 3.0])


@check("forward_hooks_of", "backward_hooks_of", "attributes_of")
def dicts_of_a_module():
    linear = torch.nn.Linear(1, 1)
    linear.register_buffer("mean", torch.ones(1))
    linear.register_forward_hook(len)
    linear.register_forward_pre_hook(max)
    linear.register_full_backward_hook(min)
    linear.register_full_backward_pre_hook(sum)
    assert [[*hooks.values()] for hooks in _torch.forward_hooks_of(linear)] == [[len], [max]]
    assert [[*hooks.values()] for hooks in _torch.backward_hooks_of(linear)] == [[min], [sum]]
    attributes, buffers, parameters = _torch.attributes_of(linear)
    assert attributes["in_features"] == 1
    assert [*buffers, *parameters] == ["mean", "weight", "bias"]


@check("without_memory", "swap_memory")
def memory_moves_between_tensors():
    class Empty(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError("no memory")

    x = torch.arange(4.0).view(2, 2).t()
    where = x.data_ptr()
    other = _torch.without_memory(Empty, x)
    assert (type(other), other.shape, other.stride(), other.dtype) == (
        Empty, (2, 2), (1, 2), torch.float32,
    )  # fmt: skip
    _torch.swap_memory(x, other)
    x.__class__, other.__class__ = Empty, torch.Tensor
    assert other.tolist() == [[0.0, 2.0], [1.0, 3.0]]
    assert other.data_ptr() == where
    for use in (torch.sin, torch.clone, torch.func.vmap(torch.sin)):
        with pytest.raises(NotImplementedError, match="no memory"):
            use(x)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(x)


@check("transform_depth")
def transform_depth():
    seen = []
    torch.func.vmap(torch.func.grad(lambda x: seen.append(_torch.transform_depth()) or x))(
        torch.ones(2)
    )
    assert (seen, _torch.transform_depth()) == ([2], 0)


@check("children_of")
def children_of():
    spec = _torch.tree_flatten(((1, 2), 3))[1]
    assert [child.num_leaves for child in _torch.children_of(spec)] == [2, 1]


@check(
    "replace_batching_rule", "restore_batching_rule", "at_level_below", "unwrap_batched_tensor",
    "add_batch_dim", "VmapLevel",
)  # fmt: skip
def replace_batching_rule():
    sin = torch.ops.aten.sin.default
    seen = []

    def rule(plain, x):
        with _torch.at_level_below() as level:
            value, dim = _torch.unwrap_batched_tensor(x, level.number)
            seen.append((level, value.shape, dim))
            result = sin(value) + 1
        return _torch.add_batch_dim(result, dim, level.number)

    x = torch.zeros(2, 3)
    replaced = _torch.replace_batching_rule(sin, rule)
    try:
        assert torch.equal(torch.func.vmap(torch.sin, 1, 1)(x), x + 1)
        assert torch.equal(torch.func.vmap(torch.func.vmap(torch.sin))(x), x + 2)
        assert torch.equal(torch.sin(x), x)
    finally:
        _torch.restore_batching_rule(replaced)
    assert seen[0] == (_torch.VmapLevel(1, 3), (2, 3), 1)
    assert torch.equal(torch.func.vmap(torch.sin)(x), x)


@check("LOOP_WARNING", "find_looped_operator")
def loop_warning():
    with pytest.warns(UserWarning, match=_torch.LOOP_WARNING) as noted:
        torch.func.vmap(torch.histc)(torch.ones(2, 3))
    assert _torch.find_looped_operator(str(noted[0].message)) == "aten::histc"
    assert _torch.find_looped_operator("something else") is None


@check("find_unmapped_composites", "find_unmapped_operator")
def unmapped_operators():
    found = _torch.find_unmapped_composites()
    assert torch.ops.aten.rnn_tanh.input in found
    assert torch.ops.aten.hstack.default not in found
    with pytest.raises(RuntimeError) as refused:
        torch.func.vmap(torch.ops.aten.rnn_tanh.input, (0, *[None] * 8))(
            torch.ones(2, 1, 1, 1), torch.ones(1, 1, 1), [torch.ones(1, 1)] * 2, False, 1, 0.0,
            False, False, False,
        )  # fmt: skip
    assert _torch.find_unmapped_operator(refused.value) == "aten::rnn_tanh"
    special = "Error: aten::f requires special handling, and does not yet have a batching rule."
    assert _torch.find_unmapped_operator(RuntimeError(special)) == "aten::f"
    assert _torch.find_unmapped_operator(RuntimeError("something else")) is None


@check("answer_operators", "erase_questions")
def answers_of_operators():
    asked = []

    def answer(operator, args):
        asked.append(operator)
        return True if len(args) == 2 else None

    with _torch.new_fake_mode() as mode:
        x = torch.empty(2)
        with _torch.answer_operators(mode, answer):
            assert torch.equal(x, x) is True
            with pytest.raises(_torch.DATA_DEPENDENT_ERRORS):
                x.sum().item()
        with pytest.raises(_torch.DATA_DEPENDENT_ERRORS):
            torch.equal(x, x)
    aten = torch.ops.aten
    assert asked == [aten.equal.default, aten._local_scalar_dense.default]
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(aten.equal.default, (x, x))
    graph.output(x)
    _torch.erase_questions(graph)
    assert [node.op for node in graph.nodes] == ["placeholder", "output"]


@check("dispatch_restored")
def dispatch_restored():
    before = str(torch._C._dispatch_tls_local_exclude_set())
    with _torch.dispatch_restored():
        kept = torch._C._AutoDispatchBelowAutograd()
    assert str(torch._C._dispatch_tls_local_exclude_set()) == before
    del kept


@check("lift_before_wrapping")
def lift_before_wrapping():
    x = torch.ones(2)
    lifted = x + 1
    with _torch.lift_before_wrapping(lambda x: lifted):
        assert torch.func.grad(lambda x: (x * x).sum())(x).tolist() == [4.0, 4.0]
        assert torch.func.vmap(torch.sum)(x).tolist() == [2.0, 2.0]
    assert torch.func.vmap(torch.sum)(x).tolist() == [1.0, 1.0]


@check("call_around_modules", "is_own_hook")
def hooks_of_a_trace():
    seen = []
    linear = torch.nn.Linear(1, 1)
    before = [dict(hooks) for hooks in _torch.GLOBAL_MODULE_HOOKS]
    with _torch.call_around_modules(
        lambda module, args: seen.append(("enter", module)),
        lambda module, args, output: seen.append(("leave", module)),
    ):
        linear(torch.ones(1))
        hooks = [hook for hooks in _torch.GLOBAL_MODULE_HOOKS for hook in hooks.values()]
    assert seen == [("enter", linear), ("leave", linear)]
    assert sum(map(_torch.is_own_hook, hooks)) == 2
    assert [dict(hooks) for hooks in _torch.GLOBAL_MODULE_HOOKS] == before
    assert not _torch.is_own_hook(linear.forward)


@check(
    "AskingShapeEnv", "asks_for_zero_or_one", "is_condition", "is_equation", "negate_inequation",
    "print_question", "question_of", "split_condition", "symbols_of_question",
)  # fmt: skip
def questions_about_sizes():
    def answer(question, fallback):
        asked.append((_torch.print_question(question), fallback))
        return True if _torch.is_condition(question) else 5

    asked = []
    shapes = _torch.AskingShapeEnv(answer, lambda operator, args: None)
    n = shapes.new_size(1000, "n")
    name = str(n)
    assert (bool(n > 3), bool(n >= 0), int(n)) == (True, True, 5)
    assert asked == [(f"{name} > 3", None), (name, None)]
    one, unequal = (_torch.question_of(c) for c in (n == 1, n != 7))
    assert _torch.asks_for_zero_or_one(one)
    assert _torch.is_equation(unequal)
    assert _torch.print_question(_torch.negate_inequation(unequal)) == f"{name} == 7"
    assert _torch.negate_inequation(one) is None
    assert _torch.symbols_of_question(one) == {name}
    assert _torch.split_condition(one) == ("", ())
    both = _torch.question_of((n > 1) & (n < 7))
    assert _torch.split_condition(both)[0] == "and"
    assert shapes.answer_from(2, _torch.question_of(n > 1))
    assert shapes.answer_from(0, _torch.question_of(n > 1)) is None
    assert not shapes.answer_by_hint(one)


@check("linear_form", "greatest_value")
def bounds_of_sizes():
    n = _torch.AskingShapeEnv(lambda *_: False, lambda *_: None).new_size(1000, "n")
    assert _torch.linear_form(3 * n - 2) == (-2, {str(n): 3})
    assert _torch.linear_form(torch.sym_min(n, 5)) is None
    assert _torch.greatest_value(torch.sym_min(n, 5) + n // 2, {str(n): 9}) == 9
    assert _torch.greatest_value(20 - n, {str(n): 9}) == 20


@check("grows_with_symbols")
def sizes_that_grow():
    n = _torch.AskingShapeEnv(lambda *_: False, lambda *_: None).new_size(1000, "n")
    growing = (n, 3 * n - 2, n * n, n * (n + 1) // 2, torch.sym_max(n, 5))
    assert all(map(_torch.grows_with_symbols, growing))
    assert not any(map(_torch.grows_with_symbols, (20 - n, n * (20 - n), n % 5)))


@check("assert_later")
def assertions():
    _torch.assert_later(torch.tensor(True), "is true")
    with pytest.raises(RuntimeError, match="is false"):
        _torch.assert_later(torch.tensor(False), "is false")


@check("symbolic_lengths")
def lengths_as_symbols():
    shapes = _torch.new_shape_env()
    size = _torch.new_symbol(shapes, 6, "n")
    with _torch.new_fake_mode(shapes), _torch.symbolic_lengths():
        assert isinstance(len(torch.empty(size)), torch.SymInt)
        assert len([1, 2]) == len(torch.empty(2)) == 2


@check("answer_nan_checks")
def answer_nan_checks():
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True), _torch.new_fake_mode() as mode:
        y = mode.from_tensor(x).sin().sum()
        with pytest.raises(_torch.DATA_DEPENDENT_ERRORS):
            y.backward(retain_graph=True)
        with _torch.answer_nan_checks():
            y.backward()


@check("replay_views")
def replay_views():
    def names_of(node):
        return {node.name()}.union(*(names_of(n) for n, _ in node.next_functions if n))

    def gradient_of_a_write():
        x, weights = (torch.ones(3, requires_grad=True) for _ in range(2))
        y = x * 1.0
        y[1:].add_(1.0)
        return torch.autograd.grad(y, x, weights, create_graph=True)[0]

    assert "AsStridedBackward0" in names_of(gradient_of_a_write().grad_fn)
    with _torch.replay_views():
        assert "AsStridedBackward0" not in names_of(gradient_of_a_write().grad_fn)


@check("ZERO_TENSOR")
def zero_tensor():
    def push(x):
        return torch.func.jvp(lambda y: y * torch.ones(2), (x,), (torch.ones(2),))[1]

    graph = make_fx(lambda x: torch.func.jvp(push, (x,), (x,))[1])(torch.ones(2)).graph
    assert _torch.ZERO_TENSOR in {node.target for node in graph.nodes}
    assert not _torch.ZERO_TENSOR([2]).any()


@check("set_module_trackers_aside")
def set_module_trackers_aside():
    seen = []
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: seen.append(1))
    linear = torch.nn.Linear(1, 1)
    with handle, ModuleTracker() as tracker:
        before = [dict(hooks) for hooks in _torch.GLOBAL_MODULE_HOOKS]
        linear.register_forward_pre_hook(lambda *_: seen.append(sorted(tracker.parents)))
        with _torch.set_module_trackers_aside():
            linear(torch.ones(1))
        linear(torch.ones(1))
        assert seen == [1, ["Global"], 1, ["Global", "Linear"]]
        assert [dict(hooks) for hooks in _torch.GLOBAL_MODULE_HOOKS] == before


@check("note_attribute_reads")
def note_attribute_reads():
    linear, seen = torch.nn.Linear(2, 3), []
    with _torch.note_attribute_reads(lambda module, name: seen.append((module, name))):
        assert linear.in_features == 2
    assert linear.out_features == 3
    assert seen == [(linear, "in_features")]


@check("decomposition_table")
def decomposition_table():
    table = _torch.decomposition_table()
    assert callable(table[torch.ops.aten.mse_loss.default])


@check("find_ragged_dim")
def find_ragged_dim():
    rows = torch.nested.nested_tensor([torch.ones(2, 3)] * 2, layout=torch.jagged)
    assert _torch.find_ragged_dim(rows) == 1
    assert _torch.find_ragged_dim(rows.transpose(1, 2)) == 2


@check("register_pytree_node")
def register_pytree_node():
    class Pair:
        def __init__(self, *parts):
            self.parts = parts

    _torch.register_pytree_node(Pair, lambda p: (list(p.parts), None), lambda p, _: Pair(*p))
    assert _torch.tree_flatten([Pair(1, 2)])[0] == [1, 2]


@check("asks_for_value")
def asks_for_value():
    with pytest.raises(RuntimeError) as caught:
        torch.func.vmap(lambda x: x * x.item())(torch.ones(2))
    assert _torch.asks_for_value(caught.value)
    assert not _torch.asks_for_value(RuntimeError("another"))


@check("needs_mapped_value")
def needs_mapped_value():
    for ask in (
        lambda x: x if x > 0 else -x,
        lambda x: x * x.item(),
        lambda x: torch.tensor(x.tolist()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
    ):
        with pytest.raises(RuntimeError) as caught:
            torch.func.vmap(ask)(torch.ones(2))
        assert _torch.needs_mapped_value(caught.value)
    assert not _torch.needs_mapped_value(RuntimeError("another"))


@check("GetAttrKey")
def a_key_of_an_attribute():
    assert _torch.keystr((_torch.GetAttrKey("data"),)) == ".data"


@check("SequenceKey")
def a_key_of_an_item():
    assert _torch.keystr((_torch.SequenceKey(2),)) == "[2]"


@check("process_collectives", "group_named", "store_of_processes", "timeout_of_processes")
def processes():
    timeout = timedelta(seconds=7)
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    try:
        name = distributed.group.WORLD.group_name
        assert _torch.group_named(name) is distributed.group.WORLD
        with pytest.raises(RuntimeError):
            _torch.group_named("another")
        assert _torch.timeout_of_processes() == timeout
        _torch.store_of_processes().set("key", "value")
        assert _torch.store_of_processes().get("key") == b"value"
        ops, x = _torch.process_collectives, torch.arange(4.0)
        for found in (
            ops.all_reduce(x, "sum", name),
            ops.reduce_scatter_tensor(x, "sum", 1, name),
            ops.all_gather_into_tensor(x, 1, name),
            ops.all_to_all_single(x, [4], [4], name),
        ):
            assert torch.equal(ops.wait_tensor(found), x)
    finally:
        distributed.destroy_process_group()


@check("current_mesh")
def mesh_in_scope():
    assert _torch.current_mesh() is None
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    with mesh:
        assert _torch.current_mesh() is mesh
    assert _torch.current_mesh() is None


@check(
    "MISSING_PARTS", "NEWEST", "OLDEST", "guard_functions", "is_newer", "warn_once_of_newer",
)  # fmt: skip
def parts_of_this_version():
    """All are there; tests/_torch/versions has what happens where one is not."""
    assert _torch.MISSING_PARTS == []
    assert find_all_missing(all_parts()) == {}


def public_names():
    """What `_torch` offers to others: `from .file import x`."""
    tree = ast.parse(Path(inspect.getfile(_torch)).read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return sorted(alias.name for node in imports for alias in node.names)


@check("has_gradient_hooks")
def hooks_that_wait_for_gradients():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert not _torch.has_gradient_hooks(x)
    handle = x.register_post_accumulate_grad_hook(print)
    y.register_hook(print)
    assert _torch.has_gradient_hooks(x) and _torch.has_gradient_hooks(y)
    handle.remove()
    assert not _torch.has_gradient_hooks(x)


@check("count_hooks")
def hooks_of_tensors():
    x = torch.ones(2, requires_grad=True)
    assert _torch.count_hooks(x) == _torch.count_hooks(x.sin()) == 0
    x.register_hook(lambda grad: grad)
    x.register_hook(lambda grad: grad)
    assert _torch.count_hooks(x) == 2


@check("generator_id")
def generators():
    generator = torch.Generator()
    assert _torch.generator_id(generator) == _torch.generator_id(generator)
    assert _torch.generator_id(generator) != _torch.generator_id(torch.Generator())
    assert _torch.generator_id(generator) != _torch.generator_id(torch.default_generator)


@check("negate_lazily")
def lazy_negation():
    x = torch.ones(3)
    negated = _torch.negate_lazily(x)
    assert negated.is_neg() and negated.stride() == x.stride()
    assert torch.equal(negated, -x)


@pytest.mark.parametrize("name", public_names())
def test_private_parts_of_pytorch(name):
    CHECKS[name]()


def test_every_check_is_of_something():
    assert set(CHECKS) == set(public_names())
