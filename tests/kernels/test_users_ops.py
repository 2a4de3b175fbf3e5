"""A user's own kernel, registered as an operator, is one node that policies can name."""

import pytest
import torch
from torch import Tensor

import torchremat as tr
from torchremat.kernels.segments import segment_ops

RUNS = {"count": 0}

if segment_ops.IS_INTERPRETED:
    import triton
    import triton.language as tl

    @triton.jit
    def cube_kernel(x, out, size, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < size)
        tl.store(out + at, value * value * value, mask=at < size)

    @torch.library.triton_op("torchremat_test_kernels::cube_triton", mutates_args=())
    def cube_triton(x: Tensor) -> Tensor:
        RUNS["count"] += 1
        out = torch.empty_like(x)
        cube_kernel[(triton.cdiv(x.numel(), 8),)](x, out, x.numel(), BLOCK=8)
        return out

    cube_triton.register_fake(lambda x: torch.empty_like(x))
    cube_triton.register_autograd(
        lambda ctx, g: 3 * g * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )


@torch.library.custom_op("torchremat_test_kernels::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    RUNS["count"] += 1
    return x * x * x


@cube.register_fake
def _(x):
    return torch.empty_like(x)


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def cube_backward(ctx, cotangent):
    (x,) = ctx.saved_tensors
    return 3 * cotangent * x**2


cube.register_autograd(cube_backward, setup_context=keep)
cube.register_vmap(lambda info, in_dims, x: (cube(x), in_dims[0]))

needs_interpreter = pytest.mark.skipif(
    not segment_ops.IS_INTERPRETED, reason="run by test_triton.py, where Triton is installed"
)
OPS = ["cube", pytest.param("cube_triton", marks=needs_interpreter)]
each_op = pytest.mark.parametrize("name", OPS)


def program(name):
    """sin(exp(x)^3), whose cube is the user's operator."""
    op = getattr(torch.ops.torchremat_test_kernels, name)
    return lambda x: torch.sin(tr.checkpoint_name(op(torch.exp(x)), "cube"))


@each_op
def test_is_one_node(name):
    graph = tr.make_graph(program(name))(torch.randn(5))
    ops = [str(eqn.op) for eqn in graph.eqns]
    assert ops[:2] == ["aten.exp.default", f"torchremat_test_kernels.{name}.default"]
    assert ops[-1] == "aten.sin.default"
    assert len(ops) == 4  # and the name


@each_op
@pytest.mark.parametrize(
    ("policy", "num_saved", "num_runs"),
    [
        ("full", 0, 2),
        ("none", 2, 1),
        ("ops:torchremat_test_kernels.{}", 1, 1),
        ("names:cube", 1, 1),
        (tr.checkpoint_policies.save_any_names_but_these("cube"), 0, 2),
        (tr.checkpoint_policies.recompute_ops("aten.exp"), 1, 1),
    ],
    ids=str,
)
def test_policies_decide_about_it(name, policy, num_saved, num_runs):
    policy = policy.format(name) if isinstance(policy, str) else policy
    block = tr.checkpoint(program(name), policy=policy)
    x = torch.randn(5, requires_grad=True)
    block(x)  # traced
    (expected,) = torch.autograd.grad(program(name)(x).sum(), x)
    RUNS["count"] = 0
    (actual,) = torch.autograd.grad(block(x).sum(), x)
    assert torch.equal(actual, expected)
    assert RUNS["count"] == num_runs
    kept = [r for r in tr.saved_residuals(block, x) if "argument" not in r.source]
    assert len(kept) == num_saved


@each_op
def test_gradients_under_torch_func(name):
    x = torch.randn(5)
    block = tr.checkpoint(program(name))
    y = x.clone().requires_grad_()
    program(name)(y).sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda x: block(x).sum())(x), y.grad)


@each_op
def test_double_backward(name):
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(tr.checkpoint(program(name)), x)
