"""The machine's GPUs through NVML: memory, processes, load. Every question may go unanswered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuState:
    """One GPU; memory in bytes, `sm` as 90 or 120, `pids` those of compute processes that NVML may show here."""

    index: int
    uuid: str
    name: str
    sm: int
    used: int
    total: int
    load: int | None
    pids: tuple[int, ...]


@contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library, an old one: the same to us
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def look(environment: Mapping[str, str]) -> list[GpuState] | None:
    """The GPUs that a process with this environment would see, or None without a driver."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        try:
            states = [_state(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        except Exception:
            return None
    return visible(states, environment.get("CUDA_VISIBLE_DEVICES"))


def visible(states: list[GpuState], chosen: str | None) -> list[GpuState]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order, cut at the first unknown one as CUDA does."""
    if chosen is None:
        return states
    kept = []
    for word in filter(None, (word.strip() for word in chosen.split(","))):
        match = [s for s in states if str(s.index) == word or (word.startswith("GPU-") and s.uuid.startswith(word))]
        if not match:
            break
        kept.append(match[0])
    return kept


def load_percent(environment: Mapping[str, str]) -> int | None:
    """The mean load of the visible GPUs, for a silence report."""
    loads = [state.load for state in look(environment) or () if state.load is not None]
    return round(sum(loads) / len(loads)) if loads else None


def _state(nvml: Any, index: int) -> GpuState:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)

    def maybe(question: Any) -> Any:
        try:
            return question()
        except nvml.NVMLError:
            return None

    running = maybe(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    load = maybe(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    return GpuState(
        index=index,
        uuid=uuid.decode() if isinstance(uuid, bytes) else uuid,
        name=name.decode() if isinstance(name, bytes) else name,
        sm=10 * major + minor,
        used=int(memory.used),
        total=int(memory.total),
        load=load,
        pids=tuple(process.pid for process in running),
    )
