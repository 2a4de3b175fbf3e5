#!/usr/bin/env python
"""What encodings of saved values spare: the peak of a step that recomputes nothing, and its time.

    python scripts/bench_encodings.py              on meta tensors, nothing runs
    python scripts/bench_encodings.py --run        a VGG-16 runs as well, on this machine

Bits of a mask and of ReLU's sign, and narrow indices, are saved in place of the values. The rule is
`torchremat/autodiff/rewrites/encodings.py`. Without it, values are saved as they are.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planning_models import MODELS
from planning_published import PUBLISHED

import torchremat as tr
from torchremat.autodiff.rewrites import encodings
from torchremat.measure import LiveBytes
from torchremat.planning.estimate import Estimate

WIDTHS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
SIZE = 128
Built = tuple[nn.Module, tuple[Any, ...]]


def vgg(batch: int, size: int, device: str) -> Built:
    """VGG-16 without its hidden linear layers: convolutions with ReLU, and poolings (0)."""
    layers: list[nn.Module] = []
    channels = 3
    for width in WIDTHS:
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()] if width else []
        layers += [] if width else [nn.MaxPool2d(2)]
        channels = width or channels
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512 * (size // 32) ** 2, 1000))
    return model.to(device), (torch.randn(batch, 3, size, size, device=device),)


def models() -> Iterator[tuple[str, Callable[[], Built]]]:
    """Names, and functions that build a model with its arguments."""
    yield "VGG-16, 32 images", lambda: vgg(32, 224, "meta")
    for name in ("unet-2", "unet-4", "resnet-18", "resnet-50", "densenet-6", "gpt-4"):
        yield name, (MODELS | PUBLISHED)[name].build


@contextmanager
def without_encodings() -> Iterator[None]:
    """Let traces save values as they are."""
    before, encodings.LEAST_NBYTES = encodings.LEAST_NBYTES, 1 << 62
    try:
        yield
    finally:
        encodings.LEAST_NBYTES = before


def compare(name: str, build: Callable[[], Built]) -> None:
    """Print a line about one model."""

    def estimate() -> Estimate:
        model, args = build()
        return tr.estimate(model, *args, policy="everything_saveable")

    found = estimate()
    with without_encodings():
        plain = estimate()
    print(
        f"{name:<18} {plain.saved_bytes / 1e6:9.1f} {found.saved_bytes / 1e6:9.1f} "
        f"{plain.peak_bytes / 1e6:9.1f} {found.peak_bytes / 1e6:9.1f} "
        f"{found.peak_bytes / plain.peak_bytes:6.2f} {found.seconds / plain.seconds:6.3f}"
    )


def run(repeats: int) -> None:
    """Run steps of a VGG-16 both ways, in turns, and print live bytes and times."""
    x = torch.randn(8, 3, SIZE, SIZE)
    functions = {}
    for name, around in (("saved as they are", without_encodings), ("encoded", nullcontext)):
        torch.manual_seed(0)
        model, _ = vgg(1, SIZE, "cpu")
        model.__class__ = type(name, (nn.Sequential,), {})  # models of one class share their traces
        functions[name] = tr.nn.wrap(model, "everything_saveable")
        with around():
            step(functions[name], x)
    times: dict[str, list[float]] = {name: [] for name in functions}
    gradients = {name: step(function, x)[1] for name, function in functions.items()}
    for _ in range(repeats):
        for name, function in functions.items():
            started = time.perf_counter()
            function(x).sum().backward()
            times[name].append(time.perf_counter() - started)
    for name, function in functions.items():
        peak, _ = step(function, x)
        print(f"{name:<18} peak {peak / 1e6:.1f} MB, {statistics.median(times[name]):.3f} s a step")
    same = all(map(torch.equal, *gradients.values()))
    print(f"the gradients are {'equal to the bit' if same else 'NOT equal'}")


def step(function: nn.Module, x: Tensor) -> tuple[int, list[Tensor]]:
    """The live bytes of a step at its peak, and the gradients of the parameters."""
    function.zero_grad(set_to_none=True)
    with LiveBytes() as memory:
        function(x).sum().backward()
    return memory.peak, [p.grad.clone() for p in function.parameters() if p.grad is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", action="store_true", help="run a VGG-16 as well")
    parser.add_argument("--repeats", type=int, default=5, help="steps that are timed")
    options = parser.parse_args()
    print("saved, and at the peak, in MB: as they are, encoded, and the ratios of peak and time")
    for name, build in models():
        compare(name, build)
    if options.run:
        run(options.repeats)


if __name__ == "__main__":
    main()
