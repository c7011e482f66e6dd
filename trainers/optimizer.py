"""AdamW, and its state under global parameter names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: AdamW's tensors that are placed as their parameter is
MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(
    module: nn.Module, *, weight_decay: float, betas: tuple[float, float], eps: float
) -> torch.optim.AdamW:
    """AdamW over ``module``, without decay on biases and norms: parameters of one dimension (paper, section 4.2)."""
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def moments(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, tuple[Tensor, nn.Parameter]]:
    """``exp_avg.NAME`` and ``exp_avg_sq.NAME`` of every parameter that was stepped, each with its parameter."""
    return {
        f"{kind}.{name}": (optimizer.state[parameter][kind], parameter)
        for kind in MOMENTS
        for name, parameter in module.named_parameters()
        if kind in optimizer.state[parameter]
    }


def prepare_moments(optimizer: torch.optim.Optimizer, module: nn.Module, steps: int) -> None:
    """Give every parameter AdamW's state, of ``steps`` steps, for a checkpoint to fill."""
    for parameter in module.parameters():
        state = optimizer.state[parameter]
        state["step"] = torch.tensor(float(steps), dtype=torch.float32)
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(parameter)
