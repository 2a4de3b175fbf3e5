"""A small Llama of `transformers`, tokens for it, and the recorder as a callback of its Trainer."""

import importlib.util
import os
from typing import Any

import torch

from tests.clients.harness import Recorder

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

VOCABULARY = 128
LENGTH = 64


def make_llama(**settings: Any) -> Any:
    """Made from a configuration; with dropout, so that random streams are compared too."""
    import transformers

    torch.manual_seed(3)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "max_position_embeddings": 256,
        "attention_dropout": 0.1,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **settings})).train()


class Tokens(torch.utils.data.Dataset):
    """Random tokens; `lengths` are those of the examples, in turn."""

    def __init__(self, lengths: tuple[int, ...] = (LENGTH,), *, count: int = 96) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = [
            torch.randint(3, VOCABULARY, (lengths[i // 4 % len(lengths)],), generator=generator)
            for i in range(count)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class PackedTokens(Tokens):
    """Examples one after another in a row; their positions begin anew."""

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        cut = 8 + 7 * i % (LENGTH - 16)
        positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])
        return {**super().__getitem__(i), "position_ids": positions}


def options_of(way: str) -> dict[str, Any]:
    """The arguments of a Trainer that train in this `way`."""
    import transformers

    if way == "plain":
        return {}
    word = (
        "activation"
        if hasattr(transformers.PreTrainedModel, "is_activation_checkpointing")
        else "gradient"
    )
    options = {"use_reentrant": False} if way == "own" else {"policy": way}
    return {f"{word}_checkpointing": True, f"{word}_checkpointing_kwargs": options}


def common_options(path: Any, steps: int) -> dict[str, Any]:
    return {
        "output_dir": str(path),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "seed": 1,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
    }


def make_callback(recorder: Recorder) -> Any:
    """Calls the recorder at each step of a Trainer, and takes the losses of its log."""
    import transformers

    class Recording(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            recorder.step_begins()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            recorder.passes_end()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            recorder.step_ends()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            recorder.losses += [v for k, v in logs.items() if k in ("loss", "eval_loss")]

    return Recording()


def reset_accelerate() -> None:
    """Its settings are of the process, and the next trainer has others."""
    if importlib.util.find_spec("accelerate") is not None:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """Its parameters and buffers, and the random stream."""
    return {**model.state_dict(), "random stream": torch.get_rng_state()}
