# ReFrame's variables are lists.
# ruff: noqa: RUF012
"""ReFrame's checks of an installed commengine: the doctor, and a small study of what collectives cost.

    pip install ReFrame-HPC
    reframe -C packaging/reframe/settings.py -c packaging/reframe/commengine_checks.py -r --performance-report

They run what the python and the mpirun that are first on PATH have. `-S ranks=8` chooses another number of ranks, and
`-n Doctor` one of the two. No reference values stand here, because each machine has its own: ReFrame prints and logs
what was measured, and a site's copy of this file compares it by `reference`.
"""

import json
import re
from pathlib import Path

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import performance_function, run_after, sanity_function, variable


class OnRanks(rfm.RunOnlyRegressionTest):
    """A command of bench on a few ranks, each with one thread."""

    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    executable = "python"
    time_limit = "10m"
    ranks = variable(int, value=2)

    @run_after("init")
    def set_size(self):
        """Launch as many tasks as there are ranks."""
        self.num_tasks = self.ranks
        self.env_vars = {"OMP_NUM_THREADS": "1"}

    def written(self, name):
        """What the command wrote as JSON."""
        return json.loads((Path(self.stagedir) / name).read_text())


@rfm.simple_test
class Doctor(OnRanks):
    """What the job has to run on, and whether every transport gives right results."""

    descr = "commengine: the doctor"
    executable_opts = ["-m", "bench.doctor", "--seconds", "4", "--json", "doctor.json"]
    keep_files = ["doctor.json"]

    @sanity_function
    def every_result_is_right(self):
        """The status is 0, MPI's world has all ranks, and every row of the self-test ends in "right"."""
        ends = sn.extractall(r"^\| .* \| (?:all_reduce|sendrecv) \| .* \| ([^|]+) \|$", self.stdout, 1)
        return sn.all(
            [
                sn.assert_eq(self.job.exitcode, 0),
                sn.assert_found(rf"^\| ranks \| {self.ranks} on \d+ hosts? \|$", self.stdout),
                sn.assert_ge(sn.count(ends), 3, msg="the self-test has {0} rows"),
                sn.assert_eq(sn.count_uniq(ends), 1, msg="not every result is right"),
                sn.assert_eq(sn.getitem(ends, 0), "right"),
            ]
        )

    def slowest(self, size, figure):
        """The largest figure of the engine's all-reduces of this size: among all ranks, and among those of a node."""
        wanted = ("all_reduce", "engine", size)
        rows = self.written("doctor.json")["rows"]
        return max(figure(row) for row in rows if (row["operation"], row["transport"], row["bytes"]) == wanted)

    @performance_function("us")
    def all_reduce_of_8_bytes(self):
        """The median time of an all-reduce of 8 bytes."""
        return self.slowest(8, lambda row: 1e6 * row["seconds"]["p50"])

    @performance_function("GB/s")
    def all_reduce_of_8_mb(self):
        """The bytes of a rank's buffer a second, in an all-reduce of 8 MB (2^23 bytes)."""
        return 2**23 / 1e9 / self.slowest(2**23, lambda row: row["seconds"]["p50"])


@rfm.simple_test
class Study(OnRanks):
    """What a few sizes of each collective cost, and the share of a small GPT's step that they take."""

    descr = "commengine: a small study"
    executable_opts = ["-m", "bench.study", "study", "--minutes", "1", "--max-bytes", "256K"]
    keep_files = ["study/study.json", "study/report.html"]
    share = re.compile(r"\*\*(\d+)% of a step\*\*")

    @sanity_function
    def all_questions_are_answered(self):
        """The status is 0, the four questions stand in order, and the step's collectives fit the formulas."""
        questions = sn.extractall(r"^## (.*\?)$", self.stdout, 1)
        return sn.all(
            [
                sn.assert_eq(self.job.exitcode, 0),
                sn.assert_eq(
                    questions,
                    [
                        "What does a collective cost here?",
                        "Which way is fastest, and from which size on?",
                        "What share of a step is communication?",
                        "What would 8, 64 and 512 ranks do?",
                    ],
                ),
                sn.assert_true(self.written("study/step.json")["formulas_hold"], msg="the step's collectives differ"),
                sn.assert_found(self.share.pattern, self.stdout),
            ]
        )

    @performance_function("%")
    def communication_in_a_step(self):
        """The share of a step in which the ranks wait for collectives."""
        return sn.extractsingle(self.share.pattern, self.stdout, 1, float)

    @performance_function("us")
    def all_reduce_of_4_bytes(self):
        """The median time of mpi4py's or the engine's all-reduce of 4 bytes, whichever is shorter."""
        rows = self.written("study/collectives.json")["rows"]
        return 1e6 * min(row["seconds"]["p50"] for row in rows if (row["operation"], row["bytes"]) == ("all_reduce", 4))
