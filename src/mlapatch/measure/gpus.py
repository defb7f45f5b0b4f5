"""What a GPU's memory can do on its data sheet, and what stock SGLang's cast kernel was seen to reach on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches

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
        Gpu("gh200", "GH200", 90, 4.0 * _TB, 96 * _GB),
        Gpu("b200", "B200", 100, 8.0 * _TB, 180 * _GB),
        Gpu("gb200", "GB200", 100, 8.0 * _TB, 186 * _GB),
        Gpu("b300", "B300", 103, 8.0 * _TB, 288 * _GB),
        Gpu("gb300", "GB300", 103, 8.0 * _TB, 288 * _GB),
        Gpu("a100", "A100 80 GB SXM", 80, 2.039 * _TB, 80 * _GB),
        Gpu("l40s", "L40S", 89, 0.864 * _TB, 48 * _GB),
        Gpu("rtx-4090", "RTX 4090", 89, 1.008 * _TB, 24 * _GB),
        Gpu("rtx-5090", "RTX 5090", 120, 1.792 * _TB, 32 * _GB),
        Gpu("gb10", "GB10 (DGX Spark)", 121, 0.273 * _TB, 128 * _GB),
    )
}


#: Compute capabilities that exist; a newer one than the newest is taken as it is given.
CAPABILITIES = (70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
_LARGEST = 199

#: Words by which nvidia-smi tells a card from the table's of that name: PCIe and NVL have other memory, MIG a part.
_FORMS = frozenset({"pcie", "nvl", "mig", "laptop", "mobile", "3e", "v2"})
_SAME = {("h200", "nvl")}  # 4.8 TB/s and 141 GB too
_MEMORY = {"a100": ("hbm2e",)} | dict.fromkeys(("h100", "h800", "h20", "gh200"), ("hbm3",))
_LPDDR = {"gh200": ("120", "240", "480")}  # a Superchip goes by the memory of its CPU
_BRANDS = ("nvidia", "geforce", "tesla")


def find(name: str) -> Gpu:
    """The GPU called `name`, also by the name that nvidia-smi prints.

    Raises:
        MlapatchError: no such GPU (exit 2); the message lists the known ones.
    """
    found = guess(name)
    if found is None:
        near = [key for key in get_close_matches(_flat(name), GPUS, cutoff=0.7) if _mistyped(_flat(name), key)]
        raise MlapatchError(
            Exit.USAGE,
            f"no GPU is called {name!r}" + (f"; did you mean '{near[0]}'?" if near else ""),
            expected=", ".join(GPUS),
            next="--sm NN names any other GPU by its compute capability; for estimate, --bandwidth TB/S --memory GB",
        )
    return found


def guess(name: str) -> Gpu | None:
    """The GPU meant by a name such as `h200`, `NVIDIA H200` or `NVIDIA RTX PRO 6000 Blackwell Server Edition`.

    What follows the name must be another word: `h200x` and `a1000` are other cards than `h200` and `a100`.
    """
    flat = _flat(name)
    hits = [gpu for key, gpu in GPUS.items() if f"{flat}-".startswith(f"{key}-")]
    return max(hits, key=lambda gpu: len(gpu.name), default=None)


def other_form(name: str, gpu: Gpu) -> list[str]:
    """The words of a name that say another memory or form than the table's `gpu`, which is of the same architecture."""
    rest = _flat(name).removeprefix(gpu.name)
    sizes = re.findall(r"(?<![a-z0-9.])(\d+)-?(?:g|gi?b)(?![a-z0-9.])", rest)
    memories = _MEMORY.get(gpu.name, ())
    return [
        *(f"{size} GB" for size in sizes if int(size) * _GB != gpu.memory and size not in _LPDDR.get(gpu.name, ())),
        *(word for word in rest.split("-") if word in _FORMS and (gpu.name, word) not in _SAME),
        *(word for word in rest.split("-") if memories and word.startswith("hbm") and word not in memories),
        *re.findall(r"(?<![a-z0-9.])\d+(?:g\.\d+gb|c)(?![a-z0-9.])", rest),  # slices: MIG's 1g.10gb, a vGPU's 40c
    ]


def is_capability(sm: int) -> bool:
    """Whether a GPU has this compute capability, or a later one may have it: 90 stands for 9.0, 120 for 12.0."""
    return sm in CAPABILITIES or CAPABILITIES[-1] < sm <= _LARGEST


def stand_in(gpu: str | None, sm: int | None) -> tuple[int, str] | None:
    """The compute capability that `--gpu` and `--sm` give, and the option that gave it; None without either.

    Raises:
        MlapatchError: no such GPU, or two that contradict each other (exit 2).
    """
    if gpu is None:
        return None if sm is None else (sm, f"--sm {sm}")
    known = find(gpu)
    if sm is not None and sm != known.sm:
        raise MlapatchError(
            Exit.USAGE,
            "--gpu and --sm contradict each other",
            expected=f"--sm {known.sm}, which {known.title} is",
            found=f"--gpu {gpu} --sm {sm}",
            next="give one of them",
        )
    return known.sm, f"--gpu {gpu}"


def _mistyped(flat: str, key: str) -> bool:
    """Whether one may be a typing error for the other. RTX 3090 and RTX A6000 are none: they are other cards."""
    if re.findall(r"\d+", flat) != re.findall(r"\d+", key):
        return False
    return SequenceMatcher(None, _letters(flat), _letters(key)).ratio() > 0.8


def _letters(word: str) -> str:
    """Those before the first digit."""
    return re.sub(r"\d.*|-", "", word)


def _flat(name: str) -> str:
    """`nvidia-rtx-5090` and `NVIDIA GeForce RTX 5090` as the table has it."""
    words = name.lower().replace("_", " ").replace("-", " ").split()
    while words and words[0] in _BRANDS:
        del words[0]
    return "-".join(words)
