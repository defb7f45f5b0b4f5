"""A trace's findings as data, and what to do about them in words."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from mlapatch.measure.kernels import short
from mlapatch.measure.metrics import Metric
from mlapatch.measure.units import percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlapatch.measure.trace import RankTrace


def as_data(ranks: Sequence[RankTrace], top: int) -> dict[str, Any]:
    """The JSON of `trace`; times in ms. What compares ranks is null where the traces are not of one profile."""
    slowest = max(ranks, key=lambda rank: rank.timing.wall)
    fastest = min(ranks, key=lambda rank: rank.timing.wall)
    one = not repeated(ranks)
    share = 1 - fastest.timing.wall / slowest.timing.wall if slowest.timing.wall else 0.0
    return {
        "ranks": [_rank(rank, top) for rank in ranks],
        "one_profile": one,
        "slowest": slowest.rank if one else None,
        "fastest": fastest.rank if one else None,
        "skew_ms": (slowest.timing.wall - fastest.timing.wall) / 1e3 if one else None,
        "skew_share": share if one else None,
        "cast_found": any(rank.cast for rank in ranks),
        "partial": any(rank.file.partial for rank in ranks),
        "advice": advice(slowest) if one else by_file(ranks),
    }


def repeated(ranks: Sequence[RankTrace]) -> str:
    """The rank that several of the traces are of: they are no profile of one server. '' where there is none."""
    return next((name for name, count in Counter(rank.rank for rank in ranks).items() if count > 1), "")


def files(ranks: Sequence[RankTrace]) -> list[str]:
    """What each trace is called where ranks do not tell: its file's name, or the path where names do not either."""
    names = [rank.file.path.name for rank in ranks]
    return names if len(set(names)) == len({rank.file.path for rank in ranks}) else [str(r.file.path) for r in ranks]


def by_file(ranks: Sequence[RankTrace]) -> list[str]:
    """The advice of each, for traces that have nothing to do with each other."""
    return [f"{file}: {line}" for file, rank in zip(files(ranks), ranks, strict=True) for line in advice(rank)]


def metrics(ranks: Sequence[RankTrace]) -> list[dict[str, object]]:
    """A trace's figures in the form that runs are compared by; the values are the ranks'."""
    rows = [
        ("step", "ms", [rank.timing.wall / 1e3 for rank in ranks]),
        ("GPU busy", "ms", [rank.timing.busy / 1e3 for rank in ranks]),
        ("KV-pool cast", "ms", [rank.timing.cast / 1e3 for rank in ranks]),
        ("cast's share of a step", "%", [100 * rank.share if rank.cast else 0.0 for rank in ranks]),
    ]
    return [Metric("decode step", name, unit, "lower", tuple(values)).as_dict() for name, unit, values in rows]


def _rank(rank: RankTrace, top: int) -> dict[str, object]:
    timing, file, cast = rank.timing, rank.file, rank.cast
    groups = rank.track.groups
    return {
        "rank": rank.rank,
        "file": str(file.path),
        "gpu": rank.gpu,
        "sm": rank.sm,
        "events": file.events,
        "bytes": file.bytes,
        "partial": file.partial,
        "notes": [*file.notes, *rank.notes],
        "cuda_graphs": rank.steps.graphs,
        "steps": rank.steps.count,
        "steps_found_by": rank.steps.found_by,
        "steps_timed": timing.steady,
        "batch_sizes": {str(size): count for size, count in sorted(file.batches.items())},
        "step_ms": timing.wall / 1e3,
        "busy_ms": timing.busy / 1e3,
        "idle_share": rank.idle,
        "host_launch_ms": host_launch_ms(rank),
        "cast": None
        if cast is None
        else {
            "kernel": cast.group.name,
            "grid": list(cast.group.grid),
            "calls": cast.group.count,
            "calls_in_steps": cast.calls,
            "layers": cast.layers,
            "us_per_call": cast.group.total / cast.group.count,
            "ms_per_step": timing.cast / 1e3,
            "exclusive_ms_per_step": timing.exclusive / 1e3,
            "share_of_step": rank.share,
            "share_of_busy": timing.cast / timing.busy if timing.busy else 0.0,
            "elements": cast.elements,
            "bytes_per_call": cast.bytes,
            "bytes_per_second": cast.rate,
            "shape": None if cast.shape is None else list(cast.shape),
            "evidence": "recorded FP8 input" if cast.sure else "count, size and duration",
        },
        "without_cast_ms": rank.remaining / 1e3,
        "families": [
            {"name": label, "ms_per_step": dur / 1e3, "kernels": kernels} for label, dur, kernels in timing.families
        ],
        "kernels": [
            {
                "name": groups[group].name,
                "short": short(groups[group].name),
                "grid": list(groups[group].grid),
                "calls": groups[group].count,
                "us_per_call": groups[group].total / groups[group].count,
                "ms_per_step": dur / 1e3,
            }
            for group, dur in timing.kernels[:top]
        ],
    }


def host_launch_ms(rank: RankTrace) -> float | None:
    """Host time a step spent launching kernels one by one, as profiled; None under CUDA graphs or where unknown."""
    if rank.steps.graphs or not rank.steps.count or not rank.file.launch_us or len(rank.file.tracks) > 1:
        return None
    return rank.file.launch_us / rank.steps.count / 1e3


def advice(rank: RankTrace) -> list[str]:
    """What would remain without the cast, and which patch to apply."""
    timing, cast = rank.timing, rank.cast
    if cast is None:
        ours = [f"{dur / 1e3:.2f} ms" for label, dur, _ in timing.families if label == "mlapatch"]
        lines = [
            "No whole-pool cast was found" + (f" in {rank.steps.count} decode steps." if rank.steps.count else ".")
        ]
        return lines + ([f"mlapatch's own kernels take {ours[0]} a step."] if ours else []) + _eager(rank)
    if not cast.layers:
        return [f"The copy takes {percent(rank.share)} of the trace; mlapatch apply auto removes it."]
    lines = [
        f"Without the cast a step would take {rank.remaining / 1e3:.2f} ms instead of {timing.wall / 1e3:.2f} ms: "
        f"{1e6 / rank.remaining:.1f} steps a second instead of {1e6 / timing.wall:.1f}."
        if rank.remaining > 0
        else "The cast fills the whole step."
    ]
    hidden = timing.cast - timing.exclusive
    if timing.cast and hidden > 0.05 * timing.cast:
        lines.append(f"{hidden / 1e3:.2f} ms of the cast run while other kernels do, and cannot be won back.")
    lines += _eager(rank)
    if _is_fa3(rank):
        lines.append("Attention here is fa3, whose cast mlapatch does not patch: see sgl-project/sglang#36087.")
        return lines
    native = "; fp8-plan too where flashinfer is 0.6.14 or later" if rank.sm == 90 else ""
    lines.append(f"Next: mlapatch apply auto (active-cast or fused-decode run on any GPU{native}), then profile again.")
    return lines


def _eager(rank: RankTrace) -> list[str]:
    if rank.steps.graphs or not rank.steps.count:
        return []
    host = host_launch_ms(rank)
    cost = f" (here about {host:.1f} ms a step, while profiled)" if host else ""
    return [
        (
            f"No CUDA graphs: the host launches each kernel{cost}, and a step cannot be shorter than that, "
            "whatever is patched. Drop --disable-cuda-graph first."
        )
    ]


def _is_fa3(rank: RankTrace) -> bool:
    names = [group.name for group in rank.track.groups]
    flashinfer = any("flashinfer" in name or "BatchMLA" in name for name in names)
    return not flashinfer and any("FlashAttnFwd" in name for name in names)
