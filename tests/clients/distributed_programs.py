"""Two processes that train a small Llama of `transformers`, under DDP and sharded by FSDP2.

See `tests/parallel/processes.py` for how they are run.
"""

import torch
from torch import distributed
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchremat as tr
from tests.clients.harness import check_client, run_steps
from tests.clients.language_model import LENGTH, VOCABULARY, make_llama


def wrap(model, way, select):
    """A budget is for the modules of `select`; the other ways are for each layer."""
    if way == "own":
        layers = set(model.model.layers)
        apply_activation_checkpointing(model, check_fn=layers.__contains__)
    elif way.startswith("budget"):
        tr.nn.wrap(model, way, select=select)
    elif way != "plain":
        tr.nn.wrap(model, way, select="model.layers.*")


def check_parallel(client, make_parallel, select=None):
    rank = distributed.get_rank()
    tokens = torch.randint(
        VOCABULARY, (8, 4, LENGTH), generator=torch.Generator().manual_seed(rank)
    )

    def train(way, recorder):
        model = make_llama()
        torch.manual_seed(rank)
        wrap(model, way, select)
        parallel = make_parallel(model)

        def loss_of(step):
            return parallel(input_ids=tokens[step], labels=tokens[step]).loss

        run_steps(list(parallel.parameters()), loss_of, recorder)
        found = {name: _local(value) for name, value in model.state_dict().items()}
        return {name.replace("_checkpoint_wrapped_module.", ""): v for name, v in found.items()}

    check_client(client, train, is_written=rank == 0)


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, distributed.tensor.DTensor) else tensor


def ddp():
    check_parallel("DDP", DistributedDataParallel)


def ddp_static_graph():
    check_parallel(
        "DDP, static graph, buckets as views",
        lambda model: DistributedDataParallel(
            model, static_graph=True, gradient_as_bucket_view=True
        ),
    )


def shard(model, **options):
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2():
    # layers that gather their weights have a budget each: what they gather is in no graph
    check_parallel("FSDP2", shard, "model.layers.*")


def fsdp2_bf16():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check_parallel("FSDP2, bf16", lambda model: shard(model, mp_policy=policy), "model.layers.*")


NAMES = ("ddp", "ddp_static_graph", "fsdp2", "fsdp2_bf16")
