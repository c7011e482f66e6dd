# Recipes import all words of Spack, last.
# ruff: noqa: F403, F405, I001
"""The recipe of Spack (1.0 or newer): docs/packaging.md says how to use it, and how it was tried."""

import math
from pathlib import Path

from spack_repo.builtin.build_systems.cuda import CudaPackage
from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *

#: This recipe lies in a checkout, or in an unpacked sdist, which is its source.
ROOT = Path(__file__).resolve().parents[4]


class PyCommengine(PythonPackage, CudaPackage):
    """Collectives on torch tensors over MPI and NCCL, and Megatron-style training of GPT, BERT, Llama and T5."""

    git = ROOT.as_uri()
    url = f"{ROOT.as_uri()}/dist/commengine-0.2.0.tar.gz"

    license("Apache-2.0")

    version("main", branch="main")
    # The sdist that `python -m build --sdist` leaves in dist/. It holds this file, which so cannot know its checksum.
    version("0.2.0")

    variant("train", default=True, description="The commands that train and evaluate")
    variant("study", default=True, description="The commands that measure and predict")
    requires("+train", when="+study")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    depends_on("mpi", type="run")  # its launcher; py-mpi4py is linked with it
    with default_args(type=("build", "run")):
        depends_on("py-torch@2.6:2")
        depends_on("py-torch~cuda", when="~cuda")
        depends_on("py-numpy@1.24:")
        depends_on("py-mpi4py@3.1:")

    with when("+train"), default_args(type=("build", "run")):
        depends_on("py-jinja2@3.1.6:")
        depends_on("py-matplotlib@3.8:")
        depends_on("py-pydantic@2.7:")
        depends_on("py-pyyaml@6.0:")
        depends_on("py-safetensors@0.4.5:")
        depends_on("py-tokenizers@0.20:")
        depends_on("py-tqdm@4.66:")
        depends_on("py-xxhash@3.4:")

    with when("+study"), default_args(type=("build", "run")):
        depends_on("py-markdown-it-py@3.0:")

    # CuPy binds NCCL. The engine refuses a process with two CUDAs or two NCCLs; in Spack both packages share one.
    with when("+cuda"):
        conflicts("cuda_arch=none", msg="name the GPUs, as in cuda_arch=90")
        with default_args(type=("build", "run")):
            depends_on("py-torch+cuda+nccl")
            depends_on("py-cupy@13.3:+cuda")
            depends_on("nccl@2.21:")
            for arch in CudaPackage.cuda_arch_values:
                depends_on(f"py-torch cuda_arch={arch}", when=f"cuda_arch={arch}")
                depends_on(f"py-cupy cuda_arch={arch}", when=f"cuda_arch={arch}")

    @property
    def import_modules(self):
        """The packages that can be imported with these variants."""
        return ["commengine", "tplayers"] + ["trainers"] * ("+train" in self.spec) + ["bench"] * ("+study" in self.spec)

    def _launcher(self):
        launcher = which("mpiexec", "mpirun", path=str(self.spec["mpi"].prefix.bin))
        if launcher is None:
            raise SkipTest("this MPI has no mpiexec and no mpirun")
        return launcher

    def test_program(self):
        """The README's program gives the same number on one rank and on two."""
        program = str(self.test_suite.current_test_data_dir.join("program.py"))
        numbers = []
        for ranks in ("1", "2"):
            words = [*self.spec["python"].command.exe, program]
            numbers.append(float(self._launcher()("-n", ranks, *words, output=str.split, error=str.split).split()[-1]))
        assert math.isclose(*numbers, rel_tol=1e-4), f"one rank and two ranks differ: {numbers}"

    def test_doctor(self):
        """The doctor finds every result of every transport right."""
        words = [*self.spec["python"].command.exe, "-m", "bench.doctor", "--seconds", "1"]
        page = self._launcher()("-n", "2", *words, output=str.split, error=str.split)
        check_outputs("| right |", page)
