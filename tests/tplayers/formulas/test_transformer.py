"""The volumes, memory and flops of a transformer against published figures and the seed texts' examples."""

from itertools import pairwise

import pytest

from commengine import cost
from tests.support.models.published import GPT3, PAPER, bytes_sent
from tplayers import formulas
from tplayers.formulas import KeptTensors, TransformerShape

MIB = 2**20


def published_bytes(count, **more):
    """Bytes a parameter as the literature counts them: gradients are summed in half precision."""
    return formulas.parameter_bytes(count, gradient_bytes=2, **more)


def ring_seconds(size, bandwidth, ranks):
    """An all-reduce at a bus bandwidth."""
    return size * cost.bus_factor("all_reduce", ranks) / bandwidth


# ---- seeds: the paper ---------------------------------------------------------------------------------------


def test_paper_table_1():
    for billions, shape in PAPER.items():
        assert round(formulas.parameters(shape) / 1e9, 1) == billions
        assert shape.hidden // shape.heads == 96
    assert 50257 <= 51200 == -(-50257 // (128 * 8)) * 128 * 8  # the smallest multiple of 1024


def test_paper_section_3_communication():
    """Two all-reduces forward and two backward a layer, whatever t; b s numbers for the loss instead of b s v."""
    for tensor in (2, 4, 8):
        run = formulas.tensor_parallel_collectives(PAPER[8.3], 8, tensor)
        assert [(one.operation, one.count) for one in run[:2]] == [("all_reduce", 2 * 72)] * 2
        assert {one.size for one in run} == {8 * 1024 * 3072 * 2}
    scalars = formulas.loss_collectives(PAPER[8.3], 8, 8)
    assert scalars[0].size / 4 == 8 * 1024
    recomputed = formulas.tensor_parallel_collectives(PAPER[8.3], 8, 8, recompute="full")
    assert sum(one.count for one in recomputed) == 6 * 72 + 2


def test_paper_headline_numbers():
    single = 39e12
    assert round(15.1e15 / 512 / single, 2) == 0.76
    assert round(single / 0.30) == 130e12  # "30% of the theoretical peak"
    # Which FLOPs the paper counts: with recomputation, the 15.1 PFLOP/s are Table 2's 2.10 days an epoch within 10%.
    step = 2.10 * 86400 / 68507
    shape = TransformerShape(72, 3072, 24, 1024, 51200)
    assert formulas.model_flops(shape, 512, "full") / step == pytest.approx(15.1e15, rel=0.10)
    assert formulas.model_flops(shape, 512) / step < 0.7 * 15.1e15


# ---- the Llama family ---------------------------------------------------------------------------------------

LLAMA = {"gated": True, "rms_norm": True, "rotary": True, "biases": False}
#: shapes, and the number of parameters of the published weights
PUBLISHED = {
    "Llama 2 7B": (TransformerShape(32, 4096, 32, 4096, 32000, ffn=11008, untied=True, **LLAMA), 6_738_415_616),
    "Llama 3 8B": (
        TransformerShape(32, 4096, 32, 8192, 128256, ffn=14336, kv_heads=8, untied=True, **LLAMA), 8_030_261_248,
    ),
    "Qwen 2 0.5B": (
        TransformerShape(24, 896, 14, 32768, 151936, ffn=4864, kv_heads=2, qkv_biases=True, **LLAMA), 494_032_768,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_the_llama_family(name):
    shape, published = PUBLISHED[name]
    assert formulas.parameters(shape) == published
    for tensor in (1, 2):
        assert sum(size for _, size in formulas.parameter_sizes(shape, tensor)) == formulas.parameters(shape, tensor)


def test_flops_and_key_value_memory_of_llama_3():
    shape, count = PUBLISHED["Llama 3 8B"]
    short = TransformerShape(**{**vars(shape), "seq": 1})
    matrices = count - 128256 * 4096 - 65 * 4096  # without the embedding and the norms
    assert formulas.model_flops(short, 1) == 6 * matrices + 3 * 32 * 4 * 4096
    assert formulas.key_value_bytes(shape, 1, 8192, element_bytes=2) == 2**30  # 128 KiB a token
    for tensor in (8, 16, 32):  # 16 and 32 ranks share heads
        assert formulas.key_value_bytes(shape, 1, 8192, tensor, element_bytes=2) == 2**30 / 8


def test_ranks_that_share_a_head_gather_it():
    shape, _ = PUBLISHED["Llama 3 8B"]
    assert formulas.key_value_collectives(shape, 2, 8) == []
    head = 2 * 8192 * 2 * 128 * 2  # keys and values of 2 sequences, in half precision
    found = formulas.key_value_collectives(shape, 2, 32, recompute="full")
    assert [(one.operation, one.phase, one.size, one.ranks, one.count) for one in found] == [
        ("all_gather", "forward", head, 4, 32), ("reduce_scatter", "backward", head, 4, 32),
        ("all_gather", "recompute", head, 4, 32),
    ]  # fmt: skip
    (token,) = (one for one in formulas.generation_collectives(shape, 3, 16) if "share" in one.why)
    assert (token.size, token.ranks, token.count) == (2 * 3 * 128 * 4, 2, 32)


def test_shapes_that_do_not_exist():
    with pytest.raises(ValueError, match="kv_heads=3 does not divide heads=8"):
        TransformerShape(1, 32, 8, 8, 16, kv_heads=3)
    with pytest.raises(ValueError, match="head=0: at least 1"):
        TransformerShape(1, 32, 8, 8, 16, head=0)
    with pytest.raises(ValueError, match="size 4 neither divides kv_heads=6"):
        TransformerShape(1, 48, 12, 8, 16, kv_heads=6).require_tensor_parallel(4)
    TransformerShape(1, 31, 8, 8, 16, head=12).require_tensor_parallel(4)


# ---- seeds: megatron-lm-explained ---------------------------------------------------------------------------


def test_explained_memory_wall():
    assert published_bytes(8.3e9) == pytest.approx(133e9, rel=0.01)  # "about 133 GB", "four times" a V100's 32 GB
    assert published_bytes(8.3e9) / 32e9 == pytest.approx(4, abs=0.2)
    assert published_bytes(8.3e9) - 4 * 8.3e9 == pytest.approx(100e9, rel=0.01)  # optimizer and master copy alone
    assert published_bytes(2e9) == 32e9  # "past roughly 2 billion parameters it crosses the ceiling"
    for billions, gpus in ((1.2, 1), (2.5, 2), (4.2, 4), (8.3, 8)):
        fits = next(t for t in (1, 2, 4, 8) if published_bytes(billions * 1e9) / t <= 32e9)
        assert fits == gpus


def test_explained_shapes():
    """3072 x 12288 in columns of 1536, QKV of 3072 x 9216, 3 of 24 heads of 128, at t = 8."""
    assert (12288 // 8, 24 // 8, 3072 // 24, 3072 // 8) == (1536, 3, 128, 384)
    TransformerShape(72, 3072, 24, 1024, 51200).require_tensor_parallel(8)
    one, two = (formulas.parameters(TransformerShape(layers, 3072, 24, 1024, 51200)) for layers in (1, 2))
    assert two - one == 3072 * (9216 + 3072 + 2 * 12288) + 9216 + 3072 + 12288 + 3072 + 4 * 3072


# ---- seeds: gptlite-tensor-parallelism ----------------------------------------------------------------------


def test_gptlite_reduce_scatter_and_all_gather_are_an_all_reduce():
    """Twice the collectives, as it says; the same bytes; and what is kept between blocks shrinks by t."""
    whole = formulas.tensor_parallel_collectives(GPT3, 1, 8)
    split = formulas.tensor_parallel_collectives(GPT3, 1, 8, sequence_parallel=True)
    layers = [one for one in split if "again" not in one.why]
    counts = [sum(one.count for one in run if one.count > 3) for run in (whole, layers)]
    assert counts[1] == 2 * counts[0]
    volumes = [bytes_sent(one for one in run if one.count > 3) for run in (whole, layers)]
    assert volumes[0] == pytest.approx(volumes[1])
    kept = [
        formulas.layer_activation_bytes(GPT3, 1, 8, KeptTensors(sequence_parallel=sequence))
        for sequence in (False, True)
    ]
    sbh = 2048 * 12288
    assert kept[0] - kept[1] == 10 * sbh * 7 / 8


# ---- seeds: tensor-parallelism-note -------------------------------------------------------------------------


def test_note_sizes():
    up = 12288 * 49152
    assert 2 * up == pytest.approx(1.2e9, rel=0.01)  # "in fp16 that single matrix is 1.2 GB"
    assert published_bytes(up) == pytest.approx(9.6e9, rel=0.01)  # "with gradients and Adam states it is 9.6 GB"
    # "Stack 96 layers and you have ~900 GB of just-the-MLPs": that is the up-projections; an MLP has a second matrix.
    assert 96 * published_bytes(up) == pytest.approx(900e9, rel=0.04)
    assert 96 * published_bytes(2 * up) == pytest.approx(1.86e12, rel=0.01)
    assert 49152 // 8 == 6144 and 96 // 8 == 12
    # "12288 / 8 = 1536 features per head": 1536 are a GPU's, of 12 heads; a head has 128.
    assert 12288 // 8 == 1536 == 12 * (12288 // 96) and 12288 // 96 == 128


def test_note_communication():
    run = formulas.tensor_parallel_collectives(GPT3, 1, 8)
    layers = [one for one in run if one.count > 2]
    size = layers[0].size
    assert size == pytest.approx(50e6, rel=0.01)  # "50 MB per all-reduce"
    reduced = sum(one.count * one.size for one in layers)
    assert reduced == pytest.approx(19.2e9, rel=0.01)  # "96 layers: 19.2 GB per step", 200 MB a layer
    assert reduced / 300e9 == pytest.approx(64e-3, rel=0.01)  # "at 300 GB/s NVLink: ~64 ms"
    assert reduced / 300e9 / 0.5 == pytest.approx(0.13, abs=0.005)
    # "sent" is what is reduced: a ring of 8 sends 2 * 7 / 8 times as much, and takes 113 ms at that rate.
    assert bytes_sent(layers) / reduced == pytest.approx(1.75)
    assert bytes_sent(layers) / 300e9 == pytest.approx(113e-3, rel=0.01)
    # "50 MB / 25 GB/s = 2 ms (vs 0.17 ms over NVLink)" is right, "per step: 200 ms" is not: there are 384 of them.
    assert size / 25e9 == pytest.approx(2e-3, rel=0.01) and size / 300e9 == pytest.approx(0.17e-3, rel=0.02)
    assert sum(one.count for one in layers) == 384
    assert reduced / 25e9 == pytest.approx(0.77, rel=0.01)
    assert reduced / 25e9 / 0.2 == pytest.approx(3.9, abs=0.1)


# ---- seeds: tensor-parallelism-from-linearity ---------------------------------------------------------------

EXERCISE = TransformerShape(layers=80, hidden=4096, heads=32, seq=2048, vocab=32000)
BATCH, P = 4, 8


def test_linearity_exercise_volume():
    """Exercise 2: b = 4, s = 2048, d = 4096, fp16, P = 8. Our copy of the text lacks its formulas, not its numbers."""
    run = formulas.tensor_parallel_collectives(EXERCISE, BATCH, P)
    assert sum(one.count for one in run[:2]) == 4 * 80  # "4 AllReduce per layer total"
    assert run[0].size == 64 * MIB
    # "Per AllReduce 112 MB", by a ring; "224 MB" for the two of a layer's forward: MiB, as it counts.
    sent = cost.collective("all_reduce", "ring", run[0].size, P).path_bytes
    assert sent == 112 * MIB
    assert bytes_sent(run[:1]) / EXERCISE.layers == 224 * MIB


def test_linearity_exercise_ratio():
    first, second = 4 * BATCH * 2048 * 4096**2, 2 * BATCH * 2048**2 * 4096
    assert first == pytest.approx(5.50e11, rel=0.001) and second == pytest.approx(1.37e11, rel=0.005)
    # Its own two terms over 8 GPUs at 989 TFLOP/s take 86.9 us, not the 42.9 of its table (about the sparse peak's).
    assert (first + second) / P / 989e12 == pytest.approx(86.9e-6, rel=0.001)
    assert (first + second) / P / (2 * 989e12) == pytest.approx(43.4e-6, rel=0.001)
    claimed = 2.24e8 / 900e9
    assert claimed == pytest.approx(249e-6, rel=0.001)  # "249 us", of 224 MB; its 224 are MiB: 261 us
    assert round(42.9e-6 / claimed, 2) == 0.17  # "R 0.17"
    # The terms are a sixth and a half of a layer's products: 24 b s d^2 + 4 b s^2 d.
    layer = formulas.model_flops(EXERCISE, BATCH) / 3 - 2 * BATCH * 2048 * 4096 * 32000
    assert layer / 80 == pytest.approx(6 * first + 2 * second)
    # Put right, a layer computes 451 us and sends 261: compute-bound, not "3x more time communicating".
    compute = layer / 80 / P / 989e12
    sending = ring_seconds(2 * 64 * MIB, 900e9, P)
    assert (compute, sending) == (pytest.approx(451e-6, rel=0.01), pytest.approx(261e-6, rel=0.01))
    # "TP = 4 doubles R, TP = 2 (R 0.68)": compute does, but a ring sends less too, so R grows by 7/3 and by 7.
    for tensor, times in ((4, 7 / 3), (2, 7)):
        shrunk = ring_seconds(2 * 64 * MIB, 900e9, tensor)
        assert (P / tensor) / (shrunk / sending) == pytest.approx(times)


def test_linearity_ratio_of_an_h100():
    """The text: "For P = 8: R = 0.23 - communication-bound!", d = 8192, 989 TFLOP/s, 900 GB/s, s << d."""
    shape = TransformerShape(layers=1, hidden=8192, heads=64, seq=16, vocab=1)
    flops = formulas.model_flops(shape, 1) / 3
    assert flops == pytest.approx(24 * 16 * 8192**2, rel=0.001)
    sending = 8 * 16 * 8192 / 900e9  # "for large P": two all-reduces of 2 b s d bytes, each sent twice
    by_ring = ring_seconds(2 * 2 * 16 * 8192, 900e9, 8)
    assert by_ring / sending == pytest.approx(7 / 8)
    # Its 0.23 is a sixth of a layer's products, at the sparse peak as in the exercise; of all, at the dense peak, 2.8.
    assert flops / 6 / 8 / (2 * 989e12) / sending == pytest.approx(0.23, abs=0.005)
    assert flops / 8 / 989e12 / sending == pytest.approx(2.8, abs=0.005)


def test_linearity_layernorm_statistics():
    statistics, activation = 8 * BATCH * 2048, 4 * BATCH * 2048 * 4096
    assert statistics == 64 * 2**10  # "64 KB": two fp32 sums a token
    # "8bsd = 128 MB": 128 MiB are 4bsd (fp32), 8bsd would be 256; the ratio, "2000x", is of the former.
    assert activation == 128 * MIB and 8 * BATCH * 2048 * 4096 == 256 * MIB
    assert activation / statistics == 2048


def test_linearity_head_constraints():
    with pytest.raises(ValueError, match="tensor-parallel size 6 does not divide heads=32"):
        EXERCISE.require_tensor_parallel(6)
    for tensor in (1, 2, 4, 8, 16, 32):
        EXERCISE.require_tensor_parallel(tensor)
    assert divmod(32, 6) == (5, 2)  # "some GPUs would have 5 heads, others 6"; padded to 36: "12.5% overhead"
    padded = TransformerShape(layers=80, hidden=36 * 128, heads=36, seq=2048, vocab=32004)
    padded.require_tensor_parallel(6)
    assert padded.heads / 32 - 1 == 0.125
    valid = [t for t in range(1, 97) if 96 % t == 0]
    assert [t for t in valid if t != 96] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]  # its list for GPT-3 leaves out 96


# ---- memory and volumes of the literature ------------------------------------------------------------------


def test_flops_of_narayanan():
    """2021: 96 B s l h^2 (1 + s / 6h + V / 16lh) with recomputation; 72 of 96 without, but for the logits."""
    h, layers = 12288, 96
    expected = 96 * 1536 * 2048 * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
    assert formulas.model_flops(GPT3, 1536, "full") == pytest.approx(expected)
    without = 72 * 1536 * 2048 * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (12 * layers * h))
    assert formulas.model_flops(GPT3, 1536) == pytest.approx(without)
    amounts = [formulas.model_flops(GPT3, 1, how) for how in ("none", "selective", "full")]
    assert all(a < b for a, b in pairwise(amounts))


def test_gradients_and_zero_1():
    """Rajbhandari et al. 2020, section 7: ZeRO-1 moves what data parallelism moves, and keeps 4 + 12 / d bytes."""
    plain = formulas.data_parallel_collectives(1e9, 64)
    zero = formulas.data_parallel_collectives(1e9, 64, zero1=True)
    assert bytes_sent(plain) == pytest.approx(bytes_sent(zero)) == pytest.approx(2 * 63 / 64 * 2e9)
    assert published_bytes(7.5e9) == 120e9  # its Figure 1: 7.5 billion parameters
    assert published_bytes(7.5e9, zero1_ranks=64) == pytest.approx(31.4e9, rel=0.002)
    assert formulas.data_parallel_collectives(1e9, 1) == []
