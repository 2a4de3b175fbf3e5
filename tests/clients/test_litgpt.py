"""litgpt's model in a plain loop, with its loss in chunks, and with its adapters."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

import torchremat as tr
from tests.clients.harness import MARKS, check_client, run_steps

pytestmark = MARKS
VOCABULARY = 128
SIZES = {
    "n_layer": 4,
    "n_head": 4,
    "n_query_groups": 2,
    "n_embd": 64,
    "block_size": 64,
    "padded_vocab_size": VOCABULARY,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 128,
    "bias": False,
    "rotary_percentage": 1.0,
}


def make_model():
    from litgpt import GPT, Config

    return GPT(Config(**SIZES))


def make_adapted():
    from litgpt.lora import GPT, Config, mark_only_lora_as_trainable

    adapters = {"lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.05}
    model = GPT(Config(**SIZES, **adapters, lora_query=True, lora_value=True, lora_mlp=True))
    mark_only_lora_as_trainable(model)
    return model


def wrap(model, way):
    layers = set(model.transformer.h)
    if way == "own":
        apply_activation_checkpointing(model, check_fn=layers.__contains__)
    elif way.startswith("budget"):
        tr.nn.wrap(model, way)
    elif way != "plain":
        tr.nn.wrap(model, way, select="transformer.h.*")


@pytest.mark.parametrize("make", [make_model, make_adapted], ids=["pretraining", "LoRA"])
def test_litgpt(make, request):
    from litgpt.utils import chunked_cross_entropy

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (8, 4, 65), generator=generator)

    def train(way, recorder):
        torch.manual_seed(0)
        model = make().train()
        wrap(model, way)
        parameters = [p for p in model.parameters() if p.requires_grad]

        def loss_of(step):
            return chunked_cross_entropy(model(tokens[step, :, :-1]), tokens[step, :, 1:])

        run_steps(parameters, loss_of, recorder)
        return {
            name.replace("_checkpoint_wrapped_module.", ""): value
            for name, value in model.state_dict().items()
        }

    check_client(f"litgpt, {request.node.callspec.id}", train)
