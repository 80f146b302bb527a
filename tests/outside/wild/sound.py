"""Speech, music and other sounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

__all__ = ["MODELS"]


def torchaudio(name: str, **fields: object) -> nn.Module:
    from torchaudio import models

    return getattr(models, name)(**fields)


def wav2vec2() -> nn.Module:
    from torchaudio.models import wav2vec2_model

    return wav2vec2_model(
        extractor_mode="group_norm", extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2), (16, 3, 2)],
        extractor_conv_bias=False, encoder_embed_dim=32, encoder_projection_dropout=0.0, encoder_pos_conv_kernel=16,
        encoder_pos_conv_groups=4, encoder_num_layers=2, encoder_num_heads=4, encoder_attention_dropout=0.0,
        encoder_ff_interm_features=64, encoder_ff_interm_dropout=0.0, encoder_dropout=0.0,
        encoder_layer_norm_first=False, encoder_layer_drop=0.0, aux_num_out=12,
    )  # fmt: skip


def whisper() -> nn.Module:
    from whisper.model import ModelDimensions, Whisper

    return Whisper(ModelDimensions(20, 32, 48, 4, 2, 100, 24, 48, 4, 2))


def ecapa() -> nn.Module:
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    return ECAPA_TDNN(
        40, channels=[32, 32, 32, 32, 96], lin_neurons=24, attention_channels=16, se_channels=16, res2net_scale=4
    )


def crdnn() -> nn.Module:
    from speechbrain.lobes.models.CRDNN import CRDNN

    return CRDNN(input_size=40, cnn_channels=(8, 16), rnn_neurons=32, rnn_layers=1, dnn_neurons=32)


def demucs() -> nn.Module:
    from demucs.demucs import Demucs

    return Demucs(["a", "b"], channels=8, depth=3, dconv_attn=2, dconv_lstm=2)


def hdemucs() -> nn.Module:
    from demucs.hdemucs import HDemucs

    return HDemucs(["a", "b"], channels=8, depth=4, nfft=512)


def encodec() -> nn.Module:
    from encodec.modules import SEANetEncoder

    return SEANetEncoder(n_filters=8, dimension=16, ratios=[4, 2])


def vocos() -> nn.Module:
    from vocos.models import VocosBackbone

    return VocosBackbone(input_channels=20, dim=32, intermediate_dim=64, num_layers=2)


def conformer() -> nn.Module:
    from conformer import Conformer

    return Conformer(dim=32, depth=2, dim_head=8, heads=4, conv_kernel_size=7)


def roformer() -> nn.Module:
    from bs_roformer import BSRoformer

    return BSRoformer(
        dim=16, depth=1, time_transformer_depth=1, freq_transformer_depth=1, heads=2, dim_head=8, stft_n_fft=256,
        stft_hop_length=64, stft_win_length=256, freqs_per_bands=(4, 5, 24, 32, 64),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchaudio/Conformer": partial(
        torchaudio, "Conformer", input_dim=32, num_heads=4, ffn_dim=64, num_layers=2, depthwise_conv_kernel_size=7
    ),
    "torchaudio/Emformer": partial(
        torchaudio, "Emformer", input_dim=32, num_heads=4, ffn_dim=64, num_layers=2, segment_length=4,
        right_context_length=1,
    ),
    "torchaudio/ConvTasNet": partial(
        torchaudio, "ConvTasNet", enc_num_feats=32, msk_num_feats=16, msk_num_hidden_feats=32, msk_num_layers=2,
        msk_num_stacks=1,
    ),
    "torchaudio/wav2vec2": wav2vec2,
    "torchaudio/DeepSpeech": partial(torchaudio, "DeepSpeech", n_feature=20, n_hidden=32, n_class=12),
    "openai-whisper/Whisper": whisper,
    "speechbrain/ECAPA": ecapa,
    "speechbrain/CRDNN": crdnn,
    "demucs/Demucs": demucs,
    "demucs/HDemucs": hdemucs,
    "encodec/SEANet": encodec,
    "vocos/backbone": vocos,
    "conformer/Conformer": conformer,
    "BS-RoFormer/BSRoformer": roformer,
}  # fmt: skip
