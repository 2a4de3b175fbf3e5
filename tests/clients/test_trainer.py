"""The Trainer of `transformers`, also with PEFT's adapters."""

import pytest
import torch

from tests.clients.harness import MARKS, Recorder, check_client
from tests.clients.language_model import (
    PackedTokens,
    Tokens,
    common_options,
    make_callback,
    make_llama,
    options_of,
    reset_accelerate,
    state_of,
)

pytestmark = MARKS
STEPS = 8


def pad_rows(rows):
    def pad(name, value):
        return torch.nn.utils.rnn.pad_sequence(
            [row[name] for row in rows], batch_first=True, padding_value=value
        )

    mask = [torch.ones_like(row["input_ids"]) for row in rows]
    return {
        "input_ids": pad("input_ids", 0),
        "labels": pad("labels", -100),
        "attention_mask": torch.nn.utils.rnn.pad_sequence(mask, batch_first=True),
    }


def make_trainer(way, recorder, path, model, data=None, *, steps=STEPS, callbacks=(), **options):
    import transformers

    import torchremat.integrations.transformers  # noqa: F401

    reset_accelerate()
    collator = options.pop("data_collator", None)
    arguments = transformers.TrainingArguments(
        **{**common_options(path, steps), **options_of(way), **options}
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=data or Tokens(),
        eval_dataset=Tokens(count=8),
        data_collator=collator,
        callbacks=[make_callback(recorder), *callbacks],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def check_trainer(
    name, path, *, make_model=make_llama, make_callbacks=tuple, data=None, excess=0.0, **options
):
    def train(way, recorder):
        model = make_model()
        callbacks = make_callbacks()
        make_trainer(way, recorder, path, model, data, callbacks=callbacks, **options).train()
        return state_of(model)

    check_client(f"Trainer, {name}", train, steps=STEPS, excess=excess)


VARIANTS = {
    "fixed length": {},
    "varying length": {
        "data": Tokens((64, 40, 52, 33)),
        "data_collator": pad_rows,
        "train_sampling_strategy": "sequential",
    },
    "packed": {"data": PackedTokens()},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_trainer(name, tmp_path):
    check_trainer(name, tmp_path, **VARIANTS[name])


def test_resume(tmp_path):
    """A training that stops at half, and one that goes on from what it saved."""

    def train(way, recorder):
        path = tmp_path / way.replace(":", "-").replace("%", "")
        first = Recorder(measured=-1, warm=0)
        saving = {"save_strategy": "steps", "save_steps": 4, "save_only_model": False}
        make_trainer(way, first, path, make_llama(), steps=4, **saving).train()
        model = make_llama()
        trainer = make_trainer(way, recorder, path, model)
        trainer.train(resume_from_checkpoint=str(path / "checkpoint-4"))
        return state_of(model)

    check_client("Trainer, resume", train, steps=4, warm=2)


def make_generating_callback():
    import transformers

    class Generating(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step in (2, 5):
                model.eval()
                x = torch.ones(1, 3, dtype=torch.long)
                found = model.generate(x, max_new_tokens=4, do_sample=True, use_cache=True)
                assert found.shape[1] > 3
                model.train()

    return [Generating()]


def test_evaluation_and_generation_between(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 3}
    check_trainer(
        "evaluation and generation between",
        tmp_path,
        make_callbacks=make_generating_callback,
        **options,
    )


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_adapters(dora, tmp_path):
    def make_model():
        import peft

        config = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            lora_dropout=0.05,
            use_dora=dora,
            target_modules=["q_proj", "v_proj", "up_proj"],
            task_type="CAUSAL_LM",
            init_lora_weights=False,
        )
        return peft.get_peft_model(make_llama(), config).train()

    name = "PEFT DoRA" if dora else "PEFT LoRA"
    # 15 kB more than PyTorch's checkpoint, in the norms of the adapted weights
    check_trainer(name, tmp_path, make_model=make_model, excess=0.005 * dora)
