"""The fused-decode kernel in Triton's interpreter, by tuning, heads and FP8 kind, against float64: one JSON line each.

Run as a program with TRITON_INTERPRET=1 (test_fused_tunings.py does): `python -m tests.verify.fused_tunings`. On a GPU,
compiled, with overlapped launches from SM90 on: `python -m tests.verify.fused_tunings --device cuda`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import torch

from mlapatch.verify.harness.interpreter import prepare_once_a_launch

ROOT = Path(__file__).parents[2]
LENGTHS = (3, 0, 16, 17, 70, 1, 0)
LONG = (4250,)  # 266 pieces: more than the second kernel takes at once
MANY = (5, 0, 40, 1, 17) * 8  # more requests than a warp has lanes
SLOTS, SCALE = 4608, 0.06
#: tokens of each request, tile, warps, programs a multiprocessor (there are two of those here), heads, FP8 kind, and
#: what the query is multiplied with: BF16 reaches far beyond FP16, logits of thousands leave one token all the weight
CASES = (
    (LENGTHS, 16, 4, 2, 8, torch.float8_e4m3fn, 1.0),
    (LENGTHS, 16, 2, 5, 3, torch.float8_e4m3fn, 1.0),
    (LENGTHS, 32, 4, 1, 9, torch.float8_e4m3fn, 1.0),
    (LENGTHS, 32, 2, 3, 10, torch.float8_e5m2, 1.0),
    (LENGTHS, 16, 4, 2, 2, torch.float8_e4m3fn, 1e-30),
    (LENGTHS, 16, 4, 2, 2, torch.float8_e4m3fn, 3e2),
    (LENGTHS, 16, 4, 2, 2, torch.float8_e4m3fn, 1e30),
    (LONG, 16, 2, 140, 1, torch.float8_e4m3fn, 1.0),
    (MANY, 16, 2, 12, 1, torch.float8_e4m3fn, 1.0),
)


def expected(
    query: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, scale: float = SCALE
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention [heads, 512] and base-2 log-sum-exp [heads] of one request."""
    key = pool[slots.long(), 0].double()
    score = query.double() @ key.T * scale
    return torch.softmax(score, -1) @ key[:, :512], torch.logsumexp(score, -1) / torch.log(torch.tensor(2.0)).item()


def overlaps(device: str) -> bool:
    """Whether the device launches a kernel while the one before still runs."""
    return device != "cpu" and torch.cuda.get_device_capability() >= (9, 0)


Case = tuple[tuple[int, ...], int, int, int, int, torch.dtype, float]


def error_of(module: ModuleType, case: Case, device: str) -> dict[str, float | bool]:
    """Largest relative error of the output and of the log-sum-exp, and whether empty requests are zeros."""
    lengths, tile, warps, programs, heads, kind, factor = case
    torch.manual_seed(7)
    pool = torch.full((SLOTS, 1, 576), float("nan")).to(kind)
    order = torch.randperm(SLOTS)[: sum(lengths)].int()
    pool[order.long()] = torch.randn(len(order), 1, 576).to(kind)
    pool, order = pool.to(device), order.to(device)
    query = (torch.randn(len(lengths), heads, 576) * factor).to(torch.bfloat16).to(device)
    indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    out = torch.full((len(lengths), heads, 512), float("nan"), dtype=torch.bfloat16, device=device)
    tuning = module.FusedTuning(tile, warps, 1, programs, overlap=overlaps(device))
    q, rope = query[..., :512].contiguous(), query[..., 512:].contiguous()
    lse = module.fused_attention(
        q, rope, pool[..., :512], pool[..., 512:], order, indptr, len(lengths), SCALE, out, tuning
    )
    worst, worst_lse, zeros = 0.0, 0.0, True
    for i, length in enumerate(lengths):
        if not length:
            zeros = zeros and bool((out[i] == 0).all()) and bool((lse[i] == -float("inf")).all())
            continue
        wanted, wanted_lse = expected(query[i], pool, order[indptr[i] : indptr[i + 1]])
        worst = max(worst, ((out[i].double() - wanted).norm() / wanted.norm()).item())
        apart = (lse[i].double() - wanted_lse).abs() / wanted_lse.abs().clamp(min=1.0)
        worst_lse = max(worst_lse, apart.max().item())
    return {"error": worst, "lse_error": worst_lse, "zeros": zeros}


def one_request(
    module: ModuleType, query: torch.Tensor, pool: torch.Tensor, tile: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [heads, 512] and log-sum-exp [heads] of query [1, heads, 576] over all of the pool, in float64."""
    device, tokens = pool.device, len(pool)
    order = torch.arange(tokens, dtype=torch.int32, device=device)
    indptr = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    q, rope = query[..., :512].contiguous(), query[..., 512:].contiguous()
    out = torch.full(q.shape, float("nan"), dtype=torch.bfloat16, device=device)
    tuning = module.FusedTuning(tile, 4, 1, 1, overlap=overlaps(device.type))
    lse = module.fused_attention(q, rope, pool[..., :512], pool[..., 512:], order, indptr, 1, scale, out, tuning)
    return out[0].double(), lse[0].double()


def error_of_tied_pieces(module: ModuleType, device: str) -> dict[str, float | bool]:
    """Two pieces, of 32 tokens and of one, whose logits are all 2**25: a log-sum-exp of that size cannot tell."""
    pool = torch.zeros(33, 1, 576)
    pool[:, 0, 0] = 1.0
    pool[32, 0, 500] = 448.0
    pool = pool.to(torch.float8_e4m3fn).to(device)
    query = torch.zeros(1, 1, 576, dtype=torch.bfloat16, device=device)
    query[0, 0, 0] = 2.0**25
    out, lse = one_request(module, query, pool, tile=16, scale=1.0)
    wanted = pool[:, 0, :512].double().mean(0)
    error = ((out[0] - wanted).norm() / wanted.norm()).item()
    return {"error": error, "lse_error": abs(lse.item() / (2.0**25 * 1.4426950408889634) - 1), "zeros": True}


def error_of_sink(module: ModuleType, device: str) -> dict[str, float | bool]:
    """A first token without a value, 18 nats above 31 others: as float16 their weights would be none."""
    torch.manual_seed(7)
    tokens, heads = 32, 8
    pool = torch.randn(tokens, 1, 576)
    pool[..., 512:] = 0.0
    pool[0] = 0.0
    pool[0, 0, 512] = 18.0
    pool = pool.to(torch.float8_e4m3fn).to(device)
    query = (torch.randn(1, heads, 576) * 0.05).to(torch.bfloat16)
    query[..., 512] = 1.0
    query = query.to(device)
    out, lse = one_request(module, query, pool, tile=32, scale=1.0)
    wanted, wanted_lse = expected(query[0], pool, torch.arange(tokens, device=device), scale=1.0)
    error = ((out - wanted).norm() / wanted.norm()).item()
    return {"error": error, "lse_error": ((lse - wanted_lse) / wanted_lse).abs().max().item(), "zeros": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    if device == "cpu":
        prepare_once_a_launch()
    sys.path.append(str(ROOT / "bench" / "gpu"))
    snippets = importlib.import_module("snippets")
    module = snippets.load(snippets.FUSED_DECODE)
    for case in CASES:
        print(json.dumps(error_of(module, case, device)), flush=True)
    print(json.dumps(error_of_tied_pieces(module, device)), flush=True)
    print(json.dumps(error_of_sink(module, device)), flush=True)


if __name__ == "__main__":
    main()
