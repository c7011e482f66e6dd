"""What a Llama keeps for its backward with a context group, in bytes: about 1 / c of what it keeps alone."""

import pytest
import torch

from tests.tplayers.models.test_activation_memory import kept_bytes
from tplayers import GPT, ContextGroup, GPTConfig, initialize
from tplayers.context.group import CONTEXT_METHODS

LLAMA = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "num_query_groups": 4,
    "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "ffn_hidden_size": 352,
}  # fmt: skip
S = 1024


@pytest.mark.mpi
@pytest.mark.sizes(2, 4)
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
