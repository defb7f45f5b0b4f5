"""`mlapatch list`: the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlapatch.catalogue import load_catalogue
from mlapatch.engine.patch import Patch
from mlapatch.outcome import Outcome, Table


def list_patches(*, patches: Sequence[Path] | None = None) -> Outcome:
    """Every patch: name, summary, what it needs, what it excludes."""
    catalogue = load_catalogue(patches)
    rows = [(p.name, p.summary, _needs(p), ", ".join(p.excludes)) for p in catalogue.patches.values()]
    data: dict[str, object] = {
        "patches": [
            {
                "name": p.name,
                "summary": p.summary,
                "target": p.target,
                "sglang": p.sglang,
                "flashinfer": p.requires.flashinfer,
                "sm": list(p.requires.sm),
                "excludes": list(p.excludes),
                "upstream": list(p.upstream),
                "remove_when": p.remove_when,
                "digest": p.digest,
                "folder": str(catalogue.folders[p.name]),
            }
            for p in catalogue.patches.values()
        ],
        "digest": catalogue.digest,
    }
    return Outcome(data=data, blocks=[Table(("patch", "summary", "needs", "excludes"), rows)])


def _needs(patch: Patch) -> str:
    needs = [f"sglang {patch.sglang}"] if patch.sglang else []
    if patch.requires.flashinfer:
        needs.append(f"flashinfer {patch.requires.flashinfer}")
    if patch.requires.sm:
        needs.append(" or ".join(f"SM{sm}" for sm in patch.requires.sm))
    return ", ".join(needs)
