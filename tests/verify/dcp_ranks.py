"""Decode context parallelism with all its ranks: SGLang's own kernels share the tokens out and merge the results.

Run as a program with TRITON_INTERPRET=1 (test_dcp.py does): `python -m tests.verify.dcp_ranks KERNELS.py RANKS`, with
the release's file of DCP kernels. fused-decode's kernel computes each rank's part in between. One JSON line: the
largest relative error of an output against float64 over all tokens, of the merged log-sum-exp, and whether a rank had
requests without tokens.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import torch

from mlapatch.verify.harness.interpreter import prepare_once_a_launch
from tests.verify.fused_tunings import ROOT, SCALE, expected

LENGTHS = (1, 2, 7, 40, 131)
HEADS = 4


def share(
    kernels: ModuleType, ids: torch.Tensor, lengths: list[int], rank: int, ranks: int
) -> tuple[torch.Tensor, list[int]]:
    """A rank's rows of its own pool, request by request, and how many each request has: what a plan is given."""
    own = [max((length - rank + ranks - 1) // ranks, 0) for length in lengths]
    starts, own_starts = (torch.tensor([0, *one]).cumsum(0).int() for one in (lengths, own))
    found = torch.empty(sum(own), dtype=torch.int32)
    blocks = max(1, -(-max(own) // 128))
    kernels.update_kv_lens_and_indices[(len(lengths), blocks)](
        torch.tensor(lengths, dtype=torch.int32),
        starts,
        ids,
        torch.tensor(own, dtype=torch.int32),
        own_starts,
        found,
        dcp_rank=rank,
        dcp_world_size=ranks,
        BLOCK_SIZE=128,
    )
    return found, own


def main() -> None:
    path, ranks = Path(sys.argv[1]), int(sys.argv[2])
    divided = "kv_values // dcp_world_size" in path.read_text(encoding="utf-8")  # later releases translate after it
    prepare_once_a_launch()
    sys.path.append(str(ROOT / "bench" / "gpu"))
    snippets = importlib.import_module("snippets")
    kernels, fused = snippets.load([path]), snippets.load(snippets.FUSED_DECODE)
    torch.manual_seed(11)
    lengths, slots = list(LENGTHS), 64 * ranks
    # A token's id is its rank's slot times the ranks, plus its rank: its position modulo the ranks.
    columns = [torch.randperm(slots) for _ in range(ranks)]
    ids, taken = [], [0] * ranks
    for length in lengths:
        for position in range(length):
            rank = position % ranks
            ids.append(int(columns[rank][taken[rank]]) * ranks + rank)
            taken[rank] += 1
    where = torch.tensor(ids, dtype=torch.int32)
    everything = torch.randn(slots * ranks, 1, 576).to(torch.float8_e4m3fn)
    query = torch.randn(len(lengths), HEADS, 576).to(torch.bfloat16)
    q, rope = query[..., :512].contiguous(), query[..., 512:].contiguous()
    parts, sums, empty = [], [], False
    for rank in range(ranks):
        pool = everything[rank::ranks].contiguous()
        rows, own = share(kernels, where, lengths, rank, ranks)
        rows = rows if divided else rows // ranks
        empty = empty or 0 in own
        indptr = torch.tensor([0, *own]).cumsum(0).int()
        out = torch.full((len(lengths), HEADS, 512), float("nan"), dtype=torch.bfloat16)
        inputs = (q, rope, pool[..., :512], pool[..., 512:], rows, indptr, len(lengths), SCALE, out)
        sums.append(fused.fused_attention(*inputs))
        parts.append(out)
    merged = torch.zeros(HEADS, len(lengths), 512)
    for rank, out in enumerate(parts):
        new = torch.empty(HEADS, len(lengths), 512)
        merged += kernels.correct_attn_out(out, torch.stack(sums), rank, None, new)[0]
    worst, worst_sum = 0.0, 0.0
    first = 0
    for i, length in enumerate(lengths):
        wanted, wanted_sum = expected(query[i], everything, where[first : first + length])
        worst = max(worst, ((merged[:, i].double() - wanted).norm() / wanted.norm()).item())
        total = torch.logsumexp(torch.stack([one[i] for one in sums]).double() * math.log(2.0), 0) / math.log(2.0)
        worst_sum = max(worst_sum, (total - wanted_sum).abs().max().item())
        first += length
    print(json.dumps({"error": worst, "lse_error": worst_sum, "empty": empty}))


if __name__ == "__main__":
    main()
