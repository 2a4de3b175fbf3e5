"""torchtitan's Llama, whose layers are in a `ModuleDict`, with its own checkpointing."""

import torch
import torch.nn.functional as F

import torchremat as tr
from tests.clients.harness import MARKS, WAYS, check_client, run_steps

pytestmark = MARKS
VOCABULARY = 256


def make_llama():
    """The one for debugging, with the attention that its trainer has for models of images.

    FlexAttention, which it takes for language, has no backward pass on a CPU.
    """
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:4]
    config.vocab_size = config.tok_embeddings.num_embeddings = VOCABULARY
    config.lm_head.out_features = VOCABULARY
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    torch.manual_seed(0)
    model.init_states()
    return model


def wrap(model, way):
    from torchtitan.distributed.activation_checkpoint import FullAC

    if way == "own":
        FullAC(FullAC.Config()).apply(model)
    elif way.startswith("budget"):
        tr.nn.wrap(model, way)
    elif way == "every:2":
        names = [name for name, _ in tr.nn.select_modules(model, way)]
        assert names == ["layers.0", "layers.2"]
        tr.nn.wrap(model, "full", select=way)
    elif way != "plain":
        tr.nn.wrap(model, way, select="layers.*")


def test_llama():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (8, 4, 129), generator=generator)

    def train(way, recorder):
        model = make_llama()
        wrap(model, way)

        def loss_of(step):
            logits = model(tokens[step, :, :-1])
            return F.cross_entropy(logits.flatten(0, 1), tokens[step, :, 1:].flatten())

        run_steps(list(model.parameters()), loss_of, recorder)
        return {
            name.replace("_checkpoint_wrapped_module.", ""): value
            for name, value in model.state_dict().items()
        }

    check_client("torchtitan Llama", train, ways=(*WAYS, "every:2"))
