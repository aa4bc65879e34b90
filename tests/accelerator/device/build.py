"""Builds the extension of the simulated device, once for a version of torch and of the sources."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).parent / "csrc"
NAME = "simulated_device"
FLAGS = ["-O1", "-std=c++20", "-fPIC", "-shared", "-w", "-fvisibility=hidden"]
BUILD_LIMIT_S = 900


class NoCompilerError(RuntimeError):
    """The extension cannot be built here; the text says what is missing."""


def folder() -> Path:
    """Where this build is kept: outside the repository, one folder for each state of what it is made of."""
    made_of = hashlib.sha256()
    for part in [torch.__version__, sys.version, *FLAGS]:
        made_of.update(part.encode())
    for source in sorted(SOURCES.iterdir()):
        made_of.update(source.read_bytes())
    caches = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return caches / "shardwise-tests" / made_of.hexdigest()[:16]


def missing() -> str | None:
    """Why the extension cannot be had here, or None."""
    if (folder() / f"{NAME}.so").exists():
        return None
    if sys.platform != "linux":
        return "the simulated device needs Linux"
    if _compiler() is None:
        return "the simulated device needs a C++ compiler (g++ or clang++), and there is none"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the simulated device needs Python's headers (Python.h), and they are not installed"
    return None


def _compiler() -> str | None:
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def built() -> Path:
    """The library; several processes may ask at once, one of them builds."""
    target = folder() / f"{NAME}.so"
    if target.exists():
        return target
    if reason := missing():
        raise NoCompilerError(reason)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_suffix(".partial")
            _compile(partial)
            partial.rename(target)
    return target


def _compile(target: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    includes = [*include_paths(), sysconfig.get_paths()["include"]]
    command = [
        str(_compiler()),
        *FLAGS,
        f"-DTORCH_EXTENSION_NAME={NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in includes),
        str(SOURCES / "all.cpp"),
        "-o",
        str(target),
        *(flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")),
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the simulated device does not compile:\n{done.stderr[-8000:]}")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, built())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
