"""Capture and replay: a CUDA graph, or on the CPU a log of the device's work with the host's decisions frozen in it.

A CPU capture runs the forward once under a dispatch mode that logs each tensor operation, each Triton launch and each
attention kernel, with the very tensors they used. A replay performs the logged work again, in order, into the same
tensors. Python does not run again, so a size, a branch or a grid that the host chose at capture stays as it was, as on
a GPU. What a capture forbids on a GPU (reading a value back to the host, results whose shape depends on data) is
refused here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from .device import Clock, fill_garbage

_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}


class CaptureError(RuntimeError):
    """The forward did something that a CUDA graph capture forbids."""


class Log(TorchDispatchMode):  # type: ignore[no-untyped-call, misc, unused-ignore]
    """The device work of one capture, in order."""

    current: Log | None = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.work: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            raise CaptureError(
                f"operation not permitted when stream is capturing: {name} needs the device's values on the host"
            )
        result = func(*args, **kwargs)
        returns = func._schema.returns
        if name in _EMPTY:
            self.work.append(lambda: fill_garbage(result))
        elif func._schema.is_mutable:
            self.work.append(lambda: func(*args, **kwargs))
        elif not any(r.alias_info for r in returns):
            recorded = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
            self.work.append(lambda: _again(func, args, kwargs, recorded))
        return result


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorded: list[torch.Tensor]) -> None:
    fresh = [t for t in tree_flatten(func(*args, **kwargs))[0] if isinstance(t, torch.Tensor)]
    for into, value in zip(recorded, fresh, strict=True):
        into.copy_(value)


def launch(kernel: Callable[[], None]) -> None:
    """Runs one kernel that is not a torch operation, and logs it when a capture is on."""
    log = Log.current
    if log is None:
        kernel()
        return
    log.work.append(kernel)
    with torch.utils._python_dispatch._disable_current_modes():
        kernel()


class CpuGraph:
    """A captured forward on the CPU."""

    def __init__(self) -> None:
        self._log = Log()

    def capture(self, forward: Callable[[], Any]) -> Any:
        """Runs `forward` once, logging; its result keeps its tensors over every replay."""
        Log.current, Clock.capturing = self._log, True
        try:
            with self._log:
                return forward()
        finally:
            Log.current, Clock.capturing = None, False

    def replay(self) -> None:
        """Does the logged work again."""
        for work in self._log.work:
            work()


class CudaGraph:
    """A captured forward on a GPU."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, forward: Callable[[], Any]) -> Any:
        """Captures `forward`; its result keeps its tensors over every replay."""
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            return forward()

    def replay(self) -> None:
        """Replays, and waits for the end."""
        self._graph.replay()
        torch.cuda.synchronize()


def new_graph(device: str) -> CpuGraph | CudaGraph:
    """A graph for that device, not yet captured."""
    return CpuGraph() if device == "cpu" else CudaGraph()


def log_triton_launches() -> None:
    """Makes every interpreted Triton launch part of the log of the capture that is on, if any."""
    from triton.runtime import interpreter

    run = interpreter.InterpretedFunction.run

    def logged(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        if warmup or Log.current is None:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        return launch(lambda: run(self, *args, grid=grid, warmup=False, **kwargs))

    interpreter.InterpretedFunction.run = logged
