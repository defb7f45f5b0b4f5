"""What a GPU's memory can do on its data sheet, and what stock SGLang's cast kernel was seen to reach on it."""

from __future__ import annotations

from dataclasses import dataclass

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit


@dataclass(frozen=True)
class Gpu:
    """Bandwidth in bytes/s, memory in bytes. `cast_rate` is None where nobody measured the stock cast."""

    name: str
    title: str
    sm: int
    bandwidth: float
    memory: float
    cast_rate: float | None = None
    source: str = "data sheet"


_TB, _GB = 1e12, 1e9

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # 66.8 GB in 64.6 ms a step: the profile that found the cast (GLM-5-NVFP4, TP8).
        Gpu("rtx-pro-6000", "RTX PRO 6000 Blackwell", 120, 1.792 * _TB, 96 * _GB, 66.8e9 / 64.6e-3, "profiled"),
        # 0.99 TB/s measured on one H200 with SGLang 0.5.15.post1; sgl-project/sglang#35291 has 1.0 TB/s on another.
        Gpu("h200", "H200", 90, 4.8 * _TB, 141 * _GB, 0.99 * _TB, "measured"),
        Gpu("h100", "H100 SXM", 90, 3.35 * _TB, 80 * _GB),
        Gpu("h800", "H800", 90, 3.35 * _TB, 80 * _GB),
        Gpu("h20", "H20", 90, 4.0 * _TB, 96 * _GB),
        Gpu("b200", "B200", 100, 8.0 * _TB, 180 * _GB),
        Gpu("b300", "B300", 103, 8.0 * _TB, 288 * _GB),
        Gpu("a100", "A100 80 GB SXM", 80, 2.039 * _TB, 80 * _GB),
        Gpu("l40s", "L40S", 89, 0.864 * _TB, 48 * _GB),
        Gpu("rtx-5090", "RTX 5090", 120, 1.792 * _TB, 32 * _GB),
        Gpu("gb10", "GB10 (DGX Spark)", 121, 0.273 * _TB, 128 * _GB),
    )
}


def find(name: str) -> Gpu:
    """The GPU called `name`, also by the name that nvidia-smi prints.

    Raises:
        MlapatchError: no such GPU (exit 2); the message lists the known ones.
    """
    found = guess(name)
    if found is None:
        raise MlapatchError(
            Exit.USAGE,
            f"no GPU is called {name!r}",
            expected=", ".join(GPUS),
            next="--sm NN names any other GPU by its compute capability; for estimate, --bandwidth TB/S --memory GB",
        )
    return found


def guess(name: str) -> Gpu | None:
    """The GPU meant by a name such as `h200`, `NVIDIA H200` or `NVIDIA RTX PRO 6000 Blackwell Server Edition`."""
    flat = name.lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")
    if flat in GPUS:
        return GPUS[flat]
    hits = [gpu for key, gpu in GPUS.items() if flat.startswith(key) or f"-{key}-" in f"-{flat}-"]
    return max(hits, key=lambda gpu: len(gpu.name), default=None)
