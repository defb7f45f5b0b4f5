"""What the scenarios run with, as seen by the process that runs them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

_FLASHINFER = ("flashinfer-python", "flashinfer")


def facts(device: str, stand_in: str) -> dict[str, Any]:
    """Interpreter, libraries and machine. `stand_in` is the flashinfer that a CPU's stand-ins answer for. To be asked
    before `device.install` and `standins.install`, which answer for a GPU and for flashinfer."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": str(torch.__version__),
        "triton": version("triton"),
        "flashinfer": stand_in if device == "cpu" else version(*_FLASHINFER),
        "flashinfer_stand_in": device == "cpu",
        "machine": _cpu() if device == "cpu" else _gpu(),
    }


def version(*distributions: str) -> str | None:
    """The version of the first of these that is installed; None without one."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        **_host(),
    }


def _cpu() -> dict[str, Any]:
    return {**_host(), "memory_bytes": _memory()}


def _host() -> dict[str, Any]:
    return {"cpu": _model(), "cores": os.cpu_count(), "system": platform.platform()}


def _model() -> str:
    """The processor's name: Linux on x86 has it in /proc/cpuinfo; elsewhere its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on every system
        return None
