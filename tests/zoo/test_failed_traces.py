"""A trace that fails, at any point, leaves a model as it was: no fake tensor, the same gradients.

scripts/test_zoo.sh tests/zoo/test_failed_traces.py
"""

import copy
import gc
import random
import types

import numpy
import pytest
import torch
from torch import nn

import torchremat as tr
from tests.helpers import differences
from tests.zoo.models import find_models
from torchremat import _torch

pytest.importorskip("transformers")
pytestmark = [pytest.mark.zoo, pytest.mark.filterwarnings("ignore")]

MODELS = find_models()
NUM_POINTS = 2
"""Of each model, so that all of them take some minutes."""


class _StopError(Exception):
    """What a hook raises in the middle of a trace."""


def _stop(*_):
    raise _StopError


def find_fake_tensors(root):
    """The fake tensors that are reachable from `root`, but not by way of code."""
    seen, found, stack = set(), [], [root]
    while stack:
        held = stack.pop()
        if id(held) in seen or isinstance(held, _OF_CODE):
            continue
        seen.add(id(held))
        if isinstance(held, _torch.FakeTensor):
            found.append(held)
        stack += gc.get_referents(held)
    return found


_OF_CODE = (type, types.ModuleType, types.FunctionType, types.FrameType, types.CodeType)


def _step(zoo, model, batch):
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    loss = zoo.loss_of(model, batch)
    wanted = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    return loss.detach(), gradients, dict(model.named_buffers())


@pytest.mark.parametrize("name", MODELS)
def test_a_failed_trace_leaves_the_model_as_it_was(name):
    zoo = MODELS[name]
    torch.manual_seed(0)
    try:
        model, batch = zoo.build().train(), zoo.batch()
        plain = copy.deepcopy(model)
        expected = _step(zoo, plain, batch)
    except Exception as error:  # as in test_zoo.py, which says so
        pytest.skip(f"plain PyTorch does not train it: {type(error).__name__}")
    parts = [module for module in model.modules() if not isinstance(module, nn.ModuleList)]
    for point in random.Random(name).sample(parts, min(NUM_POINTS, len(parts))):
        handle = point.register_forward_hook(_stop)
        try:
            tr.explain(lambda: zoo.loss_of(model, batch), policy="full")
        except Exception as error:  # that of the hook, or what a trace cannot do at all
            assert not isinstance(error, AssertionError), error
        finally:
            handle.remove()
    gc.collect()
    assert find_fake_tensors(model) == []
    assert find_fake_tensors(batch) == []
    assert differences(_step(zoo, model, batch), expected) == []
