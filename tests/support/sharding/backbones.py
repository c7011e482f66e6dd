"""Blocks and classifiers, written in torch as their authors and torchvision do; `modules` lists them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.BatchNorm2d(outs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False), nn.BatchNorm2d(outs)
        self.downsample = None
        if stride != 1 or ins != outs:
            self.downsample = nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4)), BasicBlock(4, 8, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        x = torch.flatten(x, 1)
        return self.fc(x)


class Bottleneck(nn.Module):
    """ResNeXt's and ResNet-D's: groups, and an average pool before the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *[nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()],
            *[nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2, bias=False), nn.BatchNorm2d(4), nn.ReLU()],
            *[nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8)],
        )
        pool = nn.AvgPool2d(2, stride=2, ceil_mode=True, count_include_pad=False)
        self.shortcut = nn.Sequential(pool, nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self.shortcut(x), inplace=True)


class PaddedShortcut(nn.Module):
    """CIFAR's ResNet: the shortcut takes every second point, and zeros as further channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1), "constant", 0)
        return F.relu(self.conv2(F.relu(self.conv1(x))) + shortcut)


class DenseNet(nn.Module):
    class Layer(nn.Module):
        def __init__(self, ins: int, growth: int) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(ins), nn.Conv2d(ins, growth, 3, padding=1, bias=False)

        def forward(self, features: list[Tensor]) -> Tensor:
            return self.conv(F.relu(self.norm(torch.cat(features, 1))))

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({f"denselayer{n + 1}": self.Layer(2 + 2 * n, 2) for n in range(3)})
        self.transition = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.AvgPool2d(2, 2))
        self.classifier = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.block.values():
            features.append(layer(features))
        out = F.relu(self.transition(torch.cat(features, 1)), inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        return self.classifier(out.view(out.size(0), -1))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(channels, 2), nn.Linear(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.shape
        scale = torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean(dim=(2, 3)))))).view(b, c, 1, 1)
        return x * scale.expand_as(x)


class InvertedResidual(nn.Module):
    """MobileNetV3's: expansion, depthwise convolution, squeeze and excitation, projection."""

    def __init__(self) -> None:
        super().__init__()
        self.use_res_connect = True
        self.conv = nn.Sequential(
            *[nn.Conv2d(3, 6, 1, bias=False), nn.BatchNorm2d(6, eps=0.001, momentum=0.01), nn.Hardswish()],
            *[nn.Conv2d(6, 6, 5, padding=2, groups=6, bias=False), nn.BatchNorm2d(6), SqueezeExcite(6)],
            *[nn.ReLU6(inplace=True), nn.Conv2d(6, 3, 1, bias=False), nn.BatchNorm2d(3)],
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


class CBAM(nn.Module):
    """Channel attention from mean and maximum of the field, then attention of points from those of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Conv2d(4, 2, 1, bias=False), nn.ReLU(), nn.Conv2d(2, 4, 1, bias=False))
        self.avg_pool, self.max_pool = nn.AdaptiveAvgPool2d(1), nn.AdaptiveMaxPool2d(1)
        self.conv = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.sigmoid(self.mlp(self.avg_pool(x)) + self.mlp(self.max_pool(x)))
        mean = torch.mean(x, dim=1, keepdim=True)
        largest, _ = torch.max(x, dim=1, keepdim=True)
        return x * self.conv(torch.cat([mean, largest], dim=1)).sigmoid()


class LayerNorm2d(nn.LayerNorm):
    """torchvision's: the norm of each point over the channels."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """A stem and a block of torchvision's ConvNeXt: channels last within the block, and a scale for each channel."""

    class Permute(nn.Module):
        def __init__(self, dims: list[int]) -> None:
            super().__init__()
            self.dims = dims

        def forward(self, x: Tensor) -> Tensor:
            return torch.permute(x, self.dims)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 2, stride=2), LayerNorm2d(4, eps=1e-6))
        self.block = nn.Sequential(
            *[nn.Conv2d(4, 4, 7, padding=3, groups=4), self.Permute([0, 2, 3, 1]), nn.LayerNorm(4, eps=1e-6)],
            *[nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4), self.Permute([0, 3, 1, 2])],
        )
        self.layer_scale = nn.Parameter(torch.ones(4, 1, 1) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.layer_scale * self.block(x) + x


class ShuffleUnit(nn.Module):
    """ShuffleNetV2's: half of the channels pass, and the channels are shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.branch2 = nn.Sequential(
            *[nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)],
            *[nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)],
        )

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=1)
        x = torch.cat((x1, self.branch2(x2)), dim=1)
        batch, channels, height, width = x.size()
        x = x.view(batch, 2, channels // 2, height, width)
        x = torch.transpose(x, 1, 2).contiguous()
        return x.view(batch, channels, height, width)


class Inception(nn.Module):
    """Branches of different kernels beside a pool of stride 1."""

    def __init__(self) -> None:
        super().__init__()
        self.b1 = nn.Conv2d(3, 2, 1)
        self.b2 = nn.Sequential(nn.Conv2d(3, 2, (1, 7), padding=(0, 3)), nn.Conv2d(2, 2, (7, 1), padding=(3, 0)))
        self.pool_proj = nn.Conv2d(3, 2, 1)
        self.bn = nn.BatchNorm2d(6, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
        return F.relu(self.bn(torch.cat([self.b1(x), self.b2(x), self.pool_proj(pooled)], 1)), inplace=True)


class VGG(nn.Module):
    """torchvision's VGG: pools the features to 7 x 7 points (here 2 x 2), which a linear layer mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2, 2))
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Linear(12, 5), nn.ReLU(True), nn.Dropout(0.0), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))
