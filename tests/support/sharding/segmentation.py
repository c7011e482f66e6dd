"""Networks from a field to a field, written in torch as their authors do; `modules` lists them."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DoubleConv(nn.Module):
    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(ins, outs, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outs, outs, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class Up(nn.Module):
    """The way up of a widely copied U-Net: the smaller field is padded to the connection's size."""

    def __init__(self, ins: int, outs: int, bilinear: bool) -> None:
        super().__init__()
        if bilinear:
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = DoubleConv(ins, outs)
        else:
            self.up = nn.ConvTranspose2d(ins, ins // 2, kernel_size=2, stride=2)
            self.conv = DoubleConv(ins, outs)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        x1 = self.up(x1)
        diff_y = x2.size()[2] - x1.size()[2]
        diff_x = x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [diff_x // 2, diff_x - diff_x // 2, diff_y // 2, diff_y - diff_y // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class PaddedUNet(nn.Module):
    def __init__(self, bilinear: bool) -> None:
        super().__init__()
        factor = 2 if bilinear else 1
        self.inc = DoubleConv(2, 4)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(4, 8))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 16 // factor))
        self.up1 = Up(16, 8 // factor, bilinear)
        self.up2 = Up(8, 4, bilinear)
        self.outc = nn.Conv2d(4, 1, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        return self.outc(self.up2(self.up1(x3, x2), x1))


class SharedPoolUNet(nn.Module):
    """One pool for all levels, interpolation to the connection's size where it differs, GroupNorm and SiLU."""

    def __init__(self) -> None:
        super().__init__()
        widths = [2, 4, 8, 8]
        self.encoder = nn.ModuleList(self.block(a, b) for a, b in itertools.pairwise(widths))
        self.decoder = nn.ModuleList([self.block(16, 4), self.block(8, 4)])
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
        self.output = nn.Conv2d(4, 2, 1)

    @staticmethod
    def block(ins: int, outs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(ins, outs, 3, padding="same"), nn.GroupNorm(2, outs), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        connections = []
        for number, stage in enumerate(self.encoder):
            x = stage(x)
            if number < len(self.encoder) - 1:
                connections.append(x)
                x = self.pool(x)
        for stage, connection in zip(self.decoder, connections[::-1], strict=True):
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            if x.shape != connection.shape and x.shape[-2:] != connection.shape[-2:]:
                x = F.interpolate(x, size=connection.shape[-2:], mode="nearest")
            x = stage(torch.cat((x, connection), 1))
        return self.output(x)


class AttentionGate(nn.Module):
    """Oktay et al. 2018."""

    def __init__(self, gate: int, skip: int, inner: int) -> None:
        super().__init__()
        self.W_g = nn.Sequential(nn.Conv2d(gate, inner, 1), nn.BatchNorm2d(inner))
        self.W_x = nn.Sequential(nn.Conv2d(skip, inner, 1), nn.BatchNorm2d(inner))
        self.psi = nn.Sequential(nn.Conv2d(inner, 1, 1), nn.BatchNorm2d(1), nn.Sigmoid())
        self.relu = nn.ReLU(inplace=True)

    def forward(self, g: Tensor, x: Tensor) -> Tensor:
        return x * self.psi(self.relu(self.W_g(g) + self.W_x(x)))


class AttentionUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc1, self.enc2, self.enc3 = DoubleConv(2, 4), DoubleConv(4, 8), DoubleConv(8, 8)
        self.up2, self.up1 = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1)
        self.gate2, self.gate1 = AttentionGate(8, 8, 4), AttentionGate(4, 4, 2)
        self.dec2, self.dec1 = DoubleConv(16, 8), DoubleConv(8, 4)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        e1 = self.enc1(x)
        e2 = self.enc2(F.max_pool2d(e1, 2))
        g = self.up2(self.enc3(F.max_pool2d(e2, 2)))
        d2 = self.dec2(torch.cat([self.gate2(g, e2), g], 1))
        g = self.up1(d2)
        return torch.sigmoid(self.head(self.dec1(torch.cat([self.gate1(g, e1), g], dim=1))))


class ResidualUNet3d(nn.Module):
    """A U-Net with residuals in three dimensions, strided convolutions, instance norm and PReLU."""

    class Unit(nn.Module):
        def __init__(self, ins: int, outs: int, stride: int = 1) -> None:
            super().__init__()
            self.conv1 = nn.Conv3d(ins, outs, 3, stride=stride, padding=1)
            self.norm1, self.act1 = nn.InstanceNorm3d(outs, affine=True), nn.PReLU(outs)
            self.conv2 = nn.Conv3d(outs, outs, 3, padding=1)
            self.norm2, self.act2 = nn.InstanceNorm3d(outs, affine=True), nn.PReLU()
            same = stride == 1 and ins == outs
            self.skip = nn.Identity() if same else nn.Conv3d(ins, outs, 1, stride=stride)

        def forward(self, x: Tensor) -> Tensor:
            y = self.act1(self.norm1(self.conv1(x)))
            return self.act2(self.norm2(self.conv2(y)) + self.skip(x))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.mid = self.Unit(1, 2), self.Unit(2, 4, 2), self.Unit(4, 4)
        self.up = nn.ConvTranspose3d(4, 2, 3, stride=2, padding=1, output_padding=1)
        self.last = nn.Conv3d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(torch.cat((x, self.up(self.mid(self.down(x)))), dim=1))


class ASPP(nn.Module):
    """DeepLabV3's head: dilated convolutions beside an image pooling that is spread over the field again."""

    class Pooling(nn.Sequential):
        def __init__(self, ins: int, outs: int) -> None:
            super().__init__(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(ins, outs, 1, bias=False), nn.BatchNorm2d(outs), nn.ReLU()
            )

        def forward(self, x: Tensor) -> Tensor:
            size = x.shape[-2:]
            for module in self:
                x = module(x)
            return F.interpolate(x, size=size, mode="bilinear", align_corners=False)

    def __init__(self) -> None:
        super().__init__()
        branches = [nn.Sequential(nn.Conv2d(4, 3, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU())]
        for rate in (2, 4):
            conv = nn.Conv2d(4, 3, 3, padding=rate, dilation=rate, bias=False)
            branches.append(nn.Sequential(conv, nn.BatchNorm2d(3), nn.ReLU()))
        branches.append(self.Pooling(4, 3))
        self.convs = nn.ModuleList(branches)
        self.project = nn.Sequential(nn.Conv2d(12, 3, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.cat([conv(x) for conv in self.convs], dim=1))


class ConvAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.ELU(),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(4, 1, 3, stride=2, padding=1, output_padding=1),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class DenseAutoencoder(nn.Module):
    """A code of the whole field by a linear layer: it needs all points of the field at once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.to_code, self.from_code = (
            nn.Conv2d(1, 2, 3, padding=1),
            nn.Linear(2 * 16 * 12, 5),
            nn.Linear(5, 192),
        )

    def forward(self, x: Tensor) -> Tensor:
        code = self.to_code(torch.flatten(F.relu(self.conv(x)), 1))
        return self.from_code(code).view(-1, 1, 16, 12)


class SuperResolution(nn.Module):
    """ESPCN's and EDSR's: residual blocks, a scaled residual and PixelShuffle."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.ReLU(True), nn.Conv2d(width, width, 3, padding=1)
            )

        def forward(self, x: Tensor) -> Tensor:
            residual = self.body(x).mul(0.1)
            residual += x
            return residual

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.3]).view(1, 3, 1, 1))
        self.head = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.Sequential(self.Block(4), self.Block(4))
        self.tail = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(4, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x - self.mean)
        return self.tail(self.body(x) + x) + self.mean


class StyleGenerator(nn.Module):
    """CycleGAN's generator: reflection padding as a layer of its own, instance norm, residual blocks."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            conv = [nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width)]
            again = [nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width)]
            self.conv_block = nn.Sequential(*conv, nn.ReLU(True), nn.Dropout(0.5), *again)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv_block(x)

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            *[nn.ReflectionPad2d(3), nn.Conv2d(2, 4, 7), nn.InstanceNorm2d(4), nn.ReLU(True)],
            *[nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.InstanceNorm2d(8), nn.ReLU(True)],
            self.Block(8),
            *[nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1), nn.InstanceNorm2d(4), nn.ReLU(True)],
            *[nn.ReflectionPad2d(3), nn.Conv2d(4, 1, 7), nn.Tanh()],
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)
