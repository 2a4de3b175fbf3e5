"""`spmd_axis_name` puts the examples on an axis of a device mesh."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchremat as tr
from torchremat.batching import with_sharding_constraint
from torchremat.errors import AxisError, NotAvailableError


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    where = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{where}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "model"))
    dist.destroy_process_group()


X = torch.randn(3, 4, 5)


@pytest.mark.parametrize("in_axis", [0, 1])
def test_a_constraint_on_one_example_spreads_all_of_them(mesh, in_axis):
    def fun(x):
        return with_sharding_constraint(x, mesh, [Replicate(), Shard(1)]) * 2

    out = tr.vmap(fun, in_axis, in_axis, spmd_axis_name="data")(X)
    assert isinstance(out, DTensor)
    assert out.placements == (Shard(in_axis), Shard(2))
    assert torch.equal(out.full_tensor(), 2 * X)


def test_without_a_name_the_examples_stay_together(mesh):
    def fun(x):
        return with_sharding_constraint(x, mesh, [Replicate(), Shard(1)])

    assert tr.vmap(fun)(X).placements == (Replicate(), Shard(2))
    assert fun(X[0]).placements == (Replicate(), Shard(1))


def test_nested(mesh):
    def fun(x):
        return with_sharding_constraint(x, mesh, [Replicate(), Replicate()])

    out = tr.vmap(tr.vmap(fun, spmd_axis_name="model"), spmd_axis_name="data")(X)
    assert out.placements == (Shard(0), Shard(1))


def test_results_that_are_spread_already(mesh):
    x = distribute_tensor(X, mesh, [Replicate(), Shard(2)])
    out = tr.vmap(torch.sin, spmd_axis_name="data")(x)
    assert out.placements == (Shard(0), Shard(2))


def test_gradients_flow_through_a_constraint(mesh):
    def fun(x):
        return with_sharding_constraint(x, mesh, [Replicate(), Shard(0)]).square()

    x = X.clone().requires_grad_()
    tr.vmap(fun, spmd_axis_name="data")(x).sum().backward()
    grad = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
    assert torch.equal(grad, 2 * X)


@pytest.mark.parametrize(
    ("name", "placements", "text"),
    [
        ("data", [Shard(0), Replicate()], "spread over it already"),
        ("date", [Replicate(), Replicate()], "is not an axis of the mesh"),
        ("data", [Replicate()], "a placement for each axis"),
    ],
)
def test_bad_input(mesh, name, placements, text):
    with pytest.raises(AxisError, match=text):
        tr.vmap(lambda x: with_sharding_constraint(x, mesh, placements), spmd_axis_name=name)(X)


def test_a_trace_has_no_place_for_it(mesh):
    fun = tr.checkpoint(lambda x: with_sharding_constraint(x, mesh, [Replicate(), Replicate()]))
    with pytest.raises(NotAvailableError, match="cannot be traced"):
        fun(X)
