"""Fine-tune a small Llama with LoRA adapters in the Trainer of transformers, within a budget.

The same training runs twice, from the same weights. One run is plain. In the other a
`RematCallback` limits the peak memory of each step to the budget. Losses and adapters are equal to
the bit.

    pip install "torchremat[examples]"
    python examples/17_finetune_llama.py
    python examples/17_finetune_llama.py --policy dots         # a policy on each layer instead
    python examples/17_finetune_llama.py --steps 50 --budget 60% --bf16

The weights are random and the text repeats, so that nothing is downloaded.
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from torchremat.integrations.transformers import RematCallback

TEXT = "the quick brown fox jumps over the lazy dog; "


class Text(Dataset[dict[str, Tensor]]):
    """Pieces of a text, a token for each byte."""

    def __init__(self, length: int) -> None:
        self.tokens = torch.tensor(list(TEXT.encode() * (length + 1)))
        self.length = length

    def __len__(self) -> int:
        return len(TEXT)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self.tokens[index : index + self.length]
        return {"input_ids": piece, "labels": piece}


def make_model(arguments: argparse.Namespace) -> nn.Module:
    """A Llama with random weights, frozen, and adapters that are trained."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        use_cache=False,  # as while checkpointing, or sums are in another order
    )
    adapters = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    return get_peft_model(LlamaForCausalLM(config), adapters)


class Losses(TrainerCallback):
    """Keeps the losses, which the Trainer rounds in its log, and weights at the end."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def watch(self, module: nn.Module, inputs: object, output: dict[str, Tensor]) -> None:
        """Take the loss from what the model returns."""
        self.losses.append(output["loss"].item())


def train(arguments: argparse.Namespace, *callbacks: TrainerCallback) -> tuple[list[float], dict]:
    """Losses of a training, and the adapters after it."""
    model, losses = make_model(arguments), Losses()
    model.register_forward_hook(losses.watch)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch,
            learning_rate=1e-2,
            bf16=arguments.bf16,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(),
            dataloader_pin_memory=torch.accelerator.is_available(),
            seed=1,
        )
        trainer = Trainer(model, options, train_dataset=Text(arguments.length))
        trainer.remove_callback(PrinterCallback)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train()
    adapters = {name: p.detach().cpu() for name, p in model.named_parameters() if p.requires_grad}
    return losses.losses, adapters


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="of a sequence, in tokens")
    parser.add_argument("--bf16", action="store_true", help="under autocast")
    parser.add_argument("--budget", default="5MiB", help="of peak memory: '2GiB', '60%%'")
    parser.add_argument("--policy", help="what may be saved, instead of a budget: 'dots', 'full'")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.policy is not None:
        arguments.budget = None
    # nothing is recomputed: only to measure the step
    plain = RematCallback("none", select="model.layers.*")
    losses, adapters = train(arguments)
    train(arguments, plain)
    remat = RematCallback(arguments.policy, budget=arguments.budget)
    losses_of_remat, adapters_of_remat = train(arguments, remat)

    print(f"{'step':>4}  {'loss':>8}  {'with remat':>10}")
    for i, (loss, other) in enumerate(zip(losses, losses_of_remat, strict=True), 1):
        print(f"{i:4}  {loss:8.5f}  {other:10.5f}")
    equal = losses == losses_of_remat and all(
        torch.equal(adapters[name], adapters_of_remat[name]) for name in adapters
    )
    print(f"losses and adapters are {'equal to the bit' if equal else 'NOT EQUAL'}")
    print(f"peak of a step: {plain.peak_bytes} B without, {remat.peak_bytes} B with {remat.policy}")
    for decision, nbytes in remat.report.by_decision().items():
        print(f"  {decision:10} {nbytes:>10,} B")


if __name__ == "__main__":
    main()
