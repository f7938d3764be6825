"""Compiling a .cu file beside this one into a library, once per machine, with nvcc; and calling it."""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from spmd_serve.errors import ModelError
from spmd_serve.user_cache import cache_root

logger = logging.getLogger(__name__)


@functools.cache
def load_library(name: str) -> ctypes.CDLL | None:
    """The library of `name`.cu for this process's GPU; None (logged) where there is no nvcc, or it fails.

    The first process to come compiles, the others wait for it.
    """
    major, minor = torch.cuda.get_device_capability()
    source = Path(__file__).with_name(f"{name}.cu")
    chip = f"{major}{minor}a" if major == 9 else f"{major}{minor}"  # a: with Hopper's wgmma
    target_chip = f"-gencode=arch=compute_{chip},code=sm_{chip}"
    command = ["nvcc", "-O3", "-std=c++17", target_chip, "-shared", "-Xcompiler", "-fPIC"]
    key = hashlib.sha256(source.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    try:
        folder = cache_root() / "kernels"
        target = folder / f"{name}-{key}.so"
        if not target.exists():  # else the folder may be on a read-only file system
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"{name}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not target.exists():
                    _compile([_nvcc(), *command[1:], str(source)], target)
        return ctypes.CDLL(str(target))
    except (OSError, ModelError, subprocess.CalledProcessError) as error:  # ModelError: there is no home folder
        detail = getattr(error, "stderr", None) or error
        logger.warning("no %s kernels, slower ones do their work: %s", name, detail)
        return None


def launch(function: Any, device: torch.device, *arguments: object) -> bool:
    """Calls a library's entry, which takes `arguments`, the device's index and a stream: here the current one.

    Tensors go as their addresses, None as null, float as C's float. False: it has no kernel for the shape.

    Raises:
        RuntimeError: CUDA has refused the launch.
    """
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    code = function(*(_for_c(argument) for argument in arguments), device.index, stream)
    if code not in (0, -1):
        raise RuntimeError(f"{function.__name__}: CUDA error {code}")
    return bool(code == 0)


def _for_c(argument: object) -> object:
    if argument is None or isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(0 if argument is None else argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else argument


def aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether all begin at a multiple of 16 bytes, as the kernels want them."""
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    found = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if found is None:
        raise OSError("nvcc is not on the PATH, nor in CUDA_HOME or /usr/local/cuda")
    return found


def _compile(command: list[str], target: Path) -> None:
    logger.info("compiling %s with nvcc (once per machine)", target.name)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        subprocess.run([*command, "-o", str(built)], check=True, capture_output=True, text=True)
        built.rename(target)
    logger.info("compiled %s in %.1f s", target.name, time.perf_counter() - started)
