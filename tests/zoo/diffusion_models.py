"""Denoisers of diffusers, made tiny: U-Nets, transformers, and the coders of images."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.zoo_model import Arguments, ZooModel

_UNET = {
    "sample_size": 16,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
_ATTENTION = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}


def find_diffusion_models() -> dict[str, ZooModel]:
    return {f"diffusers, {name}": _model(name, *what) for name, what in _MODELS.items()}


def _model(name: str, settings: dict[str, Any], batch: Callable[[], Arguments]) -> ZooModel:
    def build() -> nn.Module:
        return getattr(importlib.import_module("diffusers"), name)(**settings)

    return ZooModel("diffusers", build, batch, loss=_loss)


def _loss(output: Any) -> Tensor:
    return (output.sample if hasattr(output, "sample") else output[0]).square().mean()


def _image() -> Arguments:
    return torch.randn(2, 4, 16, 16), torch.tensor([3, 500])


def _image_and_text() -> Arguments:
    return torch.randn(2, 4, 16, 16), torch.tensor([3, 500]), torch.randn(2, 6, 32)


def _image_and_class() -> Arguments:
    return {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 500]),
        "class_labels": torch.tensor([1, 2]),
    }


def _sd3() -> Arguments:
    return {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 64),
        "timestep": torch.tensor([3, 500]),
    }


def _flux() -> Arguments:
    return {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.1, 0.7]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
        "guidance": None,
    }


def _pixart() -> Arguments:
    return {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 6, 32),
        "timestep": torch.tensor([3, 500]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


_MODELS: dict[str, tuple[dict[str, Any], Callable[[], Arguments]]] = {
    "UNet2DModel": (
        {
            **_UNET,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        _image,
    ),
    "UNet2DConditionModel": (
        {
            **_UNET,
            "cross_attention_dim": 32,
            "attention_head_dim": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        },
        _image_and_text,
    ),
    "DiTTransformer2DModel": (
        {**_ATTENTION, "in_channels": 4, "sample_size": 8, "num_embeds_ada_norm": 8},
        _image_and_class,
    ),
    "PixArtTransformer2DModel": (
        {
            **_ATTENTION,
            "in_channels": 4,
            "sample_size": 8,
            "caption_channels": 32,
            "cross_attention_dim": 32,
        },
        _pixart,
    ),
    "SD3Transformer2DModel": (
        {
            **_ATTENTION,
            "sample_size": 16,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 64,
        },
        _sd3,
    ),
    "FluxTransformer2DModel": (
        {
            **_ATTENTION,
            "num_single_layers": 1,
            "in_channels": 4,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": [4, 4, 8],
        },
        _flux,
    ),
    "AutoencoderKL": (
        {
            "block_out_channels": (8, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "norm_num_groups": 4,
        },
        lambda: (torch.randn(2, 3, 16, 16), True),
    ),
    "VQModel": (
        {
            "block_out_channels": (8, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "norm_num_groups": 4,
        },
        lambda: (torch.randn(2, 3, 16, 16),),
    ),
}
