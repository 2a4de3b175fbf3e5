"""Trainers of TRL: supervised, of preferences, and of rewards for what the model generates."""

import random

import pytest

from tests.clients.harness import MARKS, WAYS, check_client
from tests.clients.language_model import (
    common_options,
    make_callback,
    make_llama,
    options_of,
    reset_accelerate,
    state_of,
)

# Its loss loops over as many chunks as a batch has tokens, so the model as a whole has a trace for
# each number of tokens. After four of them its calls run on tapes, and a warning says so; another
# says that a tape of a size that is new, whose peak is in its forward pass, exceeds the budget.
pytestmark = [m for m in MARKS if not any(name in str(m.args) for name in ("Retrace", "Budget"))]
STEPS = 12
# TRL's loss writes logits into a buffer that is most of the peak, whatever the model saves
TRL_WAYS = (*WAYS[:-1], "budget:97%")


def make_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(120))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
    )
    found.chat_template = "{% for m in messages %}{{m['content']}} {% endfor %}"
    return found


def make_texts(columns, count=40):
    """Rows of random words; `columns` gives how many words a text has, at least and at most."""
    from datasets import Dataset

    draw = random.Random(0)

    def text(least, most):
        return " ".join(f"w{draw.randrange(120)}" for _ in range(draw.randrange(least, most)))

    return Dataset.from_list(
        [{name: text(*sizes) for name, sizes in columns.items()} for _ in range(count)]
    )


def reward(completions, **kwargs):
    return [float(len(set(c.split()))) + 0.1 * sum(map(len, c.split())) for c in completions]


KINDS = {
    "SFT": {"columns": {"text": (24, 48)}},
    "SFT packed": {
        "columns": {"text": (24, 48)},
        "count": 200,
        "arguments": {"packing": True, "max_length": 64},
    },
    "SFT LoRA": {"columns": {"text": (24, 48)}, "adapters": True},
    "DPO": {"columns": {"prompt": (8, 16), "chosen": (24, 48), "rejected": (24, 48)}},
    "GRPO": {
        "columns": {"prompt": (24, 32)},
        "arguments": {"num_generations": 4, "max_completion_length": 16, "temperature": 1.0},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_trl(kind, tmp_path):
    import transformers
    import trl

    import torchremat.integrations.transformers  # noqa: F401

    setting = KINDS[kind]
    name = kind.split()[0]
    data = make_texts(setting["columns"], setting.get("count", 40))

    def train(way, recorder):
        reset_accelerate()
        # without dropout, as TRL has it where a policy is compared with another
        model = make_llama(vocab_size=124, attention_dropout=0.0)
        own = {"gradient_checkpointing": False} if way == "plain" else options_of(way)
        options = {**common_options(tmp_path, STEPS), **setting.get("arguments", {}), **own}
        more = {"ref_model": make_llama(vocab_size=124)} if kind == "DPO" else {}
        if kind == "GRPO":
            more["reward_funcs"] = reward
        if setting.get("adapters"):
            import peft

            more["peft_config"] = peft.LoraConfig(
                r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
            )
        trainer = getattr(trl, f"{name}Trainer")(
            model=model,
            args=getattr(trl, f"{name}Config")(**options),
            train_dataset=data,
            processing_class=make_tokenizer(),
            callbacks=[make_callback(recorder)],
            **more,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return state_of(model)

    check_client(f"TRL {kind}", train, steps=STEPS, warm=8, ways=TRL_WAYS)
