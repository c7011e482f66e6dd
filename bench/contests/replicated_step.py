"""The training step of `trainers.data_parallel.DataParallel`, as a contestant of bench.data_parallel.

mpiexec -n 2 python -m bench.contests.replicated_step --task FILE [--overlap]
"""

from __future__ import annotations

from bench.command.parser import new_program_parser
from bench.contests.residual_net import ImageTask, build, make_step
from bench.contests.serving import serve
from commengine import Communicator, launch
from trainers.data_parallel import DataParallel


def main(world: Communicator) -> None:
    """Set up, then do as the driver says."""
    options = new_program_parser("bench.contests.replicated_step", __doc__)
    options.add_argument("--task", required=True, metavar="FILE", help="JSON file of an ImageTask")
    options.add_argument("--overlap", action="store_true", help="send gradients while the backward goes on")
    arguments = options.parse_args()
    task = ImageTask.load(arguments.task)
    net = build(task)
    with DataParallel(net, world, overlap=arguments.overlap):
        step = make_step(task, net, world.rank, world.size)
        serve(step, world.rank, f"overlap {'on' if arguments.overlap else 'off'}, buckets of 4 million elements")


if __name__ == "__main__":
    launch.run(main, device="cpu")
