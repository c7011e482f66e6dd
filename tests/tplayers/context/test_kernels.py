"""The fused kernels of a CUDA device against torch's operators in float64. test_blocks.py tests the host's."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.tplayers.context.test_blocks import draw
from tplayers.context.blocks import BlockMask, accumulated_in, attend, attend_backward, merge
from tplayers.context.kernels import kernel_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, or not asked for with -m gpu"),
]


FLASH, EFFICIENT, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION


@pytest.mark.parametrize("backends", [[FLASH], [EFFICIENT], [CUDNN], [FLASH, EFFICIENT, CUDNN]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows, columns, d", [(64, 64, 64), (40, 40, 24), (33, 96, 8), (96, 7, 128), (128, 128, 128)])
def test_a_devices_kernels_against_float64(backends, dtype, biased, rows, columns, d):
    """One of two blocks of keys: the result and the lse of both go into the backward, as in a ring."""
    fits = not (biased and (columns % 8 or backends == [FLASH])) and (dtype != torch.float32 or EFFICIENT in backends)
    bound = {torch.float32: 2e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}[dtype]
    q, grad = (draw(2, 6, rows, d, seed=n).to("cuda", dtype) for n in (0, 1))
    blocks = [[draw(2, 3, columns, d, seed=n).to("cuda", dtype) for n in (at, at + 1)] for at in (2, 4)]
    biases = [draw(2, 1, rows, columns, seed=n).to("cuda", dtype) if biased else None for n in (6, 7)]
    for causal in {False, rows == columns and not biased}:
        masks = [BlockMask(causal, bias) for bias in biases]
        whole = [block.repeat_interleave(2, 1) for block in blocks[0]]
        bias = biases[0].expand(2, 6, rows, columns) if biased else None
        with sdpa_kernel([*backends, SDPBackend.MATH]):
            found = two_blocks(q, grad, blocks, masks)
            assert (kernel_of(q, *whole, causal, bias) is not None) == fits
        exact = [tensor.double() for tensor in (q, grad)]
        exact_blocks = [[tensor.double() for tensor in block] for block in blocks]
        exact_masks = [BlockMask(causal, None if bias is None else bias.double()) for bias in biases]
        expected = two_blocks(*exact, exact_blocks, exact_masks)
        for one, value in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), value, rtol=bound, atol=bound)


def two_blocks(q, grad, blocks, masks):
    """The merged result, its lse, and the gradients of each block."""
    (out, lse), second = (attend(q, *block, mask) for block, mask in zip(blocks, masks, strict=True))
    out, lse = out.to(accumulated_in(q.dtype)), lse.contiguous()
    merge(out, lse, *second)
    backwards = [
        attend_backward(grad, q, *block, out.to(q.dtype), lse, mask) for block, mask in zip(blocks, masks, strict=True)
    ]
    return [out, lse, *(gradient for found in backwards for gradient in found)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_alone_adds_nothing_on_a_device(dtype):
    """A block of padding beside one without, by the kernel that takes a bias."""
    q, k, v = (draw(1, 2, 40, 16, seed=n).to("cuda", dtype) for n in range(3))
    hidden = torch.full((1, 1, 1, 40), torch.finfo(dtype).min / 2, dtype=dtype, device="cuda")
    out, lse = attend(q, k, v, BlockMask())
    out = out.float()
    kept = out.clone(), lse.clone()
    merge(out, lse, *attend(q, k, v, BlockMask(bias=hidden)))
    assert torch.equal(out, kept[0]) and torch.equal(lse, kept[1])
    found = attend_backward(torch.ones_like(q), q, k, v, out.to(dtype), lse, BlockMask(bias=hidden))
    assert all((gradient == 0).all() for gradient in found)
