"""What a Llama keeps for its backward with a context group, in bytes: about 1 / c of what it keeps alone."""

import gc
import re
import time
from pathlib import Path

import pytest
import torch

from tests.tplayers.formulas.test_activation_memory import kept_bytes
from tplayers import GPT, ContextGroup, GPTConfig, initialize
from tplayers.context.group import CONTEXT_METHODS

LLAMA = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "num_query_groups": 4,
    "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "ffn_hidden_size": 352,
}  # fmt: skip
S = 1024


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6: grouped queries have no fused kernel")
@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_bytes_kept(group, alone, method):
    """Without dropout all of them have the fused kernel."""
    tokens = torch.zeros(1, S + 1, dtype=torch.int64)
    kept = []
    for context in (None, ContextGroup(group.comm, method)):
        model = GPT(GPTConfig(2, 128, 8, 512, S, **LLAMA), alone.comm, context=context)
        initialize(model, 1)
        kept.append(kept_bytes(model, lambda model=model: model(tokens[:, :-1], tokens[:, 1:])))
    assert kept[1] / kept[0] < {2: 0.6, 4: 0.35}[group.size], kept
    assert kept[1] * group.size > 0.9 * kept[0], "less than a part of it: something is not counted"


#: JackFram/llama-160m
LLAMA_160M = GPTConfig(12, 768, 12, 32000, 4096, **LLAMA | {"ffn_hidden_size": 3072, "num_query_groups": 12})


def begin_peak():
    """Let `peak` forget what an earlier test needed."""
    Path("/proc/self/clear_refs").write_text("5")


def peak():
    """The most memory that this process has had since `begin_peak`, in GB."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024 / 1e9


@pytest.mark.long
@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_bytes_kept_by_a_llama_of_160_million_parameters_at_4096(group, alone, method):
    """Alone it runs on one rank, which then has its peak. The others sleep, and leave it the cores."""
    tokens = torch.zeros(1, 4097, dtype=torch.int64)

    def kept_with(context):
        gc.collect()
        begin_peak()
        model = GPT(LLAMA_160M, alone.comm, context=context)
        initialize(model, 1)
        return kept_bytes(model, lambda: model(tokens[:, :-1], tokens[:, 1:])), peak()

    shared = kept_with(ContextGroup(group.comm, method))
    whole = [kept_with(None)] if group.comm.rank == 0 else [None]
    told = group.comm.mpi.Ibarrier()
    while not told.Test():
        time.sleep(0.1)
    whole = group.comm.mpi.bcast(whole[0])
    if group.comm.rank == 0:
        print(f"\nc={group.size} {method}: GB kept {shared[0] / 1e9:.3f}, peak {shared[1]:.2f}; "
              f"alone {whole[0] / 1e9:.3f}, {whole[1]:.2f}")  # fmt: skip
    assert shared[0] / whole[0] < {2: 0.6, 4: 0.35}[group.size]
    assert shared[1] < whole[1]
