"""Train a byte-level GPT under several policies for saved values, and compare them.

The model is transformers' GPT-2 from a random start, the text is the source of Python's standard
library. Every variant starts from the same weights and sees the same batches. The variants take
turns, a step each, so that they share the load of the machine. The table at the end has the saved
bytes, the peak and the time of each. It also says whether each computed the very bits of the first
one.

    python examples/15_train_gpt.py
    python examples/15_train_gpt.py --dropout 0.1 --variants full --policy "dots|modules:*.attn"
"""

import argparse
import contextlib
import math
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

import torchremat as tr
from torchremat.measure import HeldBytes, LiveBytes

BLOCKS = "transformer.h.*"
POLICIES = tr.checkpoint_policies
NUM_WARMUP = 2  # steps whose time does not count: caches fill, functions are traced
MAX_TEXT = 4_000_000  # bytes


def checkpoint_with_torch(model: nn.Module) -> None:
    """Let transformers put `torch.utils.checkpoint` round each block."""
    since_5_23 = getattr(model, "activation_checkpointing_enable", None)
    (since_5_23 or model.gradient_checkpointing_enable)({"use_reentrant": False})


def wrap_blocks(policy: Callable, model: nn.Module) -> None:
    tr.nn.wrap(model, policy, select=BLOCKS)


# key on the command line -> (label in the table, what is done to the model)
VARIANTS: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
    "plain": ("plain", lambda model: model),
    "torch": ("torch.utils.checkpoint", checkpoint_with_torch),
    "full": ("nothing_saveable", partial(wrap_blocks, POLICIES.nothing_saveable)),
    "dots": (
        "dots_with_no_batch_dims_saveable",
        partial(wrap_blocks, POLICIES.dots_with_no_batch_dims_saveable),
    ),
    "modules": (
        "save_modules('*.attn')",
        partial(wrap_blocks, POLICIES.save_modules("*.attn")),
    ),
    # the whole model, its loss too, within 60 % of the peak that it has as it is
    "budget": ("memory_budget('60%')", lambda model: tr.nn.wrap(model, "budget:60%")),
}


@dataclass
class Run:
    """One variant in training, and what was seen of it."""

    label: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held_nbytes: int = 0
    peak_nbytes: int = 0
    difference: str | None = None  # the first one from plain

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def step(self, batch: torch.Tensor, seed: int) -> None:
        """Train on one batch against the clock."""
        torch.manual_seed(seed)  # for dropout
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.forward(batch)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def measured_step(self, batch: torch.Tensor, seed: int) -> None:
        """Train on one batch, and count bytes."""
        torch.manual_seed(seed)
        self.optimizer.zero_grad()
        with LiveBytes() as memory:
            with HeldBytes(self.model, batch) as held:
                loss = self.forward(batch)
            loss.backward()
            self.optimizer.step()
        self.held_nbytes, self.peak_nbytes = held.total, memory.peak
        self.losses.append(loss.item())

    def compare(self, plain: "Run") -> None:
        """Note the first loss or gradient of the last step that has other bits than `plain`'s."""
        if self.difference is not None:
            return
        where = f"in step {len(self.losses)}"
        if self.losses[-1] != plain.losses[-1]:
            self.difference = f"the loss {where}: {self.losses[-1]!r}, not {plain.losses[-1]!r}"
        expected = dict(plain.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            grad = parameter.grad
            if grad is None or not torch.equal(grad, expected[name].grad):
                self.difference = self.difference or f"the gradient of {name} {where}"

    @property
    def best_seconds(self) -> float:
        return min(self.seconds[NUM_WARMUP:])


def read_text(path: str | None) -> tuple[bytes, str]:
    """The text to train on, and what to call it."""
    if path is not None:
        return Path(path).read_bytes()[:MAX_TEXT], path
    parts, size = [], 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(file.read_bytes())
        size += len(parts[-1])
        if size >= MAX_TEXT:
            break
    return b"\n".join(parts)[:MAX_TEXT], f"{len(parts)} files of Python's standard library"


def make_batches(options: argparse.Namespace) -> torch.Tensor:
    """int64[steps + 1, batch, context]: pieces of the text from random places."""
    values = torch.frombuffer(bytearray(options.text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(options.seed)
    num_pieces = (options.steps + 1) * options.batch
    starts = torch.randint(len(values) - options.context, (num_pieces, 1), generator=generator)
    pieces = values[starts + torch.arange(options.context)].long()
    return pieces.view(options.steps + 1, options.batch, options.context)


def make_model(options: argparse.Namespace) -> nn.Module:
    # slow to import: after the arguments have been read
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    config = GPT2Config(
        vocab_size=256,
        n_positions=options.context,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.heads,
        resid_pdrop=options.dropout,
        embd_pdrop=options.dropout,
        attn_pdrop=options.dropout,
        attn_implementation=options.attention,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(options.seed)
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # what it falls back to, with a warning
    return model


def make_runs(options: argparse.Namespace) -> list[Run]:
    """A run for each requested variant; the first is plain."""
    variants = [VARIANTS[key] for key in options.variants]
    variants += [(spelling, partial(wrap_blocks, spelling)) for spelling in options.policy]
    runs = []
    for label, prepare in variants:
        model = make_model(options)
        prepare(model)
        runs.append(Run(label, model, torch.optim.AdamW(model.parameters(), lr=options.lr)))
    return runs


@contextlib.contextmanager
def progress_of(total: int, console: Console) -> Iterator[Callable[[str], None]]:
    """A function to be called after each step: moves a bar, or prints ten lines in a log."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, {task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        num_done = 0

        def advance(message: str) -> None:
            nonlocal num_done
            num_done += 1
            progress.update(task, advance=1, description=message)
            if not console.is_terminal and 10 * num_done // total > 10 * (num_done - 1) // total:
                console.print(f"{num_done} of {total} steps, {message}")

        yield advance


def train(runs: list[Run], batches: torch.Tensor, seed: int, console: Console) -> None:
    """Take each step with all runs in turn, the last one measured, and compare them after it."""
    shuffle = random.Random(seed)
    with progress_of(len(runs) * len(batches), console) as advance:
        for i, batch in enumerate(batches):
            is_measured = i == len(batches) - 1
            # in another order each time: a step is slower or faster for what ran before it
            for run in shuffle.sample(runs, len(runs)):
                (run.measured_step if is_measured else run.step)(batch, seed + i)
                advance(f"loss {run.losses[-1]:.3f}")
            if not math.isfinite(runs[0].losses[-1]):
                raise SystemExit(
                    f"plain's loss is {runs[0].losses[-1]} in step {i + 1}: lower --lr"
                )
            for run in runs:
                run.compare(runs[0])


def results(runs: list[Run]) -> Table:
    plain = runs[0]
    state = [value for entry in plain.optimizer.state.values() for value in entry.values()]
    parameters_mb = sum(p.nbytes for p in plain.model.parameters()) / 1e6
    optimizer_mb = sum(value.nbytes for value in state) / 1e6
    table = Table(
        box=box.SIMPLE,
        caption=(
            "held: what autograd keeps from forward to backward, parameters and inputs apart\n"
            f"peak: live bytes made in a step, {parameters_mb:.1f} MB of parameters and "
            f"{optimizer_mb:.1f} MB of optimizer state apart\n"
            f"step: forward, backward and AdamW, best of {len(plain.seconds) - NUM_WARMUP}; "
            f"x 1.00 is {1000 * plain.best_seconds:.0f} ms\n"
            "bit-equal: every loss and gradient of every step is plain's to the bit"
        ),
        caption_justify="left",
    )
    table.add_column("variant", overflow="fold")
    for heading in ("held MB", "peak MB", "step", "loss", "bit-equal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.label,
            f"{run.held_nbytes / 1e6:.1f}",
            f"{run.peak_nbytes / 1e6:.1f}",
            f"x {run.best_seconds / plain.best_seconds:.2f}",
            f"{run.losses[0]:.3f} -> {run.losses[-1]:.3f}",
            "yes" if run.difference is None else "NO",
        )
    return table


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, not {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    return parse


def number(least: float, below: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
        if not least <= value < below:
            raise argparse.ArgumentTypeError(f"must be in [{least:g}, {below:g}), not {text}")
        return value

    return parse


def variant_keys(text: str) -> list[str]:
    """`torch,full` as a list; plain comes first whether it is named or not."""
    keys = [key.strip() for key in text.split(",") if key.strip()]
    for key in keys:
        if key not in VARIANTS:
            raise argparse.ArgumentTypeError(f"no variant {key!r}; there are {', '.join(VARIANTS)}")
    return ["plain", *dict.fromkeys(key for key in keys if key != "plain")]


def policy_spelling(text: str) -> str:
    try:
        tr.policy(text)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    add = parser.add_argument
    add(
        "--steps",
        type=at_least(NUM_WARMUP + 1),
        default=30,
        help="training steps of each variant, %(default)s",
    )
    add("--layers", type=at_least(1), default=4, help="transformer blocks, %(default)s")
    add("--width", type=at_least(1), default=256, help="size of the hidden states, %(default)s")
    add(
        "--heads",
        type=at_least(1),
        default=4,
        help="attention heads, %(default)s; they divide the width",
    )
    add("--context", type=at_least(2), default=256, help="bytes in a sequence, %(default)s")
    add("--batch", type=at_least(1), default=4, help="sequences in a batch, %(default)s")
    add(
        "--dropout",
        type=number(0, 1),
        default=0.0,
        help="probability %(default)s, after embeddings, attention and both parts of a block",
    )
    add("--lr", type=number(0, math.inf), default=5e-4, help="AdamW's learning rate, %(default)s")
    add(
        "--attention",
        choices=["sdpa", "eager"],
        default="sdpa",
        help="transformers' implementation, %(default)s",
    )
    add(
        "--variants",
        type=variant_keys,
        default=",".join(VARIANTS),
        help="what to train, %(default)s; plain always is",
    )
    add(
        "--policy",
        type=policy_spelling,
        action="append",
        default=[],
        metavar="SPELLING",
        help="one more variant: each block under tr.policy(SPELLING), such as 'dots' or "
        "'modules:*.mlp'; may be given more than once",
    )
    add("--text", metavar="FILE", help="train on this file, not on the standard library")
    add(
        "--seed",
        type=at_least(0),
        default=0,
        help="of weights, batches and dropout, %(default)s",
    )
    add("--threads", type=at_least(1), help="CPU threads; PyTorch's own choice if not given")
    options = parser.parse_args(arguments)
    check_together(options, parser)
    return options


def check_together(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End the program with a message if options do not fit each other; reads the text."""
    if options.width % options.heads:
        parser.error(
            f"--width {options.width} is not divisible by --heads {options.heads}: "
            "each head takes an equal part of the width"
        )
    try:
        options.text, options.text_name = read_text(options.text)
    except OSError as error:
        parser.error(f"--text {options.text}: {error.strerror}")
    if len(options.text) <= options.context:
        parser.error(
            f"--context {options.context} needs a longer text than the {len(options.text)} bytes "
            f"of {options.text_name}: lower it, or give a longer text with --text"
        )


def main() -> int:
    options = parse_arguments()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    try:
        runs = make_runs(options)
    except ModuleNotFoundError as error:
        console.print(f"{error}. This example needs: pip install -e '.\\[examples]'")
        return 1
    num_parameters = sum(parameter.numel() for parameter in runs[0].model.parameters())
    console.print(
        f"GPT-2, {options.layers} blocks of width {options.width}, {num_parameters / 1e6:.1f} M "
        f"parameters, on {options.batch} x {options.context} bytes a step of {options.text_name}; "
        f"{torch.get_num_threads()} threads",
        highlight=False,
    )
    train(runs, make_batches(options), options.seed, console)
    console.print(results(runs))
    different = [run for run in runs if run.difference is not None]
    for run in different:
        console.print(f"{run.label} differs from plain, first in {run.difference}")
    if not different:
        console.print("All variants are bit-equal to plain.")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
