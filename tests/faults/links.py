"""Cut the link of an emulated host in the middle of a step, under the launcher of MPICH, Open MPI or Intel's MPI."""

import re
import time
from pathlib import Path

from tests.support import mpirun
from tests.support.faults import runs
from tests.support.faults.parts import Case
from tests.support.lab import hosts as lab

#: minutes of --distributed-timeout-minutes: 3 s, 12 s and 120 s
MINUTES = (0.05, 0.2, 0.2, 0.2, 2)
#: hosts, and ranks on each
HOSTS = ((2, 1), (3, 1), (2, 2))
LAYOUTS = ("DP", "TP")
KINDS = [(minutes, hosts, layout) for minutes in MINUTES for hosts in HOSTS for layout in LAYOUTS]

TITLE = "the link of a host is cut in the middle of a step; timeouts of 3 s, 12 s and 120 s"
DEMAND = "a report that names a rank that cannot be reached, and the job's end with an error, within timeout + 10 s"
CASES = len(KINDS)
SHORT = [6]  # of 12 s: on a busy machine the first step may take 3 s over the emulated wire
LIMIT_S = 220.0

#: seconds from the timeout to the end of the launcher: the report, the abort, and the launcher's own steps
MARGIN_S = 10.0


def why_not() -> str | None:
    return lab.why_not()


def run(case: Case) -> str:
    minutes, (count, ranks_each), layout = KINDS[case.number]
    ranks, draw = count * ranks_each, case.random
    folder, log = case.folder / "run", case.folder / "log"
    # Two, three and four ranks divide these sizes. A step takes some 10 ms, so 5,000 outlast the cut.
    words = runs.words(
        "DP 2", folder, 5000, distributed_timeout_minutes=minutes, global_batch_size=2 * ranks, micro_batch_size=1,
        hidden_size=96, num_attention_heads=12, make_vocab_size_divisible_by=12, eval_interval=5000, save_interval=5000,
    )  # fmt: skip
    words += ["--tensor-model-parallel-size", str(ranks)] if layout == "TP" else []
    wanted = draw.randrange(3, 12)
    with lab.emulated_hosts(count, 100, 2000) as hosts:
        job = hosts.start(*words, log=log, ranks_each=ranks_each)
        try:
            came = runs.wait_for(lambda: len(runs.rows(folder)) >= wanted, job)
            assert came, f"the run ended before the cut: {runs.tail(log)}"
            time.sleep(draw.random() * 0.02)
            hosts.cut(list(hosts.pids)[draw.randrange(count)])
            if lab.is_intel():
                # Its launcher waits for the host without a network, however long that takes; the ranks end.
                ended = runs.wait_for(lambda: not _ranks(hosts), job, 60 * minutes + MARGIN_S)
                assert ended, f"ranks {_ranks(hosts)} did not end: {runs.tail(log)}"
            else:
                runs.finish(job, log, 60 * minutes + MARGIN_S)
        finally:
            mpirun.stop(job)
    text = log.read_text(errors="replace")
    assert job.returncode != 0, "the job ended well, without a network"
    named = re.findall(r"\[rank (\d+)\] .*\nmissing: rank (\d+)", text)
    assert named and all(speaker != missing for speaker, missing in named), f"no report: {runs.tail(log)}"
    return f"report, {60 * minutes:g} s"


def _ranks(hosts: lab.Hosts) -> list[int]:
    """Return the ids of the ranks that run."""
    return [pid for pid in hosts.processes() if _words(pid)[1:3] == ["-m", "trainers.pretrain_gpt"]]


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
