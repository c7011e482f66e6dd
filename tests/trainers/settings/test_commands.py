"""The records of settings: their words are those of the layers, and the room needs no torch."""

import subprocess
import sys
from dataclasses import fields
from typing import get_args

import pytest

from tests.support import mpirun
from tplayers import ContextMethod, Gelu, NormPlacement, PositionEmbedding
from tplayers.attention.rotary import SCALING_KINDS
from tplayers.attention.self_attention import DROPOUT_MASKS
from tplayers.mlp import GELUS
from tplayers.norm import NORMS
from trainers.finetuning.settings import FinetuneSettings
from trainers.settings.commands import BERTSettings, GPTSettings
from trainers.settings.layout import METHODS


def choices(kind, name):
    (item,) = [item for item in fields(kind) if item.name == name]
    return tuple(item.metadata["choices"])


def test_the_words_of_options_are_those_of_the_layers():
    assert choices(GPTSettings, "normalization") == tuple(NORMS)
    assert {*choices(GPTSettings, "position_embedding_type"), "relative"} == set(get_args(PositionEmbedding))
    assert choices(GPTSettings, "rope_scaling_type") == SCALING_KINDS
    assert choices(GPTSettings, "attention_dropout_mask") == DROPOUT_MASKS
    assert sorted(METHODS.values()) == sorted(get_args(ContextMethod))
    for kind in (BERTSettings, FinetuneSettings):
        assert choices(kind, "norm_placement") == get_args(NormPlacement)
        assert choices(kind, "gelu") == tuple(GELUS) == get_args(Gelu)


@pytest.mark.slow
def test_the_settings_of_a_command_need_no_torch():
    program = (
        "import sys\n"
        "from trainers.settings import command, commands, derived, rules\n"
        "from commengine.options.declared import parser_of\n"
        "assert '--tensor-model-parallel-size' in parser_of(commands.GPTSettings, 'x').format_help()\n"
        "assert not {'torch', 'mpi4py', 'pydantic'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=mpirun.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
