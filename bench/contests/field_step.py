"""The training step of `tplayers.UNet` on a field that is split in space, as a contestant of bench.fields.

mpiexec -n 2 python -m bench.contests.field_step --task FILE
"""

from __future__ import annotations

from safetensors.torch import load_file
from torch import Tensor

from bench.command.parser import new_program_parser
from bench.contests.field_task import FieldTask, make_step
from bench.contests.serving import serve
from commengine import CartesianGrid, Communicator, launch
from tplayers import UNet


def cut(whole: Tensor, slices: tuple[slice, ...]) -> Tensor:
    """This rank's block of a batch of whole fields."""
    return whole[:, :, *slices]


def main(world: Communicator) -> None:
    """Set up, then do as the driver says."""
    options = new_program_parser("bench.contests.field_step", __doc__)
    options.add_argument("--task", required=True, metavar="FILE", help="JSON file of a FieldTask with weights")
    task = FieldTask.load(options.parse_args().task)
    grid = CartesianGrid(world, (world.size, 1))
    field = grid.decompose((task.points, task.points))
    model = UNet(
        task.channels, task.channels, grid, field, width=task.width, depth=task.depth, padding_mode=task.padding_mode
    )
    model.load_state_dict(load_file(task.weights))
    data, target = (cut(whole, field.slices(grid.coords)) for whole in task.fields())
    step = make_step(task, model, data, target, world.size)
    serve(step, world.rank, f"blocks of {' x '.join(map(str, field.local_shape(grid.coords)))} points")


if __name__ == "__main__":
    launch.run(main, device="cpu")
