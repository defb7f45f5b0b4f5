"""The packages beside an SGLang that decide whether it starts, from their metadata: nothing is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path

from packaging.version import InvalidVersion, Version

from mlapatch.serve.backends import pinned_flashinfer

PACKAGES = (
    "torch",
    "triton",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "sgl-kernel",
    "sglang-kernel",
    "transformers",
    "nvidia-cutlass-dsl",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)


def installed(places: Iterable[str]) -> dict[str, str]:
    """Versions by package name, from the first place that has it."""
    found: dict[str, str] = {}
    for place in dict.fromkeys(places):
        if not Path(place).is_dir():
            continue
        for distribution in distributions(path=[place]):
            name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
            if name in PACKAGES:
                found.setdefault(name, distribution.version)
    return found


def problems(versions: Mapping[str, str], sglang: str = "", environment: Mapping[str, str] | None = None) -> list[str]:
    """What will not import or not start; flashinfer's own rules (jit/env.py) and SGLang's (entrypoints/engine.py)."""
    found = []
    flashinfer = versions.get("flashinfer-python", "")
    if flashinfer and not (environment or {}).get("FLASHINFER_DISABLE_VERSION_CHECK"):
        for name in ("flashinfer-cubin", "flashinfer-jit-cache"):
            have = versions.get(name)
            if have and have.partition("+")[0] != flashinfer:  # jit-cache carries a CUDA suffix: 0.6.12+cu130
                found.append(f"{name} {have} does not match flashinfer-python {flashinfer}: it refuses to import")
    try:
        wants = pinned_flashinfer(Version(sglang))
        if flashinfer and Version(sglang) >= Version("0.5.9") and Version(flashinfer) < wants:
            found.append(f"flashinfer-python {flashinfer} is older than {wants}, which SGLang {sglang} asks for")
    except InvalidVersion:
        pass
    return found
