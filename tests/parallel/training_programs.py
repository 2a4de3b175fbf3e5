"""Training over processes, with checkpoints and without: see `processes.py`.

Losses and parameters are compared bit for bit with those of the same training without checkpoints.
"""

import contextlib
import os
import re
import tempfile

import torch
from torch import distributed, nn
from torch.distributed import checkpoint as saved_state
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import torchremat as tr
from torchremat.errors import TraceError
from torchremat.measure import LiveBytes, resident_bytes

CHECKS = {}
SLOW_CHECKS = {}
WIDTH = 16
PAIRS = [("full", "before"), ("dots", "after")]
"""Policies, and whether models are wrapped before or after they are made parallel."""


def check(function):
    CHECKS[function.__name__] = function
    return function


def slow_check(function):
    SLOW_CHECKS[function.__name__] = function
    return function


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.out = nn.LayerNorm(WIDTH)

    def forward(self, x):
        y = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return self.out(x + torch.sin(y))


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make(tied=False):
    torch.manual_seed(0)
    return Model(tied)


def batch(i, everywhere=False):
    seed = 100 * i + (0 if everywhere else distributed.get_rank())
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(model, steps=2, accumulated=1, everywhere=False, sync=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for i in range(steps):
        for j in range(accumulated):
            with (sync or every_time)(model, j == accumulated - 1):
                loss = model(batch(10 * i + j, everywhere)).square().mean()
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@contextlib.contextmanager
def every_time(model, is_last):
    yield


def without_sync(model, is_last):
    return contextlib.nullcontext() if is_last else model.no_sync()


@contextlib.contextmanager
def sharded_sync(model, is_last):
    model.set_requires_gradient_sync(is_last)
    yield


def parameters(model):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.data for p in model.parameters()]


def assert_trains_alike(model, plain, **options):
    """Bit for bit.

    DDP puts gradients into buckets in the order in which they come, and of more than two summands
    in other places of a bucket the sum rounds otherwise.
    """
    rounds = isinstance(model, DistributedDataParallel) and distributed.get_world_size() > 2
    tolerance = 1e-5 if rounds else 0
    found, expected = train(model, **options), train(plain, **options)
    pairs = zip(parameters(model), parameters(plain), strict=True)
    for a, b in [(torch.tensor(found), torch.tensor(expected)), *pairs]:
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def communication(model, **options):
    """What a step sends: how often, by operator."""
    train(model, 1, **options)
    with CommDebugMode() as counted:
        train(model, 1, **options)
    return {str(op): count for op, count in counted.get_comm_counts().items()}


# --- DistributedDataParallel ---------------------------------------------------------------------


def ddp_alike(steps=2, tied=False, sync=None, accumulated=1, **options):
    wrapped = tr.nn.wrap(make(tied), "dots", select="layers.*")
    assert_trains_alike(
        DistributedDataParallel(wrapped, **options),
        DistributedDataParallel(make(tied), **options),
        steps=steps,
        sync=sync,
        accumulated=accumulated,
    )


@check
def ddp():
    ddp_alike()
    ddp_alike(tied=True)
    ddp_alike(gradient_as_bucket_view=True)


@check
def ddp_of_unused_parameters():
    ddp_alike(find_unused_parameters=True)
    ddp_alike(find_unused_parameters=True, tied=True)


@check
def ddp_of_a_static_graph():
    ddp_alike(static_graph=True)
    ddp_alike(static_graph=True, tied=True)


@check
def ddp_without_sync():
    ddp_alike(sync=without_sync, accumulated=3)


@check
def ddp_of_a_model_under_one_checkpoint():
    assert_trains_alike(
        DistributedDataParallel(tr.nn.wrap(make(), "full")), DistributedDataParallel(make())
    )


def arrivals_before_buckets(model):
    """How many gradients there were when each bucket was sent, in the last of four steps."""
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.002)
    arrived, sent = [], []

    def send(_: object, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append(len(arrived))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    parallel.register_comm_hook(None, send)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: arrived.append(1))
    for i in range(4):
        arrived.clear(), sent.clear()
        parallel(batch(i)).square().sum().backward()
    return sent


@check
def ddp_sends_buckets_of_one_checkpoint_as_early():
    expected = arrivals_before_buckets(make())
    assert len(expected) > 4 and expected[0] < expected[-1]
    for policy in ("full", "dots"):
        assert arrivals_before_buckets(tr.nn.wrap(make(), policy)) == expected


@check
def ddp_with_a_budget():
    wrapped = tr.nn.wrap(make(), "budget:92%")
    assert_trains_alike(DistributedDataParallel(wrapped), DistributedDataParallel(make()))


@check
def ddp_wrapped_as_a_whole():
    model = DistributedDataParallel(make())
    with refused(TypeError, "is a DistributedDataParallel"):
        tr.nn.wrap(model, "full")
    with refused(TraceError, r"wrap its \.module"):
        tr.checkpoint(model)(batch(0))
    tr.nn.wrap(model, "full", select="module.layers.*")
    assert_trains_alike(model, DistributedDataParallel(make()))


# --- fully_shard ---------------------------------------------------------------------------------


def sharded(policy=None, when="before", select="layers.*", **options):
    """A model whose layers are sharded, wrapped before that or after."""
    model = make()
    if policy is not None and when == "before":
        tr.nn.wrap(model, policy, select=select)
    sharded_as_it_is(model, **options)
    if policy is not None and when == "after":
        tr.nn.wrap(model, policy, select=select)
    return model


def sharded_as_it_is(model, **options):
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded_alike(**options):
    for policy, when in PAIRS:
        assert_trains_alike(sharded(policy, when, **options), sharded(**options))


@check
def fsdp():
    sharded_alike()


@check
def fsdp_that_keeps_what_it_gathered():
    sharded_alike(reshard_after_forward=False)


@check
def fsdp_in_mixed_precision():
    sharded_alike(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


@check
def fsdp_without_sync():
    assert_trains_alike(sharded("dots"), sharded(), sync=sharded_sync, accumulated=3)


@check
def fsdp_with_a_budget_for_each_layer():
    model = sharded("budget:92%")
    assert_trains_alike(model, sharded())
    assert "recomputed" in {row.decision for row in tr.nn.report(model)}


@check
def fsdp_with_one_budget_for_all_layers():
    split = tr.nn.split_budget(make(), batch(0), budget="60%", select="layers.*")
    assert split.peak_bytes <= split.budget
    assert len({layer.saved_bytes for layer in split.layers}) > 1
    peaks = []
    for policy in (None, split):
        model = sharded(policy, select=None)
        train(model, 1)
        with LiveBytes() as memory:
            train(model, 1)
        peaks.append(memory.peak)
    gathered = 4 * sum(p.numel() for p in make().layers[0].parameters())
    assert peaks[1] <= split.budget + 2 * gathered < peaks[0]
    assert_trains_alike(sharded(split, select=None), sharded())


@check
def fsdp_counts_the_shards_of_this_process_in_a_budget():
    model, whole = sharded("dots"), make()
    optimizer = torch.optim.AdamW(model.parameters())
    there = resident_bytes(model, optimizer)
    model(batch(0)).sum().backward()
    optimizer.step()
    assert there == resident_bytes(model, optimizer)
    share = 1 / distributed.get_world_size()
    assert there < (share + 0.1) * resident_bytes(whole, torch.optim.AdamW(whole.parameters()))


@check
def fsdp_gathers_no_more_than_without():
    expected = communication(sharded())
    for policy, when in PAIRS:
        assert communication(sharded(policy, when)) == expected


@check
def fsdp_inside_a_checkpoint():
    with refused(TypeError, r"'layers\.0' in it is sharded by fully_shard"):
        tr.nn.wrap(sharded(), "full")
    with refused(TraceError, r"layers\.0 .* is sharded by fully_shard"):
        sharded("full", "before", select=None)(batch(0))


@check
def fsdp_under_names_that_stay():
    model, plain = sharded("dots"), sharded()
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert [type(m).__name__ for m in model.modules()] == [
        type(m).__name__ for m in plain.modules()
    ]
    assert list(model.state_dict()) == list(plain.state_dict())


@check
def fsdp_saved_and_loaded():
    model, plain = sharded("dots"), sharded()
    train(model)
    folders = [tempfile.mkdtemp() if distributed.get_rank() == 0 else None]
    distributed.broadcast_object_list(folders)
    where = os.path.join(folders[0], "state")
    saved_state.save(get_model_state_dict(model), checkpoint_id=where)
    state = get_model_state_dict(plain)
    saved_state.load(state, checkpoint_id=where)
    set_model_state_dict(plain, state)
    assert_trains_alike(model, plain)


@check
def fsdp_with_clipped_gradients():
    found = []
    for policy in ("dots", None):
        model = sharded(policy)
        model(batch(0)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found.append([norm.full_tensor(), *(p.grad.full_tensor() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@check
def fsdp_under_checkpoints_of_torch():
    model = tr.nn.wrap(make(), "dots", select="layers.*")
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    assert_trains_alike(sharded_as_it_is(model), sharded())


@check
def fsdp_of_compiled_layers():
    models = [tr.nn.wrap(make(), "dots", select="layers.*"), make()]
    for model in models:
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    assert_trains_alike(*map(sharded_as_it_is, models))


@check
def fsdp_holds_less():
    held = []
    for policy in (None, "full"):
        model = sharded(policy)
        train(model, 1)
        with LiveBytes() as memory:
            train(model, 1)
        held.append(memory.peak)
    assert held[1] < held[0]


# --- tensor parallel -----------------------------------------------------------------------------

BY_COLUMNS_AND_ROWS = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
BY_SEQUENCE = {
    "embed": RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False
    ),
    "layers.*.norm": SequenceParallel(sequence_dim=0),
    "layers.*.up": ColwiseParallel(input_layouts=Shard(0)),
    "layers.*.down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    "layers.*.out": SequenceParallel(sequence_dim=0),
    "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
}


def tensor_parallel(policy=None, when="before", select="layers.*", plan=BY_COLUMNS_AND_ROWS):
    model = make()
    if policy is not None and when == "before":
        tr.nn.wrap(model, policy, select=select)
    parallelize_module(model, init_device_mesh("cpu", (distributed.get_world_size(),)), plan)
    if policy is not None and when == "after":
        tr.nn.wrap(model, policy, select=select)
    return model


@check
def tensor_parallel_layers():
    for policy, when in PAIRS:
        assert_trains_alike(tensor_parallel(policy, when), tensor_parallel(), everywhere=True)


@check
def sequence_parallel_layers():
    for policy, when in PAIRS:
        assert_trains_alike(
            tensor_parallel(policy, when, plan=BY_SEQUENCE),
            tensor_parallel(plan=BY_SEQUENCE),
            everywhere=True,
        )


@check
def tensor_parallel_model_under_one_checkpoint():
    for policy in ("full", "budget:92%"):
        assert_trains_alike(
            tensor_parallel(policy, select=None), tensor_parallel(), everywhere=True
        )


@check
def tensor_parallel_sends_no_more_than_without():
    for plan in (BY_COLUMNS_AND_ROWS, BY_SEQUENCE):
        expected = communication(tensor_parallel(plan=plan), everywhere=True)
        for policy, when in PAIRS:
            model = tensor_parallel(policy, when, plan=plan)
            assert communication(model, everywhere=True) == expected


@slow_check
def fifty_steps():
    ddp_alike(steps=50)
    assert_trains_alike(sharded("dots"), sharded(), steps=50)
    assert_trains_alike(tensor_parallel("dots"), tensor_parallel(), steps=50, everywhere=True)


# --- pipelines -----------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.counted = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counted[func] = self.counted.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


def pipeline(policy):
    """A step of four stages, two a process, whose backward pass comes in two parts."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Sequential(Block(), Block()) for _ in range(2 * size)]
    if policy is not None:
        for layer in layers:
            tr.nn.wrap(layer, policy, select="*")
    stages = [
        PipelineStage(layers[i], i, len(layers), torch.device("cpu")) for i in (rank, rank + size)
    ]
    schedule = ScheduleInterleavedZeroBubble(
        stages, n_microbatches=4, loss_fn=lambda y, t: (y - t).square().mean()
    )
    x, target = batch(0, everywhere=True), batch(1, everywhere=True)
    losses = []

    def step():
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=losses)

    step()  # which finds out the shapes, too
    with Calls() as calls:
        step()
    gelu = torch.ops.aten.gelu.default
    gradients = [p.grad for stage in stages for p in stage.submod.parameters()]
    return gradients, [loss.item() for loss in losses], calls.counted[gelu]


@check
def a_pipeline_whose_backward_is_split():
    plain, losses, runs = pipeline(None)
    for policy in ("full", "dots"):
        found, found_losses, found_runs = pipeline(policy)
        assert found_losses == losses
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
        assert found_runs == 2 * runs, (
            policy,
            found_runs,
            runs,
        )  # the backward pass computes each once again, in both parts


@contextlib.contextmanager
def refused(kind, pattern):
    try:
        yield
    except kind as error:
        assert re.search(pattern, str(error)), str(error)
    else:
        raise AssertionError(f"no {kind.__name__}: {pattern}")
