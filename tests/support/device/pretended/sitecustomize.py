"""GPUs that are not there, for whole commands: torch finds $PRETENDED_GPUS of them, and CuPy if $PRETENDED_CUPY is 1.

Python imports this module when it starts, if its folder is on PYTHONPATH. Only what is asked before a device is used
is pretended: the first tensor on a device fails as it does in any torch without CUDA.
"""

import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

GPUS, CUPY = int(os.environ.get("PRETENDED_GPUS", "0")), os.environ.get("PRETENDED_CUPY") == "1"


def pretend(torch: Any) -> None:
    """Let ``torch``, which was just imported, be built for CUDA 13 and find the GPUs."""
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: GPUS > 0
    torch.cuda.device_count = lambda: GPUS
    if hasattr(torch, "accelerator"):  # AdamW of torch 2.14 would use it where it is available
        torch.accelerator.current_accelerator = lambda check_available=False: None
    torch.cuda.get_device_properties = lambda index: SimpleNamespace(
        name="pretended", uuid=f"GPU-{index}", total_memory=8 << 30, major=9, minor=0, multi_processor_count=100
    )


class AfterTorch:
    """Finds torch as Python would, and then pretends."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec("torch")
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            pretend(module)

        spec.loader.exec_module = exec_module
        return spec


if GPUS:
    sys.meta_path.insert(0, AfterTorch())  # type: ignore[arg-type]
if CUPY:
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.cuda = cuda
    cuda.nccl = SimpleNamespace(available=True, get_version=lambda: 22803)
    cuda.runtime = SimpleNamespace(runtimeGetVersion=lambda: 13000)
    sys.modules |= {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": cuda.nccl}
