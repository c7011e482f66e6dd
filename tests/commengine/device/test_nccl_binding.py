"""CuPy's NCCL binding: its constants, types and errors. Its calls are those of `test_nccl.py`. It needs no GPU."""

import contextlib
import importlib
import shutil
import subprocess
import sys

import pytest
import torch

from commengine import CollectiveError
from commengine.device.choice import loaded_nccl
from commengine.device.nccl import UNIQUE_ID_BYTES, explain, load_runtime
from commengine.dtypes import COMPLEX_TYPES, NCCL_BYTE, NCCL_REDUCTIONS
from tests.support import mpirun


@pytest.fixture(scope="module")
def runtime():
    with contextlib.suppress(pytest.skip.Exception):  # a machine with an NCCL has loaded it with torch
        importlib.import_module("tests.support.device.nccl.library")
    try:
        return load_runtime()
    except CollectiveError as error:
        pytest.skip(str(error))


def test_codes_of_dtypes_and_reductions_are_those_of_the_binding(runtime):
    nccl = runtime.nccl
    assert nccl.NCCL_UINT8 == NCCL_BYTE
    for (dtype, op), codes in NCCL_REDUCTIONS.items():
        name = str(COMPLEX_TYPES.get(dtype, dtype)).removeprefix("torch.").upper()
        if dtype is torch.bool:  # a byte that is 0 or 1
            name, op = "UINT8", {"sum": "max", "prod": "min"}.get(op, op)
        assert codes == (getattr(nccl, f"NCCL_{name}"), getattr(nccl, f"NCCL_{op.upper()}")), (dtype, op)


def test_a_communicator_takes_a_unique_id_of_one_type_only(runtime):
    unique = runtime.nccl.get_unique_id()
    assert type(unique) in (bytes, tuple) and len(unique) == UNIQUE_ID_BYTES
    wrong = tuple(unique) if type(unique) is bytes else bytes(UNIQUE_ID_BYTES)
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
    if others := loaded_nccl():
        pytest.skip(f"torch has loaded {others[0]}; test_gpu.py asks a real one")
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
    done = mpirun.command([sys.executable, "-c", program, str(library)], timeout=60, fresh=False)
    first, second, third = done.stdout.splitlines()
    assert (second, third) == ("unhandled cuda error (the driver is too old)", "other") and done.returncode == 0, done
    assert first == "unhandled cuda error"
