"""One-dimensional networks, operators, attention and programs; `modules` lists them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WaveNet(nn.Module):
    """Dilated convolutions with gates, residuals and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv1d(1, 4, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(4, 8, 3, padding=2**n, dilation=2**n) for n in range(3))
        self.residual = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(3))
        self.skip = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(3))
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        skips = 0
        for dilated, residual, skip in zip(self.dilated, self.residual, self.skip, strict=True):
            values, gate = dilated(x).chunk(2, dim=1)
            y = torch.tanh(values) * torch.sigmoid(gate)
            x = x + residual(y)
            skips = skips + skip(y)
        return self.out(skips)


class CausalTCN(nn.Module):
    """Bai et al. 2018: each convolution pads both ends, and a Chomp cuts what is too much at the end."""

    class Chomp1d(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.chomp_size = size

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :, : -self.chomp_size].contiguous()

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for level, ins in enumerate((2, 4, 4)):
            reach = 2 * 2**level
            layers += [nn.Conv1d(ins, 4, 3, padding=reach, dilation=2**level), self.Chomp1d(reach), nn.ReLU()]
        self.network = nn.Sequential(*layers)
        self.downsample = nn.Conv1d(2, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.network(x) + self.downsample(x))


class FNOLayer(nn.Module):
    """A Fourier layer in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, 2, 4, 4, dtype=torch.cdouble) * 0.1)
        self.w = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x_ft = torch.fft.rfft2(x)
        out_ft = torch.zeros_like(x_ft)
        out_ft[:, :, :4, :4] = torch.einsum("bixy,ioxy->boxy", x_ft[:, :, :4, :4], self.weights)
        return F.gelu(torch.fft.irfft2(out_ft, s=(x.size(-2), x.size(-1))) + self.w(x))


class ViT(nn.Module):
    """Patches as tokens, and torch's attention of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(1, 8, kernel_size=4, stride=4)
        self.ln = nn.LayerNorm(8)
        self.self_attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        x = self.conv_proj(x).reshape(n, 8, -1).permute(0, 2, 1)
        y = self.ln(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return self.head(x.mean(dim=1))


class NonLocal(nn.Module):
    """Wang et al. 2018: softmax over all pairs of points."""

    def __init__(self) -> None:
        super().__init__()
        self.theta, self.phi, self.g = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        theta = self.theta(x).view(b, -1, h * w)
        phi = self.phi(x).view(b, -1, h * w)
        attention = torch.softmax(theta.transpose(1, 2) @ phi, dim=-1)
        return x + (self.g(x).view(b, c, h * w) @ attention.transpose(1, 2)).view(b, c, h, w)


class EarlyExit(nn.Module):
    """It looks at the values to decide what to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.abs().mean() < 0.1:
            return x
        return self.second(x)


class CoordConv(nn.Module):
    """Liu et al. 2018: the coordinates as further channels, from -1 to 1 over the whole field."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        ys = torch.linspace(-1, 1, h, dtype=torch.float64).view(1, 1, h, 1).expand(b, 1, h, w)
        xs = torch.linspace(-1, 1, w, dtype=torch.float64).view(1, 1, 1, w).expand(b, 1, h, w)
        return self.conv(torch.cat([x, ys, xs], dim=1))


class HeatSteps(nn.Module):
    """A learned correction of an explicit scheme: circular rolls make the Laplacian."""

    def __init__(self) -> None:
        super().__init__()
        self.nu = nn.Parameter(torch.tensor(0.1))
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"), nn.Tanh(), nn.Conv2d(4, 1, 1, bias=False)
        )

    def forward(self, u: Tensor) -> Tensor:
        for _ in range(2):
            laplacian = sum(torch.roll(u, shift, dim) for shift in (1, -1) for dim in (2, 3)) - 4 * u
            u = u + self.nu.abs() * laplacian + self.net(u)
        return u


class PositionedMixer(nn.Module):
    """A parameter with a value for each point, a norm over the whole sample, and a mean of the field removed."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(1, 2, 14, 10) * 0.1)
        self.norm = nn.LayerNorm([2, 14, 10])
        self.conv = nn.Conv2d(2, 2, 3, padding=1, padding_mode="replicate")

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.norm(x + self.pos_embed))
        return x - x.mean([2, 3], keepdim=True)
