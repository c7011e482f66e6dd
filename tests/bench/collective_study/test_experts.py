"""bench.collectives --only experts: the crossover of what it measures, its tables, and a whole run."""

import pytest

from bench.collective_study import experts
from bench.transports import skew
from commengine import cost
from tests.support import mpirun


def test_the_crossover_is_where_the_ratio_passes_one():
    rows = [
        {"k": k, "sent_s": 1e-3 * k, "gathered_s": 2.5e-3, "predicted_sent_s": 1e-3 * k, "predicted_gathered_s": 9e-3}
        for k in range(1, 5)
    ]
    measured, predicted = experts.crossovers(rows)
    assert measured == pytest.approx(2.5) and predicted is None
    low = [row | {"sent_s": 5e-3} for row in rows]
    assert experts.crossovers(low)[0] == pytest.approx(0.5)  # between no expert, which takes no time, and the first


def test_even_collectives_alone_predict_both_ways():
    ranks, tokens, hidden = 2, 100, 10
    part = 4 * tokens * hidden
    times = {(name, size): size * 1e-9 for name in experts.ALONE for size in (1, part, 16 * part)}
    model = experts.fitted(times, ranks)
    for k in (1, 2, 4):
        matrix = skew.of_tokens("uniform", ranks, k * tokens)
        for one_node in (False, True):
            sent, gathered = experts.predicted(model, matrix, tokens, hidden, one_node=one_node)
            assert sent == pytest.approx(2 * k * part * 1e-9, rel=0.01)
            assert gathered == pytest.approx(2 * ranks * part * 1e-9, rel=0.01)
    hot = skew.of_tokens("hot", ranks, tokens)
    assert experts.predicted(model, hot, tokens, hidden, one_node=False)[0] > 2 * part * 1e-9
    assert cost.busiest(hot) > cost.busiest(skew.of_tokens("uniform", ranks, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", pytest.param("engine", marks=pytest.mark.long)])
def test_a_run(tmp_path, transport):
    words = ["--tokens", "16", "--hidden", "32", "--most", "2", "--time-limit", "0.02", "--transport", transport]
    files = ["--output", str(tmp_path / "e.md"), "--plot", str(tmp_path / "e.png"), "--json", str(tmp_path / "e.json")]
    done = mpirun.run(2, "-m", "bench.collectives", "--only", "experts", *words, *files)
    assert done.returncode == 0, done
    text = (tmp_path / "e.md").read_text()
    assert text.count("gathering is no slower from") == 3 and "| 2 |" in text and (tmp_path / "e.png").stat().st_size
    alone = mpirun.run(1, "-m", "bench.collectives", "--only", "experts")
    assert alone.returncode != 0 and "start it with mpiexec -n 2" in alone.stderr
