"""The packages beside an SGLang that decide whether it starts, from their metadata: nothing is imported."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from mlapatch.serve.backends import pinned_flashinfer

PACKAGES = (
    "torch",
    "numpy",
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

_MODULES = {
    "torch": "torch",
    "numpy": "numpy",
    "transformers": "transformers",
    "flashinfer-python": "flashinfer",
    "sgl-kernel": "sgl_kernel",
    "sglang-kernel": "sgl_kernel",
}
"""What SGLang imports at start, by the name under which it asks for it."""

FLASHINFER, KERNELS = "flashinfer-python", ("sgl-kernel", "sglang-kernel")


@dataclass(frozen=True)
class Missing:
    """A package that SGLang asks for and its Python does not have.

    `wants` as in its metadata: `==0.6.3`, `@ URL`, or ''.
    """

    name: str
    wants: str
    python: str

    @property
    def text(self) -> str:
        """What is missing, where, and what SGLang asks for."""
        wants = self.wants.removeprefix("==").removeprefix("@ ")
        asked = f"; SGLang asks for {wants}" if wants else "; SGLang imports it"
        return f"{self.name} is not installed in {self.python}{asked}"

    @property
    def next(self) -> str:
        """The command that installs it."""
        space = " " if self.wants.startswith("@") else ""
        return f"{shlex.quote(self.python)} -m pip install '{self.name}{space}{self.wants}'"


def missing(
    python: str, places: Sequence[str], requires: Iterable[str], have: Mapping[str, str]
) -> tuple[Missing, ...]:
    """What SGLang asks for and an interpreter that looks in these places would not find, not even without metadata.

    `have` is what `installed` found there. `requires` are the `Requires-Dist` of its metadata; without any (a checkout)
    torch and numpy, as every release has.
    """
    found = []
    for line in list(requires) or ["torch", "numpy"]:
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        name = canonicalize_name(wanted.name)
        module = _MODULES.get(name)
        if module is None or name in have or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        if not any((Path(place) / shape).exists() for place in places for shape in (module, f"{module}.py")):
            wants = f"@ {wanted.url}" if wanted.url else str(wanted.specifier)
            found.append(Missing(str(name), wants, python))
    return tuple(found)


def installed(places: Iterable[str]) -> dict[str, str]:
    """Versions by package name, from the first place that has it."""
    found: dict[str, str] = {}
    for place in dict.fromkeys(places):
        if not Path(place).is_dir():
            continue
        for distribution in distributions(path=[place]):
            try:
                name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
                if name in PACKAGES:
                    found.setdefault(name, distribution.version)
            except (UnicodeDecodeError, OSError):  # an old egg's Latin-1, or another user's
                continue
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
