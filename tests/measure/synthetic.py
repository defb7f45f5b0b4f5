"""Chrome traces as Kineto writes them for an SGLang decode server, generated as a stream."""

from __future__ import annotations

import gzip
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

CAST = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)"
    "::{lambda()#3}::operator()() const::{lambda()#12}::operator()() const::{lambda(c10::BFloat16)#1}, "
    "std::array<char*, 2ul>, 4, TrivialOffsetCalculator<1, unsigned int>, TrivialOffsetCalculator<1, unsigned int>, "
    "at::native::memory::LoadWithCast<1>, at::native::memory::StoreWithCast<1> >(int, "
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const)"
)
ATTENTION = "void flashinfer::mla::BatchMLAPagedAttentionKernel<flashinfer::mla::KernelTraits<true, 2u, 8u> >(Params)"
ACTIVE = "active_cast_kernel"

# name, us, grid: what runs in a layer besides the cast. The small copy has the cast's own template.
LAYER: tuple[tuple[str, float, int], ...] = (
    ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)", 3.0, 1),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 9.0, 132),
    ("void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<true, 64u>(__nv_bfloat16*)", 3.0, 4),
    ("set_mla_kv_buffer_kernel", 3.0, 5),
    (CAST, 4.6, 9),
    (ATTENTION, 20.0, 132),
    ("nvjet_tst_128x8_64x12_2x1_v_bz_TNN", 11.0, 132),
    ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>(sglang::RankData*)", 8.0, 36),
    ("void cutlass::device_kernel<MoeGroupGemmKernel>(Params)", 40.0, 148),
)
STEP: tuple[tuple[str, float, int], ...] = (
    ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)", 4.0, 3),
    ("void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)", 3.0, 2),
    ("nvjet_tst_64x32_lm_head_TNT", 60.0, 250),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float> > >(R)", 12.0, 8),
    ("create_flashinfer_kv_indices_triton", 3.0, 1),
)


@dataclass
class Scene:
    """What to generate. `cast_us` None means a patched server; times in us."""

    layers: int = 78
    steps: int = 6
    tokens: int = 495_552
    cast_us: float | None = 828.0
    graphs: bool = True
    shapes: bool = False
    spans: bool = False
    cpu: bool = True
    prefill: bool = False
    patch_us: float = 0.0
    kernel_gap: float = 1.0
    step_gap: float = 150.0
    overlap_us: float = 0.0
    pid: object = 0
    sms: tuple[int, int] = (9, 0)
    wall: float = 0.0
    cast_total: float = 0.0

    def events(self) -> Iterator[dict[str, Any]]:
        """All events; afterwards `wall` is the length of a steady step and `cast_total` the cast's time in all."""
        clock, op = 5_000_000.125, 1
        if self.prefill:
            for _ in range(2):
                for layer in range(self.layers):
                    for name, us, grid in LAYER[:4]:
                        yield self._kernel(name, clock, us * 30, grid * 64, op, op)
                        clock, op = clock + us * 30 + 1, op + 1
                    yield self._kernel("void flash::FlashAttnFwdSm90<Ragged>(Params)", clock, 300.0, 512, op, layer)
                    clock, op = clock + 301, op + 1
                for name, us, grid in STEP:
                    yield self._kernel(name, clock, us, grid, op, op)
                    clock, op = clock + us + 1, op + 1
            clock += 5000
        for number in range(self.steps):
            begin, graph = clock, op
            if self.graphs:
                yield self._host("cudaGraphLaunch", clock - 40, 30.0, graph)
            for _ in range(self.layers):
                for name, us, grid in LAYER:
                    if name == ATTENTION:
                        clock, op = yield from self._prepare(clock, graph, op)
                    yield from self._one(name, clock, us, grid, graph, op)
                    clock, op = clock + us + self.kernel_gap, op + 1
            if self.spans:
                yield self._span(f"step[DECODE bs={1}]", begin - 30, clock - begin, "user_annotation")
                yield self._span(f"step[DECODE bs={1}]", begin, clock - begin, "gpu_user_annotation")
            for name, us, grid in STEP:
                yield from self._one(name, clock, us, grid, op, op, alone=True)
                clock, op = clock + us + self.kernel_gap, op + 1
            clock += self.step_gap
            if number == 0:
                self.wall = clock - begin
            op += 1

    def _prepare(self, clock: float, graph: int, op: int) -> Generator[dict[str, Any], None, tuple[float, int]]:
        if self.cast_us is not None:
            yield from self._one(CAST, clock, self.cast_us, self.tokens * 576 // 512, graph, op)
            self.cast_total += self.cast_us
            if self.overlap_us:
                yield self._kernel("side_stream_gemm", clock + 1, self.overlap_us, 64, op, graph)
            clock += self.cast_us + self.kernel_gap
        elif self.patch_us:
            yield from self._one(ACTIVE, clock, self.patch_us, 1056, graph, op)
            clock += self.patch_us + self.kernel_gap
        return clock, op + 1

    def _one(
        self, name: str, ts: float, us: float, grid: int, graph: int, op: int, *, alone: bool = False
    ) -> Iterator[dict[str, Any]]:
        eager = alone or not self.graphs
        if eager and self.cpu:
            if name == CAST:
                yield self._copy(ts - 20, op, big=grid > 100_000)
            yield self._host("cudaLaunchKernel", ts - 10, 4.0, op)
        yield self._kernel(name, ts, us, grid, op, op if eager else graph)

    def _kernel(self, name: str, ts: float, us: float, grid: int, op: int, correlation: int) -> dict[str, Any]:
        return {
            "ph": "X", "cat": "kernel", "name": name, "pid": self.pid, "tid": 7, "ts": ts, "dur": us,
            "args": {
                "External id": op, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": correlation,
                "registers per thread": 32, "shared memory": 0, "blocks per SM": 0.5, "warps per SM": 2.0,
                "grid": [grid, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 0,
            },
        }  # fmt: skip

    def _host(self, name: str, ts: float, us: float, correlation: int) -> dict[str, Any]:
        return {
            "ph": "X", "cat": "cuda_runtime", "name": name, "pid": 4242, "tid": 4242, "ts": ts, "dur": us,
            "args": {"External id": correlation, "cbid": 311, "correlation": correlation},
        }  # fmt: skip

    def _copy(self, ts: float, op: int, *, big: bool) -> dict[str, Any]:
        args: dict[str, Any] = {"External id": op, "Ev Idx": op}
        if self.shapes:
            rows = self.tokens if big else 8
            args["Input Dims"] = [[rows, 1, 576], [rows, 1, 576], []]
            args["Input type"] = ["c10::BFloat16", "c10::Float8_e4m3fn" if big else "float", "Scalar"]
        return {
            "ph": "X", "cat": "cpu_op", "name": "aten::copy_", "pid": 4242, "tid": 4242, "ts": ts, "dur": 9.0,
            "args": args,
        }  # fmt: skip

    def _span(self, name: str, ts: float, us: float, category: str) -> dict[str, Any]:
        pid = self.pid if category.startswith("gpu") else 4242
        return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": 7, "ts": ts, "dur": us, "args": {}}

    def write(self, path: Path, *, limit: int = 0) -> Path:
        """Write the trace; `limit` repeats its events until that many bytes of JSON are out."""
        with gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w") as handle:
            file = cast("TextIO", handle)
            device = {"id": 0, "name": "NVIDIA H200", "computeMajor": self.sms[0], "computeMinor": self.sms[1]}
            file.write('{\n  "schemaVersion": 1,\n  "deviceProperties": [\n    ')
            file.write(json.dumps(device) + '\n  ],\n  "traceEvents": [\n')
            size, first = 0, True
            while first or size < limit:
                for event in self.events():
                    text = ("" if first else ",\n") + kineto(event)
                    file.write(text)
                    size, first = size + len(text), False
            file.write('\n  ],\n  "traceName": "/tmp/x.trace.json",\n  "displayTimeUnit": "ms"\n}\n')
        return path


def kineto(event: dict[str, Any]) -> str:
    """An event in Kineto's layout: the head on two lines, args indented."""
    head = {key: value for key, value in event.items() if key not in ("args", "ts", "dur")}
    args = ",\n      ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in event["args"].items())
    return (
        f"  {{\n    {json.dumps(head)[1:-1]},\n"
        f'    "ts": {event["ts"]:.3f}, "dur": {event["dur"]:.3f},\n    "args": {{\n      {args}\n    }}\n  }}'
    )
