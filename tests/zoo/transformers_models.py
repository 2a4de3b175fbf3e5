"""Every architecture of transformers that a tiny configuration can make, for the task it is for.

The library's own tables of models for a task are read, so that a new release brings new models.
`SETTINGS` has what single ones need. What has no tiny configuration is skipped by the tests.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from tests.zoo.tiny_config import IMAGE, make_tiny_config
from tests.zoo.transformers_settings import SETTINGS
from tests.zoo.zoo_model import CannotBeMadeError, ZooModel

MOST_PARAMETERS = 26_000_000
"""Of a model that trains in a second: those of a ResNet-50."""

Batch = Mapping[str, Tensor]


def _text() -> Batch:
    tokens = torch.randint(3, 60, (4, 16))
    mask = torch.ones(4, 16, dtype=torch.long)
    mask[1, 12:] = 0  # padding
    return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}


def _image() -> Batch:
    return {"pixel_values": torch.randn(2, 3, IMAGE, IMAGE), "labels": torch.tensor([0, 1])}


def _sound() -> Batch:
    return {"input_values": torch.randn(2, 2000), "labels": torch.tensor([0, 1])}


_TASKS: dict[str, Callable[[], Batch]] = {
    "CAUSAL_LM": _text,
    "SEQ_TO_SEQ_CAUSAL_LM": _text,
    "MASKED_LM": _text,
    "IMAGE_CLASSIFICATION": _image,
    "AUDIO_CLASSIFICATION": _sound,
}


def find_transformers_models() -> dict[str, ZooModel]:
    """By name of architecture; each for the first of the tasks above that it is for."""
    found: dict[str, ZooModel] = {}
    for name, class_name, batch in _read_tables():
        if name not in found:
            build = functools.partial(_build, name, class_name)
            found[name] = ZooModel("transformers", build, batch, loss=lambda output: output.loss)
    return found


def _read_tables() -> Iterator[tuple[str, str, Callable[[], Batch]]]:
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    for task, batch in _TASKS.items():
        for name, classes in getattr(tables, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            class_name = classes if isinstance(classes, str) else classes[0]
            yield name, class_name, batch


def _build(name: str, class_name: str) -> nn.Module:
    """The model.

    Raises:
        CannotBeMadeError: if it is large for all that: parts of other classes, a fixed table.
    """
    transformers = importlib.import_module("transformers")
    model_class = getattr(transformers, class_name)
    config = make_tiny_config(model_class.config_class, SETTINGS.get(name))
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(config).parameters())
    if size > MOST_PARAMETERS:
        raise CannotBeMadeError(f"{class_name} has {size:,} parameters")
    return model_class(config)
