"""Models of images: timm, torchvision, segmentation_models_pytorch, vit-pytorch and open_clip."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.zoo_model import ZooModel

TIMM: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "cait_xxs24_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2},
    "coat_lite_tiny": {"img_size": 64},
    "convmixer_768_32": {},
    "convnext_atto": {"drop_path_rate": 0.2},
    "crossvit_9_240": {},
    "davit_tiny": {},
    "deit_tiny_patch16_224": {"img_size": 32, "depth": 2, "drop_path_rate": 0.2},
    "densenet121": {"block_config": (2, 2), "growth_rate": 8},
    "dpn48b": {},
    "edgenext_xx_small": {},
    "efficientnet_b0": {"drop_rate": 0.2, "drop_path_rate": 0.2},
    "efficientvit_b0": {},
    "fastvit_t8": {},
    "ghostnetv2_100": {},
    "hrnet_w18_small": {},
    "inception_v4": {},
    "levit_128s": {"img_size": 64},
    "coatnet_pico_rw_224": {"img_size": 64},
    "mixer_s16_224": {},
    "mobilenetv3_small_100": {},
    "nest_tiny": {"img_size": 64},
    "nfnet_l0": {"drop_path_rate": 0.2},
    "poolformer_s12": {"drop_path_rate": 0.2},
    "pvt_v2_b0": {},
    "regnety_002": {},
    "repvgg_a0": {},
    "resnet18": {"drop_path_rate": 0.2},
    "resnest14d": {},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 4, "embed_dim": 16},
    "tnt_s_legacy_patch16_224": {"img_size": 32, "depth": 2},
    "twins_svt_small": {"img_size": 64},
    "volo_d1_224": {"img_size": 64},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 2},
}
TORCHVISION = (
    "alexnet",
    "densenet121",
    "efficientnet_v2_s",
    "googlenet",
    "maxvit_t",
    "mobilenet_v3_large",
    "regnet_x_400mf",
    "resnet50",
    "shufflenet_v2_x1_0",
    "squeezenet1_1",
    "swin_v2_t",
    "vgg11_bn",
    "vit_b_16",
    "wide_resnet50_2",
)
_SIDE: dict[str, int] = {"maxvit_t": 224, "googlenet": 96, "alexnet": 96}
_SIDE |= {"crossvit_9_240": 240, "inception_v4": 128, "mixer_s16_224": 224, "davit_tiny": 224}
"""Pixels a side, where 64 are not enough."""


def find_vision_models() -> dict[str, ZooModel]:
    found = {f"timm, {name}": _timm(name, settings) for name, settings in TIMM.items()}
    found |= {f"torchvision, {name}": _torchvision(name) for name in TORCHVISION}
    found |= {f"torchvision, {name}": _torchvision_segmentation(name) for name in _SEGMENTATION}
    for name in ("Unet", "FPN", "DeepLabV3Plus", "MAnet"):
        found[f"segmentation_models_pytorch, {name}"] = _segmentation(name)
    found["vit_pytorch, ViT"] = _vit_pytorch("vit", "ViT", mlp_dim=64, heads=2, depth=2)
    found["vit_pytorch, CCT"] = ZooModel("vit_pytorch", _build_cct, _images(32))
    found["open_clip, ViT"] = ZooModel("open_clip", _build_open_clip, _images_and_text)
    return found


_SEGMENTATION = ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "fcn_resnet50")


def _images(side: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(2, 3, side, side),)


def _timm(name: str, settings: dict[str, Any]) -> ZooModel:
    def build() -> nn.Module:
        return importlib.import_module("timm").create_model(name, num_classes=10, **settings)

    return ZooModel("timm", build, _images(settings.get("img_size") or _SIDE.get(name, 64)))


def _torchvision(name: str) -> ZooModel:
    settings = {"image_size": 64} if name == "vit_b_16" else {}
    if name == "googlenet":
        settings = {"init_weights": False, "aux_logits": False}

    def build() -> nn.Module:
        models = importlib.import_module("torchvision.models")
        return models.get_model(name, num_classes=10, **settings)

    return ZooModel("torchvision", build, _images(_SIDE.get(name, 64)))


def _torchvision_segmentation(name: str) -> ZooModel:
    def build() -> nn.Module:
        models = importlib.import_module("torchvision.models")
        return models.get_model(name, weights=None, weights_backbone=None, num_classes=4)

    return ZooModel("torchvision", build, _images(64))


def _segmentation(name: str) -> ZooModel:
    def build() -> nn.Module:
        library = importlib.import_module("segmentation_models_pytorch")
        return getattr(library, name)("resnet18", encoder_weights=None, classes=4)

    return ZooModel("segmentation_models_pytorch", build, _images(64))


def _vit_pytorch(module: str, name: str, **settings: Any) -> ZooModel:
    def build() -> nn.Module:
        kind = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)
        sizes = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32}
        return kind(**sizes, dropout=0.1, emb_dropout=0.1, **settings)

    return ZooModel("vit_pytorch", build, _images(32))


def _build_cct() -> nn.Module:
    kind = importlib.import_module("vit_pytorch.cct").CCT
    return kind(img_size=32, embedding_dim=32, num_layers=2, num_heads=2, num_classes=10)


def _build_open_clip() -> nn.Module:
    kind = importlib.import_module("open_clip.model").CLIP
    vision = {"layers": 2, "width": 32, "patch_size": 8, "image_size": 32, "head_width": 16}
    text = {"context_length": 16, "vocab_size": 64, "width": 32, "heads": 2, "layers": 2}
    return kind(embed_dim=16, vision_cfg=vision, text_cfg=text)


def _images_and_text() -> tuple[Tensor, ...]:
    return torch.randn(4, 3, 32, 32), torch.randint(1, 60, (4, 16))
