"""Thirty networks for `tplayers.shard`, chosen before it was written. They are as others write them, and small."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from tests.support.sharding import backbones, others, segmentation


class Listed(NamedTuple):
    """make: the network. channels, shape: of the whole field that goes in."""

    make: Callable[[], nn.Module]
    channels: int
    shape: tuple[int, ...]


MODULES = {
    "U-Net, transposed": Listed(lambda: segmentation.PaddedUNet(bilinear=False), 2, (22, 19)),
    "U-Net, bilinear": Listed(lambda: segmentation.PaddedUNet(bilinear=True), 2, (22, 19)),
    "U-Net, one pool": Listed(segmentation.SharedPoolUNet, 2, (20, 24)),
    "U-Net, attention gates": Listed(segmentation.AttentionUNet, 2, (20, 16)),
    "U-Net, 3 axes": Listed(segmentation.ResidualUNet3d, 1, (8, 10, 6)),
    "ASPP": Listed(segmentation.ASPP, 4, (13, 15)),
    "autoencoder of convolutions": Listed(segmentation.ConvAutoencoder, 1, (20, 16)),
    "autoencoder of linear layers": Listed(segmentation.DenseAutoencoder, 1, (16, 12)),
    "super-resolution": Listed(segmentation.SuperResolution, 3, (9, 11)),
    "CycleGAN's generator": Listed(segmentation.StyleGenerator, 2, (18, 14)),
    "ResNet": Listed(backbones.ResNet, 3, (37, 33)),
    "bottleneck": Listed(backbones.Bottleneck, 4, (13, 11)),
    "CIFAR's ResNet": Listed(backbones.PaddedShortcut, 2, (14, 11)),
    "DenseNet": Listed(backbones.DenseNet, 2, (12, 15)),
    "squeeze and excitation": Listed(lambda: backbones.SqueezeExcite(4), 4, (9, 11)),
    "inverted residual": Listed(backbones.InvertedResidual, 3, (12, 11)),
    "CBAM": Listed(backbones.CBAM, 4, (12, 11)),
    "ConvNeXt": Listed(backbones.ConvNeXt, 2, (18, 22)),
    "ShuffleNet": Listed(backbones.ShuffleUnit, 8, (9, 11)),
    "Inception": Listed(backbones.Inception, 3, (13, 11)),
    "VGG": Listed(backbones.VGG, 1, (12, 14)),
    "WaveNet": Listed(others.WaveNet, 1, (33,)),
    "causal TCN": Listed(others.CausalTCN, 2, (31,)),
    "FNO's layer": Listed(others.FNOLayer, 2, (16, 12)),
    "ViT": Listed(others.ViT, 1, (16, 24)),
    "non-local block": Listed(others.NonLocal, 4, (8, 10)),
    "early exit": Listed(others.EarlyExit, 1, (12, 10)),
    "CoordConv": Listed(others.CoordConv, 2, (12, 10)),
    "heat steps": Listed(others.HeatSteps, 1, (12, 10)),
    "positioned mixer": Listed(others.PositionedMixer, 2, (14, 10)),
}
