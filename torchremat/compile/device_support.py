"""Requirements of compilers on the machine: the devices of a graph, and Triton for GPUs."""

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from torchremat import _torch
from torchremat.core.source import warn_user
from torchremat.errors import CompilerWarning, DeviceError
from torchremat.graph.notes import notes_of

_BY_TRITON = ("cuda", "xpu")


def _nodes_by_device(module: fx.GraphModule) -> dict[torch.device, fx.Node]:
    found: dict[torch.device, fx.Node] = {}
    for node in module.graph.nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        leaves: Iterable[object] = value if isinstance(value, tuple | list) else (value,)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                found.setdefault(leaf.device, node)
    return found


def check_devices(module: fx.GraphModule) -> None:
    """Raise `DeviceError` for devices that this machine lacks: inductor reads their properties."""
    for device, node in _nodes_by_device(module).items():
        if device.type in ("cpu", "meta"):
            continue
        count = torch.get_device_module(device).device_count()
        if (device.index or 0) >= count:
            has = f"only {count} of that kind" if count else "none of that kind"
            raise DeviceError(
                f"inductor cannot compile this graph with tensors on {device} (the first is "
                f"{node.name}, from {notes_of(node).source}): this machine has {has}. Move "
                "the model and the arguments to a device of this machine, or compile on the "
                "machine that will run the graph"
            )


def lacks_triton(module: fx.GraphModule) -> bool:
    """Whether a graph runs on a device whose kernels need Triton, which is not installed."""
    if _torch.has_triton():
        return False
    return any(device.type in _BY_TRITON for device in _nodes_by_device(module))


def warn_of_triton(who: str, otherwise: str) -> None:
    """Warn that operators run one after the other; `otherwise` is the option that asks for it."""
    warn_user(
        f"{who} needs Triton to make kernels for a GPU, and it is not installed: the operators run "
        "one after the other. Install it (pip install triton; PyTorch for CUDA and ROCm brings it "
        f"along), or ask for {otherwise}.",
        CompilerWarning,
    )
