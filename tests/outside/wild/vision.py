"""Pictures and films: classification, segmentation, two towers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

__all__ = ["MODELS"]


def timm(name: str, **fields: object) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=10, **fields)


def torchvision(name: str, **fields: object) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None, **fields)


def torchvision_vit(**fields: object) -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(num_classes=10, **fields)


def vit_pytorch(module: str, name: str, **fields: object) -> nn.Module:
    import importlib

    return getattr(importlib.import_module(module), name)(**fields)


_PLAIN = {"num_classes": 10, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128}


def open_clip(vision: dict[str, object]) -> nn.Module:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    text = CLIPTextCfg(context_length=16, vocab_size=120, width=64, heads=4, layers=2)
    return CLIP(32, CLIPVisionCfg(**vision), text)


def coca() -> nn.Module:
    from open_clip.coca_model import CoCa, MultimodalCfg
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    text = CLIPTextCfg(
        context_length=16, vocab_size=120, width=64, heads=4, layers=2, embed_cls=True, output_tokens=True
    )
    vision = CLIPVisionCfg(
        layers=2, width=64, head_width=16, patch_size=8, image_size=32, attentional_pool=True, output_tokens=True
    )
    both = MultimodalCfg(context_length=16, vocab_size=120, width=64, heads=4, layers=2, dim_head=16, n_queries=8)
    return CoCa(64, both, text, vision)


def monai(name: str, **fields: object) -> nn.Module:
    from monai.networks import nets

    return getattr(nets, name)(**fields)


def smp(name: str) -> nn.Module:
    import segmentation_models_pytorch

    return getattr(segmentation_models_pytorch, name)("resnet18", encoder_weights=None, classes=3)


def segment_anything() -> nn.Module:
    from segment_anything.modeling import ImageEncoderViT

    return ImageEncoderViT(
        img_size=64, patch_size=8, embed_dim=32, depth=2, num_heads=4, out_chans=16, use_rel_pos=True, window_size=3,
        global_attn_indexes=(1,),
    )  # fmt: skip


def efficientnet() -> nn.Module:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0", num_classes=10)


def mlp_mixer() -> nn.Module:
    from mlp_mixer_pytorch import MLPMixer

    return MLPMixer(image_size=32, channels=3, patch_size=8, dim=64, depth=2, num_classes=10)


def facenet() -> nn.Module:
    from facenet_pytorch import InceptionResnetV1

    return InceptionResnetV1(pretrained=None, classify=True, num_classes=10)


def x_clip() -> nn.Module:
    from x_clip import CLIP

    return CLIP(
        dim_text=64, dim_image=64, dim_latent=32, num_text_tokens=100, text_enc_depth=2, text_seq_len=16, text_heads=4,
        text_dim_head=16, visual_enc_depth=2, visual_heads=4, visual_dim_head=16, visual_image_size=32,
        visual_patch_size=8,
    )  # fmt: skip


def perceiver() -> nn.Module:
    from perceiver_pytorch import Perceiver

    return Perceiver(
        num_freq_bands=4, depth=2, max_freq=10.0, input_channels=3, input_axis=2, num_latents=8, latent_dim=32,
        latent_heads=4, latent_dim_head=8, cross_dim_head=8, num_classes=10,
    )  # fmt: skip


_STAGES = {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4, "img_size": 64}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm/vit_tiny": partial(timm, "vit_tiny_patch16_224", img_size=64, depth=2),
    "timm/swin": partial(timm, "swin_tiny_patch4_window7_224", **_STAGES),
    "timm/convnext": partial(timm, "convnext_atto", depths=(1, 1, 2, 1), dims=(16, 32, 64, 64)),
    "timm/resnet": partial(timm, "resnet18"),
    "timm/mixer": partial(timm, "mixer_s32_224", img_size=64),
    "timm/efficientnet": partial(timm, "efficientnet_b0"),
    "timm/beit": partial(timm, "beit_base_patch16_224", img_size=64, depth=2, embed_dim=64, num_heads=4),
    "timm/maxvit": partial(timm, "maxvit_rmlp_pico_rw_256", img_size=64),
    "timm/eva": partial(timm, "eva02_tiny_patch14_224", img_size=56, depth=2),
    "torchvision/vit": partial(
        torchvision_vit, image_size=32, patch_size=8, num_layers=2, hidden_dim=64, num_heads=4, mlp_dim=128
    ),
    "torchvision/swin": partial(torchvision, "swin_t", num_classes=10),
    "torchvision/resnet": partial(torchvision, "resnet18"),
    "torchvision/mobilenet": partial(torchvision, "mobilenet_v3_small"),
    "torchvision/segmentation": partial(torchvision, "lraspp_mobilenet_v3_large", weights_backbone=None),
    "torchvision/video": partial(torchvision, "mc3_18"),
    "torchvision/raft": partial(torchvision, "raft_small"),
    "vit-pytorch/ViT": partial(vit_pytorch, "vit_pytorch", "ViT", image_size=32, patch_size=8, **_PLAIN),
    "vit-pytorch/SimpleViT": partial(
        vit_pytorch, "vit_pytorch.simple_vit", "SimpleViT", image_size=32, patch_size=8, **_PLAIN
    ),
    "vit-pytorch/ViT3d": partial(
        vit_pytorch, "vit_pytorch.vit_3d", "ViT", image_size=32, image_patch_size=8, frames=8, frame_patch_size=2,
        **_PLAIN,
    ),
    "vit-pytorch/ViT1d": partial(vit_pytorch, "vit_pytorch.vit_1d", "ViT", seq_len=64, patch_size=8, **_PLAIN),
    "vit-pytorch/CaiT": partial(
        vit_pytorch, "vit_pytorch.cait", "CaiT", image_size=32, patch_size=8, cls_depth=1, **_PLAIN
    ),
    "vit-pytorch/NaViT": partial(vit_pytorch, "vit_pytorch.na_vit", "NaViT", image_size=32, patch_size=8, **_PLAIN),
    "open_clip/CLIP": partial(
        open_clip, {"layers": 2, "width": 64, "head_width": 16, "patch_size": 8, "image_size": 32}
    ),
    "open_clip/CoCa": coca,
    "monai/UNet": partial(
        monai, "UNet", spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2)
    ),
    "monai/SwinUNETR": partial(monai, "SwinUNETR", in_channels=1, out_channels=2, feature_size=12, spatial_dims=2),
    "monai/UNETR": partial(
        monai, "UNETR", in_channels=1, out_channels=2, img_size=32, feature_size=8, hidden_size=48, mlp_dim=64,
        num_heads=4, spatial_dims=2,
    ),
    "monai/ViT": partial(
        monai, "ViT", in_channels=1, img_size=(16, 16, 16), patch_size=(8, 8, 8), hidden_size=48, mlp_dim=64,
        num_layers=2, num_heads=4, classification=True,
    ),
    "monai/SegResNet": partial(monai, "SegResNet", spatial_dims=2, init_filters=8, in_channels=2),
    "monai/DenseNet": partial(monai, "DenseNet121", spatial_dims=2, in_channels=1, out_channels=3),
    "segmentation_models_pytorch/Unet": partial(smp, "Unet"),
    "segmentation_models_pytorch/FPN": partial(smp, "FPN"),
    "segmentation_models_pytorch/DeepLabV3Plus": partial(smp, "DeepLabV3Plus"),
    "segment_anything/encoder": segment_anything,
    "efficientnet_pytorch/b0": efficientnet,
    "mlp_mixer_pytorch/Mixer": mlp_mixer,
    "facenet_pytorch/InceptionResnet": facenet,
    "x-clip/CLIP": x_clip,
    "perceiver-pytorch/Perceiver": perceiver,
}  # fmt: skip
