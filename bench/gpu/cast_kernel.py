#!/usr/bin/env python3
"""Time the cast of the active slots alone: 78 layers, graph replay, by rows a program, warps and FP8 conversion.

python3 bench/gpu/cast_kernel.py [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attention import replay_ms
from snippets import CAST_SLOTS, load

SLOTS, WIDTH, LAYERS = 495552, 576, 78


def cast_all(kernel: Any, grid: Any, pools: Any, bits: int, after: tuple[Any, ...], shape: dict[str, Any]) -> None:
    """One step: every layer's active slots."""
    for pool in pools:
        kernel[grid](pool.view(torch.uint8) if bits else pool, *after, **shape)


def main() -> None:
    """Print a line a configuration: ms a step for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--snippet", type=Path, default=CAST_SLOTS)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 8])
    args = parser.parse_args()
    kernel = load([args.snippet]).cast_slots_kernel
    pools = [
        torch.randn(SLOTS, 1, WIDTH, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn) for _ in range(LAYERS)
    ]
    out = torch.zeros(SLOTS, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(SLOTS, device="cuda").int()
    shared = torch.cat([torch.cat([slots[:4096], slots[4096 + 128 * i : 4224 + 128 * i]]) for i in range(16)])
    cases = {"1x512": (1, 512, slots), "1x8192": (1, 8192, slots), "1x65536": (1, 65536, slots)}
    cases |= {"16x4224": (16, 4224, slots), "16x4224 shared": (16, 4224, shared)}
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    results = []
    for bits, rows, warps, per_sm in itertools.product((0, 4), args.rows, args.warps, (8, 16)):
        if bits == 4 and (rows != 8 or per_sm != 8):
            continue
        times = {}
        for name, (requests, length, indices) in cases.items():
            indptr = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * length
            out.fill_(float("nan"))

            grid = (-(-per_sm * sms // requests), requests)
            shape = {"PAGE": 1, "COMPACT": False, "BITS": bits, "PEERS": requests > 1, "MAIN": 512, "REST": 64}
            shape |= {"BLOCK_REST": 64, "ROWS": rows, "num_warps": warps}
            args_after = (out, indices, indptr, requests, indices.numel(), SLOTS, WIDTH, WIDTH)
            times[name] = round(replay_ms(partial(cast_all, kernel, grid, pools, bits, args_after, shape))[0], 3)
            live = indices[: requests * length].long()
            assert torch.equal(out[live], pools[-1][live].to(torch.bfloat16)), name
        results.append({"bits": bits, "rows": rows, "warps": warps, "programs_per_sm": per_sm, "ms": times})
        print(f"bits={bits} rows={rows} warps={warps} per_sm={per_sm} {times}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
