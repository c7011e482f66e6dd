"""Hand the serial tests out to the processes of pytest-xdist."""

from xdist.scheduler import LoadScopeScheduling

#: files in which no two tests share a fixture that is slow to make, and which take more than half a minute
INDEPENDENT = (
    "tests/commengine/test_launch.py",
    "tests/commengine/timeout/test_watcher.py",
    "tests/lab/test_emulated_hosts.py",
    "tests/test_harness.py",
)
#: files whose jobs keep four ranks busy; two such jobs at once on two cores take longer than one after the other
BUSY = (
    "tests/bench/test_collectives.py",
    "tests/commengine/shared_memory/test_sequence.py",
    "tests/trainers/checkpoints/test_checkpoint.py",
    "tests/trainers/checkpoints/test_run_folder.py",
    "tests/trainers/test_pretrain_bert.py",
    "tests/trainers/test_pretrain_gpt.py",
    "tests/trainers/training/test_trainer_losses_agree.py",
)


class Scheduler(LoadScopeScheduling):
    """Give one process all tests of a file, so that the fixtures of the file are made once.

    The tests of the files in INDEPENDENT are given out one by one, because they mostly wait. One process runs all files
    in BUSY.
    """

    def _split_scope(self, nodeid: str) -> str:
        """The name of the tests that are given out together with this one."""
        file = nodeid.split("::")[0]
        if file in INDEPENDENT:
            return nodeid
        return "busy" if file in BUSY else file
