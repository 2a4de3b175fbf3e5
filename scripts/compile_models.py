"""The models of `bench_compile.py`, in sizes at which activations outweigh parameters."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from planning_models import Block, Gpt, ResNet, UNet
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Model:
    """A model to compile.

    Attributes:
        build: makes the module, which returns its loss, and its arguments.
        small: the sizes for a CPU.
        large: the sizes for a GPU.
        blocks: the lists of submodules that `torch.utils.checkpoint` is put on.
    """

    build: Callable[..., Built]
    small: tuple[int, ...]
    large: tuple[int, ...]
    blocks: tuple[str, ...]

    def make(self, device: torch.device, *, small: bool = False) -> Built:
        """The module and its arguments on `device`, the same each time; `small` as on a CPU."""
        torch.manual_seed(0)
        with device:
            return self.build(*(self.small if small or device.type == "cpu" else self.large))


def _gpt(depth: int, width: int, batch: int, length: int) -> Built:
    layers: list[nn.Module] = [Block(width, width // 64, causal=True) for _ in range(depth)]
    return Gpt(layers, width, 512), (torch.randint(512, (batch, length)),)


def _resnet(stages: int, depth: int, width: int, batch: int, size: int) -> Built:
    images = torch.randn(batch, 3, size, size)
    return ResNet((depth,) * stages, width, bottleneck=False), (
        images,
        torch.randint(100, (batch,)),
    )


def _unet(depth: int, width: int, batch: int, size: int) -> Built:
    labels = torch.randint(2, (batch, size, size))
    return UNet(depth, width), (torch.randn(batch, 3, size, size), labels)


MODELS = {
    "gpt": Model(_gpt, (4, 128, 4, 128), (6, 768, 16, 1024), ("layers",)),
    "resnet": Model(_resnet, (3, 2, 16, 16, 32), (4, 2, 64, 256, 64), ("blocks",)),
    "unet": Model(_unet, (2, 16, 2, 64), (4, 32, 32, 256), ("down", "up")),
}
