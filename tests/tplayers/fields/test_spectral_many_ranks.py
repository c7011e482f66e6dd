"""SpectralConv on 64 ranks, which are threads of this process."""

import torch

import tplayers
from commengine import CartesianGrid
from tests.support.fields.comparison import close, cut, draw
from tests.support.fields.threads import on_threads
from tests.support.fields.whole_spectrum import Whole


def test_64_ranks():
    """Each of 64 ranks has messages for the 7 others of its row along each axis, some lines, and at most 3 of them."""
    shape, space, modes = (8, 8), (21, 18), (5, 4)
    whole, weight = draw(2, 3, *space), draw(3, 2, 10, 4, 2, seed=2)
    reference = Whole(weight, modes)
    inputs = whole.clone().requires_grad_()
    expected = reference(inputs)
    (expected.square().sum()).backward()

    def program(rank):
        grid = CartesianGrid(rank, shape)
        layer = tplayers.SpectralConv(3, 2, modes, grid, grid.decompose(space), dtype=torch.float64)
        layer.load_state_dict(reference.state_dict())
        x = cut(whole, layer.input, grid).requires_grad_()
        y = layer(x)
        messages = dict(rank.sent)
        own_lines = [whole.target_shape[0] for lines in layer._there for whole, _ in lines._plans[:1]]
        y.square().sum().backward()
        close(y, cut(expected, layer.input, grid))
        close(x.grad, cut(inputs.grad, layer.input, grid))
        close(layer.weight.grad, reference.weight.grad)
        return messages, own_lines

    for number, (messages, own_lines) in enumerate(on_threads(64, program)):
        row = {8 * place + number % 8 for place in range(8)} | {number // 8 * 8 + place for place in range(8)}
        assert set(messages) <= row - {number}
        assert sum(messages.values()) <= 4 * 2 * 7
        # 3 channels of 2 or 3 rows; of the spectrum's 4 columns a place has one at most, with 3 channels
        assert own_lines[0] in (0, 1, 2) and own_lines[1] in (0, 1)
