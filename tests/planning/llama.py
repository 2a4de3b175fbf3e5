"""The training step of a model shaped like Llama 3 8B, in numbers: for tests and measurements."""

import torch
from torch import Tensor, nn

from torchremat.planning.cost_model import CostModel
from torchremat.planning.problem.problem import Problem
from torchremat.planning.step.problem_builder import NumericStep
from torchremat.planning.step.traced_step import region_of

NUM_TOKENS = 4096


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def llama_loss(num_layers: int) -> tuple[nn.Module, Tensor]:
    """The model in bfloat16 on the meta device with its loss, and a sequence for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        return Loss(model), torch.empty(1, NUM_TOKENS, dtype=torch.int64)


def llama_problem(num_layers: int) -> Problem:
    """Its step on an H100, by the roofline."""
    module, tokens = llama_loss(num_layers)
    joint = region_of(module, (tokens,), {}).joint
    return NumericStep.of(joint, CostModel.of("h100").seconds).problem
