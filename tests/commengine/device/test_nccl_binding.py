"""The checked-in signatures of CuPy's NCCL binding against the binding itself, wherever it loads; needs no GPU."""

import shutil
import subprocess
import sys

import pytest

from commengine import CollectiveError
from commengine.device.nccl import UNIQUE_ID_BYTES, explain, load_runtime
from tests.support import mpirun
from tests.support.device.nccl_signatures import CONSTANTS, SIGNATURES


@pytest.fixture(scope="module")
def runtime():
    try:
        return load_runtime()
    except CollectiveError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def table(runtime):
    import cupy

    return SIGNATURES[int(cupy.__version__.split(".")[0])]


def test_signatures_are_those_of_the_binding(runtime, table):
    for name, signature in table.items():
        found = runtime.nccl
        for part in name.split("."):
            found = getattr(found, part)
        assert found.__doc__.strip().split("\n")[0] == signature
    assert hasattr(runtime.nccl.NcclCommunicator, "commSplit") == ("NcclCommunicator.commSplit" in table)


def test_constants_are_those_of_the_binding(runtime):
    assert {name: getattr(runtime.nccl, name) for name in CONSTANTS} == CONSTANTS


def test_unique_id_is_of_the_type_in_the_signature(runtime, table):
    unique = runtime.nccl.get_unique_id()
    kind = "bytes" if "bytes commId" in table["NcclCommunicator"] else "tuple"
    assert type(unique).__name__ == kind and len(unique) == UNIQUE_ID_BYTES
    wrong = tuple(unique) if kind == "bytes" else bytes(UNIQUE_ID_BYTES)
    with pytest.raises(TypeError):  # what `connect` tells the two apart by
        runtime.nccl.NcclCommunicator(1, wrong, 0)


def test_the_bindings_own_table_of_errors_ends_at_six(runtime):
    assert "NCCL_ERROR_REMOTE" in explain(runtime.nccl.NcclError(6))
    for status, words in ((7, "in progress"), (8, "timeout")):
        with pytest.raises(KeyError) as error:
            runtime.nccl.NcclError(status)
        assert words in explain(error.value)


def test_versions_are_numbers_that_compare(runtime):
    assert 21000 <= runtime.nccl.get_version() < 100_000
    assert runtime.cuda_version // 1000 in (12, 13)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_an_error_has_nccls_own_words(tmp_path):
    """CuPy's say "unhandled cuda error". A library that has been loaded is asked, and none is loaded for it."""
    library = tmp_path / "libnccl.so.2"
    source = 'const char* ncclGetLastError(void* comm) { return comm ? "" : "the driver is too old\\n"; }'
    words = ["cc", "-shared", "-x", "c", "-", f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run(words, input=source, text=True, check=True)
    program = (
        "import ctypes, sys; from commengine.device.nccl import explain\n"
        "class NcclError(RuntimeError): pass\n"
        "print(explain(NcclError('unhandled cuda error')))\n"
        "loaded = ctypes.CDLL(sys.argv[1])\n"
        "print(explain(NcclError('unhandled cuda error'))); print(explain(RuntimeError('other')))\n"
    )
    done = mpirun.command([sys.executable, "-c", program, str(library)], timeout=60)
    first, second, third = done.stdout.splitlines()
    assert (second, third) == ("unhandled cuda error (the driver is too old)", "other") and done.returncode == 0, done
    assert first == "unhandled cuda error"
