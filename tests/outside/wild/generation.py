"""What makes pictures, films and sounds: diffusion transformers, U-Nets, autoencoders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

__all__ = ["MODELS"]


def diffusers(module: str, name: str, **fields: object) -> nn.Module:
    import importlib

    return getattr(importlib.import_module(f"diffusers.models.{module}"), name)(**fields)


def denoising() -> nn.Module:
    from denoising_diffusion_pytorch import Unet

    return Unet(dim=16, dim_mults=(1, 2), attn_heads=2, attn_dim_head=8)


def denoising_1d() -> nn.Module:
    from denoising_diffusion_pytorch import Unet1D

    return Unet1D(dim=16, dim_mults=(1, 2), channels=4)


def monai(name: str, **fields: object) -> nn.Module:
    from monai.networks import nets

    return getattr(nets, name)(**fields)


def vq() -> nn.Module:
    from vector_quantize_pytorch import VectorQuantize

    return VectorQuantize(dim=32, codebook_size=64, codebook_dim=16, heads=2)


_DOWN, _UP = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
_CHANNELS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "diffusers/UNet2D": partial(
        diffusers, "unets.unet_2d", "UNet2DModel", sample_size=16, down_block_types=_DOWN, up_block_types=_UP,
        attention_head_dim=8, **_CHANNELS,
    ),
    "diffusers/UNet2DCondition": partial(
        diffusers, "unets.unet_2d_condition", "UNet2DConditionModel", sample_size=16, cross_attention_dim=24,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8, **_CHANNELS,
    ),
    "diffusers/DiT": partial(
        diffusers, "transformers.dit_transformer_2d", "DiTTransformer2DModel", sample_size=16, num_embeds_ada_norm=10,
        **_HEADS,
    ),
    "diffusers/PixArt": partial(
        diffusers, "transformers.pixart_transformer_2d", "PixArtTransformer2DModel", sample_size=16,
        caption_channels=24, cross_attention_dim=32, **_HEADS,
    ),
    "diffusers/SD3": partial(
        diffusers, "transformers.transformer_sd3", "SD3Transformer2DModel", sample_size=16, joint_attention_dim=24,
        caption_projection_dim=32, pooled_projection_dim=20, pos_embed_max_size=16, **_HEADS,
    ),
    "diffusers/Flux": partial(
        diffusers, "transformers.transformer_flux", "FluxTransformer2DModel", in_channels=8, num_single_layers=2,
        joint_attention_dim=24, pooled_projection_dim=20, axes_dims_rope=(4, 6, 6), **_HEADS,
    ),
    "diffusers/AutoencoderKL": partial(
        diffusers, "autoencoders.autoencoder_kl", "AutoencoderKL", down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, sample_size=32, **_CHANNELS,
    ),
    "diffusers/VQModel": partial(
        diffusers, "autoencoders.vq_model", "VQModel", down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, num_vq_embeddings=32, **_CHANNELS,
    ),
    "diffusers/Latte": partial(
        diffusers, "transformers.latte_transformer_3d", "LatteTransformer3DModel", sample_size=8, in_channels=4,
        out_channels=8, patch_size=2, caption_channels=24, cross_attention_dim=32, video_length=4,
        norm_type="ada_norm_single", num_embeds_ada_norm=1000, **_HEADS,
    ),
    "diffusers/Prior": partial(
        diffusers, "transformers.prior_transformer", "PriorTransformer", embedding_dim=24, num_embeddings=7,
        additional_embeddings=4, **_HEADS,
    ),
    "denoising-diffusion-pytorch/Unet": denoising,
    "denoising-diffusion-pytorch/Unet1D": denoising_1d,
    "monai/DiffusionModelUNet": partial(
        monai, "DiffusionModelUNet", spatial_dims=2, in_channels=1, out_channels=1, channels=(16, 32),
        attention_levels=(False, True), num_res_blocks=1, norm_num_groups=8, num_head_channels=8,
        with_conditioning=True, cross_attention_dim=12,
    ),
    "monai/AutoencoderKL": partial(
        monai, "AutoencoderKL", spatial_dims=2, channels=(16, 32), attention_levels=(False, True), num_res_blocks=1,
        norm_num_groups=8,
    ),
    "monai/VQVAE": partial(
        monai, "VQVAE", spatial_dims=2, in_channels=1, out_channels=1, channels=(16, 32), num_res_channels=(16, 32),
        num_res_layers=1, downsample_parameters=((2, 4, 1, 1),) * 2, upsample_parameters=((2, 4, 1, 1, 0),) * 2,
        num_embeddings=32, embedding_dim=8,
    ),
    "vector-quantize-pytorch/VectorQuantize": vq,
}  # fmt: skip
