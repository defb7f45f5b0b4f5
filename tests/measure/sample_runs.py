"""Runs as the commands keep them, with the figures of one H200 (SGLang 0.5.15.post1), for compare and report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlapatch.commands.trace import trace
from mlapatch.measure.metrics import Metric
from mlapatch.measure.runs import Store
from tests.measure.synthetic import Scene

TPOT = {"stock": (70.5, 71.2, 73.8), "patched": (5.24, 6.32, 11.1)}
RATE = {"stock": (14.1, 216.0), "patched": (190.0, 1538.0)}


def server(label: str, pool: int = 495_552) -> dict[str, Any]:
    return {
        "server": {
            "url": "http://127.0.0.1:30011", "api": "sglang", "version": "0.5.15.post1", "model": "/models/glm-5-like",
            "pool_tokens": pool, "page_size": 1, "tp": 1, "attention_backend": "flashinfer", "gpu": "NVIDIA H200",
            "kv_cache_dtype": "fp8_e4m3", "cuda_graphs": True,
        },
        "patches": {"applied": ["none"] if label == "stock" else ["active-cast"], "digest": f"{label}-0123456789"},
        "client": {"python": "3.12.3", "system": "Linux"},
    }  # fmt: skip


def fill(db: Path, folder: Path, *, pool: int = 495_552, layers: int = 20) -> None:
    """Two benches and two profiles, stock and patched."""
    with Store(db) as store:
        for label in ("stock", "patched"):
            metrics, cases = [], []
            for length, tpot in zip((512, 8192, 65_536), TPOT[label], strict=True):
                name = f"{length:,} in, 128 out, 1 stream"
                cases.append({"case": name, "input": length, "output": 128, "concurrency": 1})
                metrics.append(Metric(name, "TPOT", "ms", "lower", (tpot * 0.99, tpot, tpot * 1.01)))
                metrics.append(Metric(name, "TTFT", "ms", "lower", (120.0, 121.0, 119.0)))
            for streams, rate in zip((1, 16), RATE[label], strict=True):
                name = f"4,096 in, 128 out, {streams} streams"
                cases.append({"case": name, "input": 4096, "output": 128, "concurrency": streams})
                metrics.append(Metric(name, "output", "tok/s", "higher", (rate * 0.98, rate, rate * 1.02)))
            setup = server(label, pool if label == "patched" else 495_552)
            run = store.start("bench", setup | {"load": {"repeats": 3, "output": 128}}, label)
            notes = ["<b>not markup</b> & co"] if label == "stock" else []
            store.finish(run, {"metrics": [m.as_dict() for m in metrics], "cases": cases, "notes": notes})
        for label, us in (("stock", 828.0), ("patched", None)):
            scene = Scene(layers=layers, steps=4, cast_us=us, patch_us=2.4)
            path = scene.write(folder / f"{label}-TP-0.trace.json.gz")
            data: Any = trace(files=[path]).data
            rank = data["ranks"][0]
            cast = rank["cast"]["ms_per_step"] if rank["cast"] else 0.0
            figures = [
                Metric("decode step", "step", "ms", "lower", (rank["step_ms"],)),
                Metric("decode step", "KV-pool cast", "ms", "lower", (cast,)),
            ]
            run = store.start("profile", server(label), label)
            store.finish(run, {"trace": data, "metrics": [figure.as_dict() for figure in figures]})
