"""A backward that fails."""

import torch


class Fails(torch.autograd.Function):
    """The identity. Its backward raises ArithmeticError."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("on purpose")
