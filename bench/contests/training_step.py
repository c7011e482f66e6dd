"""Our contestant of bench.step_contest: trainers' own step, tensor- or data-parallel.

mpiexec -n 2 python -m bench.contests.training_step [--task FILE] --tensor-model-parallel-size 2
"""

from __future__ import annotations

from argparse import BooleanOptionalAction

import torch
from safetensors.torch import load_file

from bench.command.parser import new_program_parser
from bench.contests.serving import serve
from bench.contests.step_task import StepTask
from commengine import Communicator, ProcessGrid, launch
from tplayers import GPT, GPTConfig, placements
from trainers.training.clipping import clip, gradient_norm
from trainers.training.reduction import GradientBuckets

#: parts of the reference state's names -> ours
NAMES = {
    "wte.weight": "embedding.weight", "wpe.weight": "position_embedding", "ln_f.": "final_norm.", "h.": "layers.",
    ".ln_1.": ".attention_norm.", ".ln_2.": ".mlp_norm.", ".attn.c_attn.": ".attention.qkv.",
    ".attn.c_proj.": ".attention.projection.", ".mlp.c_fc.": ".mlp.up.", ".mlp.c_proj.": ".mlp.down.",
}  # fmt: skip


def load(model: GPT, path: str) -> None:
    """Fill ``model`` with its parts of the reference state."""
    renamed = {}
    for name, tensor in load_file(path).items():
        for theirs, ours in NAMES.items():
            name = ours + name[len(theirs) :] if name.startswith(theirs) else name.replace(theirs, ours)
        renamed[name] = tensor
    placed = placements(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(placed[name].part(renamed.pop(name)))
    assert not renamed, sorted(renamed)


def main(world: Communicator) -> None:
    """Set up, then obey the driver."""
    options = new_program_parser("bench.contests.training_step", __doc__)
    options.add_argument("--task", required=True)
    options.add_argument("--tensor-model-parallel-size", type=int, default=2)
    options.add_argument("--overlap-grad-reduce", action=BooleanOptionalAction, default=False)
    arguments = options.parse_args()
    task = StepTask.load(arguments.task)
    grid = ProcessGrid(world, tensor=arguments.tensor_model_parallel_size)
    config = GPTConfig(
        task.num_layers, task.hidden_size, task.num_attention_heads, task.vocab_size, task.seq_length,
        hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = GPT(config, grid.tensor)
    load(model, task.weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=task.weight_decay, fused=True)
    gradients = GradientBuckets(model, grid.data, overlap=arguments.overlap_grad_reduce, bucket_size=4_000_000)
    mine = task.global_batch_size // grid.data.size
    rows = torch.from_numpy(task.tokens())[grid.data.rank * mine : (grid.data.rank + 1) * mine]
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    count = task.global_batch_size * task.seq_length

    def step() -> float:
        gradients.zero()
        with gradients.last_microbatch():
            loss = model(tokens, labels).sum() / count
            loss.backward()
        gradients.finish()
        clip(gradients.segments, gradient_norm(gradients.segments, grid.tensor), task.clip_grad)
        optimizer.step()
        return float(loss) * grid.data.size  # the mean over this rank's samples

    layout = f"tensor {grid.tensor.size} x data {grid.data.size}"
    serve(step, world.rank, f"{layout}, overlap {'on' if arguments.overlap_grad_reduce else 'off'}")


if __name__ == "__main__":
    launch.run(main)
