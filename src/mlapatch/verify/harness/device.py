"""Where a scenario runs: a CUDA device as it is, or a CPU that answers for one.

On the CPU every `device="cuda"` of SGLang's source means the CPU, pinned memory is plain memory, and `torch.cuda`
answers the few questions that a backend asks. On both, new uninitialised tensors hold NaN, so that a result cannot
depend on leftovers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CAPABILITY = (9, 0)
"""What the CPU answers for the compute capability: Hopper, where every patch may apply."""

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP8_NAN = 0x7F
"""A NaN in e4m3fn and in e5m2 alike."""

GARBAGE_INDEX = 0x3FFFFFFF
"""Uninitialised integers: as an index, out of range everywhere."""

_UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Clock:
    """Whether a graph is being captured; `torch.cuda.is_current_stream_capturing` reads it on the CPU."""

    capturing = False


def fill_nan(tensor: torch.Tensor) -> None:
    """NaN in every element of a floating tensor, in place; FP8 through its bytes."""
    if tensor.dtype in FP8:
        tensor.view(torch.uint8).fill_(FP8_NAN)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))


def fill_garbage(tensor: torch.Tensor) -> None:
    """What uninitialised memory may hold at worst: NaN, or an index out of range."""
    if tensor.dtype in (torch.int32, torch.int64):
        tensor.fill_(GARBAGE_INDEX)
    else:
        fill_nan(tensor)


class Placement(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Sends CUDA to the CPU where there is no GPU, and fills uninitialised tensors."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.cpu = device == "cpu"

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if self.cpu:
            if name in ("pin_memory", "cuda"):
                return args[0]
            kwargs.pop("pin_memory", None)
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if name in ("to", "cpu"):
                return self._move(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if name in _UNINITIALISED and isinstance(result, torch.Tensor) and result.numel():
            fill_garbage(result)
        return result

    @staticmethod
    def _move(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A move between GPU and host copies, so that what the host keeps does not follow the device's buffer."""
        to_host = name == "cpu" or any(str(a) == "cpu" for a in args if isinstance(a, (str, torch.device)))
        result = func(*("cpu" if _is_cuda(a) else a for a in args), **kwargs)
        return result.clone() if to_host and result is args[0] else result


def _is_cuda(device: object) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def install(device: str) -> Placement:
    """Enters the placement for the rest of the process and, on the CPU, answers for `torch.cuda`."""
    if device == "cpu":
        properties = SimpleNamespace(multi_processor_count=2, major=CAPABILITY[0], minor=CAPABILITY[1], name="cpu")
        stream = SimpleNamespace(cuda_stream=0, wait_stream=lambda _: None, synchronize=lambda: None)
        answers: dict[str, Any] = {
            "is_current_stream_capturing": lambda: Clock.capturing,
            "get_device_capability": lambda *_: CAPABILITY,
            "get_device_properties": lambda *_: properties,
            "get_device_name": lambda *_: "CPU standing in for a GPU",
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "current_stream": lambda *_: stream,
            "synchronize": lambda *_: None,
        }
        for name, answer in answers.items():
            setattr(torch.cuda, name, answer)
    placement = Placement(device)
    enter: Any = placement.__enter__  # torch leaves it untyped
    enter()
    return placement
