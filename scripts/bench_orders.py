#!/usr/bin/env python
"""Less memory with nothing recomputed: the order of operators and updates, and one buffer.

The models are of the kinds that OLLA (Steiner et al., 2022) measured, on the meta device, with SGD.
*Peak* is of the whole step, with parameters. *Reserved* is what PyTorch's caching allocator takes
for plain PyTorch, by the model of it that plans have. The buffer is planned with the schedule.

    python scripts/bench_orders.py                              an hour on one core
    python scripts/bench_orders.py --models resnet-50 bert --batches 1
    python scripts/bench_orders.py --docs                       docs/measured/orders.md
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as hf
from torch import Tensor, nn

import torchremat as tr

PAGE_TEXT = """\
# Less memory with nothing recomputed

Another order of operators, with updates in the backward pass, takes {one[0]:.2f} of plain PyTorch's
peak at the smallest batch and {many[0]:.2f} at the largest. One buffer that is planned with the
schedule takes {one[1]:.2f} and {many[1]:.2f} of what PyTorch reserves. Nothing runs twice, and no
value has other bits. OLLA (Steiner et al., 2022) reports a third less on average, of order and
addresses together.

{table}

At a batch of one, gradients are most of the peak, and updates take them away. At a large batch what
is saved for the backward pass is most of it, and no order helps: a budget does.

## How it was measured

    python scripts/bench_orders.py --docs

The models are of the kinds that OLLA measured, with the sizes of their papers: images of 224 by
224, {tokens} tokens, float32, SGD. They are on the meta device, and nothing runs. Bytes are of the
whole step, parameters included. *Reserved* is what PyTorch's caching allocator takes for plain
PyTorch, by the model of it that plans have. *Buffer* is an arena of `Timeline.place_values`, beside
parameters and inputs. *Updates* are parameters that are updated in the backward pass. The plan is
`tr.plan(..., budget="time:+0%", optimizer=torch.optim.SGD)`.
"""
VOCABULARY = 32_000
TOKENS = 128
PAGE = Path(__file__).resolve().parents[1] / "docs" / "measured" / "orders.md"


class Labelled(nn.Module):
    """The loss of a model, whether it returns that or logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if isinstance(self.model, hf.PreTrainedModel):
            found: Tensor = self.model(x, labels=labels).loss
            return found
        return nn.functional.cross_entropy(self.model(x).flatten(0, -2), labels.flatten())


class Translator(nn.Module):
    """`nn.Transformer` of the sizes of Vaswani et al.'s base model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 512)
        self.body = nn.Transformer(batch_first=True)
        self.head = nn.Linear(512, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.words(tokens)
        found: Tensor = self.head(self.body(embedded, embedded))
        return found


def alexnet() -> nn.Module:
    sizes = [(3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1)]
    layers: list[nn.Module] = []
    for i, size in enumerate([*sizes, (256, 256, 3, 1, 1)]):
        layers += [nn.Conv2d(*size), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(3, 2)] if i in (0, 1, 4) else []
    return nn.Sequential(*layers, *_classify(256 * 6 * 6))


def vgg() -> nn.Module:
    """VGG of 11 layers."""
    layers: list[nn.Module] = []
    width = 3
    for out in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if out:
            layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU(inplace=True)]
            width = out
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, *_classify(512 * 7 * 7))


def _classify(width: int) -> list[nn.Module]:
    inner = [nn.Dropout(), nn.Linear(width, 4096), nn.ReLU(inplace=True)]
    return [
        nn.Flatten(),
        *inner,
        nn.Dropout(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 1000),
    ]


def _images(make: Callable[[], nn.Module], size: int = 224) -> "Case":
    return Case(make, lambda n: (torch.empty(n, 3, size, size), torch.zeros(n, dtype=torch.long)))


def _words(make: Callable[[], nn.Module]) -> "Case":
    def build(n: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(n, TOKENS, dtype=torch.long) for _ in range(2))

    return Case(make, build)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]


RESNET_18 = {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}
CLASSES = {"num_labels": 1000}
CASES = {
    "alexnet": _images(alexnet),
    "vgg": _images(vgg),
    "resnet-18": _images(
        lambda: hf.ResNetForImageClassification(hf.ResNetConfig(**RESNET_18, **CLASSES))
    ),
    "resnet-50": _images(lambda: hf.ResNetForImageClassification(hf.ResNetConfig(**CLASSES))),
    "mobilenet": _images(
        lambda: hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(**CLASSES))
    ),
    "efficientnet": _images(
        lambda: hf.EfficientNetForImageClassification(
            hf.EfficientNetConfig(
                width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, **CLASSES
            )
        )
    ),
    "vit": _images(lambda: hf.ViTForImageClassification(hf.ViTConfig(**CLASSES))),
    "bert": _words(lambda: hf.BertForMaskedLM(hf.BertConfig())),
    "xlm-r": _words(
        lambda: hf.XLMRobertaForMaskedLM(
            hf.XLMRobertaConfig(vocab_size=250_002, max_position_embeddings=514, type_vocab_size=1)
        )
    ),
    "transformer": _words(Translator),
}


@dataclass(frozen=True)
class Found:
    """Bytes of a step: plain, and of a plan that recomputes nothing."""

    name: str
    batch: int
    plain: int
    reserved: int
    peak: int
    arena: int
    updates: int
    seconds: float

    @property
    def ratios(self) -> tuple[float, float]:
        """The peak and the buffer, beside plain PyTorch's peak and what it reserves."""
        return self.peak / self.plain, self.arena / self.reserved


def measure(name: str, batch: int) -> Found:
    with torch.device("meta"):
        model, inputs = Labelled(CASES[name].make()), CASES[name].inputs(batch)
    start = time.process_time()
    plan = tr.plan(model, *inputs, budget="time:+0%", optimizer=torch.optim.SGD, device="h100")
    seconds = time.process_time() - start
    assert plan.recompute_seconds == 0, name
    timeline = plan.timeline()
    arena = plan.peak_bytes - timeline.peak + timeline.place_values().nbytes
    plain = plan.baseline
    return Found(
        name,
        batch,
        plain.peak_bytes,
        plain.reserved_bytes,
        plan.peak_bytes,
        arena,
        plan.updates_in_backward,
        seconds,
    )


def describe(rows: list[Found]) -> str:
    """The page of figures."""
    lines = [
        "| model | batch | plain peak (MiB) | reserved (MiB) | peak | buffer | peak / plain | "
        "buffer / reserved | updates | plan (s) |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        sizes = [f"{n / 2**20:,.0f}" for n in (row.plain, row.reserved, row.peak, row.arena)]
        shown = [*sizes, *(f"{ratio:.2f}" for ratio in row.ratios), str(row.updates)]
        lines.append(f"| {row.name} | {row.batch} | {' | '.join(shown)} | {row.seconds:.0f} |")
    for batch in sorted({row.batch for row in rows}):
        means = [
            f"{statistics.geometric_mean(ratios):.2f}"
            for ratios in zip(*(row.ratios for row in rows if row.batch == batch), strict=True)
        ]
        lines.append(f"| geometric mean | {batch} | | | | | {means[0]} | {means[1]} | | |")
    return "\n".join(lines)


def write_page(rows: list[Found]) -> None:
    ones = [row.ratios for row in rows if row.batch == min(row.batch for row in rows)]
    many = [row.ratios for row in rows if row.batch == max(row.batch for row in rows)]
    first, last = (
        [statistics.geometric_mean(column) for column in zip(*found, strict=True)]
        for found in (ones, many)
    )
    text = PAGE_TEXT.format(one=first, many=last, table=describe(rows), tokens=TOKENS)
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--docs", action="store_true", help="write docs/measured/orders.md")
    options = parser.parse_args()
    rows = []
    for name in options.models:
        for batch in options.batches:
            rows.append(measure(name, batch))
            print(rows[-1], file=sys.stderr, flush=True)
    print(describe(rows))
    if options.docs:
        write_page(rows)


if __name__ == "__main__":
    main()
