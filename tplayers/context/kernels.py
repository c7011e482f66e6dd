"""The fused kernels of torch that give a block's lse: one on the host, three on a CUDA device.

A kernel's backward takes any result and lse, so it takes those of all blocks (Dao 2023, arXiv 2307.08691, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from commengine.torch_private import private

_aten = torch.ops.aten
#: the rows of an lse that the memory-efficient kernel reads together
_ROWS = 32


@dataclass(frozen=True)
class BlockKernel:
    """A block's attention and its derivative. q, k, v: [b, heads, rows or columns, d].

    forward(q, k, v, causal, bias): the result and its lse. backward(grad, q, k, v, out, lse, causal, bias): the
    gradients of q, k and v. bias: [b, heads, rows, columns], or None.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernel_of(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> BlockKernel | None:
    """The kernel for a block: on a device the one that torch's attention would take. None: operators must do it.

    Arguments are those of `BlockKernel`. ``torch.nn.attention.sdpa_kernel`` limits the choice on a device.
    """
    if q.is_cpu:
        return _HOST
    if not q.is_cuda or q.shape[-1] % 8 or (bias is not None and k.shape[2] % 8):
        return None  # torch's attention would pad the tensors
    return _ON_DEVICE.get(private("_fused_sdp_choice")(q, k, v, bias, 0.0, causal))


def _host(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, attn_mask=bias)
    return out, lse


def _host_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias
    )
    return dq, dk, dv


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: None) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: None
) -> tuple[Tensor, Tensor, Tensor]:
    no_seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward.default(
        grad.contiguous(), q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, no_seed,
        no_seed,
    )  # fmt: skip
    return dq, dk, dv


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention.default(q, k, v, bias, True, 0.0, causal)
    return out, lse[:, :, : q.shape[2]]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // _ROWS) * _ROWS), torch.inf)
    padded[:, :, : lse.shape[2]] = lse
    no_seed = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward.default(
        grad.contiguous(), q, k, v, bias, out, padded, no_seed, no_seed, 0.0, [True, True, True, False], causal
    )
    return dq, dk, dv


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention.default(q, k, v, bias, True, 0.0, causal)
    return out, lse.view(q.shape[:3])


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    no_seed = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward.default(
        grad.contiguous(), q, k, v, out, lse.contiguous().unsqueeze(-1), no_seed, no_seed, bias, None, None, q.shape[2],
        k.shape[2], 0.0, causal,
    )  # fmt: skip
    return dq, dk, dv


_HOST = BlockKernel(_host, _host_backward)
#: by the number of torch's SDPBackend
_ON_DEVICE = {
    1: BlockKernel(_flash, _flash_backward),
    2: BlockKernel(_efficient, _efficient_backward),
    3: BlockKernel(_cudnn, _cudnn_backward),
}
