"""Facts about the machine that a patch may depend on: flashinfer's version and the GPUs' compute capability."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from mlapatch.install.target import Target
from mlapatch.install.wheelfile import parse_requires

_PIN = re.compile(r"flashinfer[_-]python(?:\[[^\]]*\])?\s*==\s*([^\s;,]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Flashinfer:
    """A version and where it was learned: `installed`, or `pinned` by the SGLang release's metadata."""

    version: Version
    source: str


def flashinfer_of(target: Target) -> Flashinfer | None:
    """The flashinfer that counts: the one installed beside the target, else the one that its metadata pins."""
    return _installed(target) or _pinned(target)


def _installed(target: Target) -> Flashinfer | None:
    for entry in dict.fromkeys([str(target.site), *target.path]):
        if not Path(entry).is_dir():
            continue
        for folder in Path(entry).glob("flashinfer_python-*.dist-info"):
            version = _parsed(folder.name.removesuffix(".dist-info").partition("-")[2])
            if version:
                return Flashinfer(version, "installed")
    if target.path and target.dist_info is None:
        from importlib.metadata import distributions

        for dist in distributions(name="flashinfer-python", path=list(target.path)):
            version = _parsed(dist.version)
            if version:
                return Flashinfer(version, "installed")
    return None


def _pinned(target: Target) -> Flashinfer | None:
    if target.dist_info is None:
        return None
    try:
        requires = parse_requires((target.dist_info / "METADATA").read_bytes())
    except OSError:
        return None
    for line in requires:
        match = _PIN.match(line)
        version = _parsed(match[1]) if match else None
        if version:
            return Flashinfer(version, "pinned")
    return None


def _parsed(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def detected_sms() -> tuple[int, ...]:
    """The compute capabilities of this machine's GPUs (e.g. 90, 120), through NVML; empty without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return ()
    try:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(index))
            found.append(10 * major + minor)
        return tuple(sorted(set(found)))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()
