"""The truth of SpectralConv: one transform of the whole field."""

import torch
from torch import nn


class Whole(nn.Module):
    """The same operator by one FFT over all axes, with a loop over the corners of the spectrum."""

    def __init__(self, weight, modes):
        super().__init__()
        self.weight, self.modes = nn.Parameter(weight), modes

    def forward(self, x):
        space = x.shape[2:]
        dims = tuple(range(2, x.dim()))
        spectrum = torch.fft.rfftn(x, dim=dims)
        matrices = torch.view_as_complex(self.weight)
        result = torch.zeros(x.shape[0], matrices.shape[1], *spectrum.shape[2:], dtype=spectrum.dtype)
        for corner in range(2 ** (len(space) - 1)):
            there, mine = [], []
            for axis, (n, m) in enumerate(zip(space, self.modes, strict=True)):
                negative = axis < len(space) - 1 and corner >> axis & 1
                there.append(slice(n - m, n) if negative else slice(0, m))
                mine.append(slice(m, 2 * m) if negative else slice(0, m))
            there, mine = (..., *there), (..., *mine)
            result[there] = torch.einsum("bi...,io...->bo...", spectrum[there], matrices[mine])
        return torch.fft.irfftn(result, s=space, dim=dims)
