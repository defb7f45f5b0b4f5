"""`mlapatch verify`: does the patched backend compute what the stock one computes? Runs both, in another process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlapatch.assess import Assessment, assess, machine_of
from mlapatch.catalogue import load_catalogue
from mlapatch.engine.judgement import Judgement
from mlapatch.engine.patch import Patch
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.target import Target, find_target
from mlapatch.outcome import Block, Outcome, Table, Text, Warn
from mlapatch.rebase import misfit_error, stock_for, unpatched
from mlapatch.verify.runner import Job, ScenarioResult, run_job

BACKEND = "srt/layers/attention/flashinfer_mla_backend.py"
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Verified:
    """What the scenarios found for one patch."""

    name: str
    results: Sequence[ScenarioResult]

    @property
    def failed(self) -> list[ScenarioResult]:
        """The scenarios that differ."""
        return [result for result in self.results if result.failed]

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "name": self.name,
            "result": "fail" if self.failed else "pass",
            "failed": [result.scenario for result in self.failed],
            "scenarios": [
                {
                    "scenario": r.scenario,
                    "result": r.result,
                    "max_abs_diff": r.max_abs_diff,
                    "detail": r.detail,
                    "seconds": round(r.seconds, 3),
                }
                for r in self.results
            ],
        }


def verify(
    names: Sequence[str],
    *,
    device: Device = "cpu",
    installed: bool = False,
    scenarios: Sequence[str] = (),
    timeout_s: float = 600.0,
    sglang: Path | None = None,
    python: str | None = None,
    patches: Sequence[Path] | None = None,
) -> Outcome:
    """Exit 1 if any scenario differs. `installed` judges the bytes on disk, and needs no name."""
    catalogue = load_catalogue(patches)
    chosen = [catalogue.get(name) for name in dict.fromkeys(names)]
    if not chosen and not installed:
        raise MlapatchError(
            Exit.USAGE, "nothing to verify", expected="a patch name, or --installed", next="mlapatch verify active-cast"
        )
    target = find_target(sglang, python)
    found = assess(target, catalogue, machine_of(target, sm=1))
    interpreter = _interpreter(target, device)
    with tempfile.TemporaryDirectory(prefix="mlapatch-verify-") as folder:
        pairs = [_installed(found, Path(folder))] if installed else [_pair(found, p, Path(folder)) for p in chosen]
        verified = [
            Verified(pair.name, run_job(_job(pair, target, device, scenarios), python=interpreter, timeout_s=timeout_s))
            for pair in pairs
        ]
    return _outcome(verified, target, device)


@dataclass(frozen=True)
class _Pair:
    name: str
    stock: Path
    patched: Path
    exact: bool


def _pair(found: Assessment, patch: Patch, folder: Path) -> _Pair:
    """The file without mlapatch's patches, and with this one."""
    from mlapatch.engine.verdict import apply

    file = found.files.get(patch.target)
    if patch.target != BACKEND or file is None:
        raise MlapatchError(
            Exit.USAGE,
            f"{patch.name} changes {patch.target}, which computes nothing to compare",
            expected=BACKEND,
            next="mlapatch verify active-cast",
        )
    base = unpatched(found, file).base
    outcome = apply(base, patch, found.target.version)
    if isinstance(outcome, Judgement):
        raise misfit_error(outcome)
    return _written(patch.name, base, outcome.source, folder, exact=patch.arithmetic == "stock")


def _installed(found: Assessment, folder: Path) -> _Pair:
    file = found.files.get(BACKEND)
    if file is None:
        raise MlapatchError(
            Exit.ENVIRONMENT, "there is no flashinfer MLA backend to verify", where=BACKEND, next="mlapatch status"
        )
    clean = stock_for(found, file)
    names = ", ".join(clean.patches) or "installed file"
    exact = all(patch.arithmetic == "stock" for patch in clean.patches.values())
    return _written(names, clean.base, file.data, folder, exact=exact)


def _written(name: str, stock: bytes, patched: bytes, folder: Path, *, exact: bool) -> _Pair:
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "stock.py").write_bytes(stock)
    (place / "patched.py").write_bytes(patched)
    return _Pair(name, place / "stock.py", place / "patched.py", exact)


def _job(pair: _Pair, target: Target, device: Device, scenarios: Sequence[str]) -> Job:
    if target.version is None:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "the SGLang version is unknown, and scenarios depend on it",
            where=str(target.package),
            next="name an installed one: mlapatch verify --sglang SITE-PACKAGES, or --python EXE",
        )
    return Job(
        stock=pair.stock,
        patched=pair.patched,
        package=target.package,
        version=str(target.version),
        patch=pair.name,
        device=device,
        only=tuple(scenarios),
        exact=pair.exact,
    )


_CHECK = "import importlib.util as u, sys; sys.exit(not (u.find_spec('torch') and u.find_spec('triton')))"


def _interpreter(target: Target, device: Device) -> str:
    """The target's interpreter if it has torch and Triton, else the running one; MlapatchError (exit 5) without."""
    for python in dict.fromkeys((target.python, sys.executable)):
        try:
            if subprocess.run([python, "-c", _CHECK], check=False, timeout=60, capture_output=True).returncode == 0:
                return python
        except (OSError, subprocess.TimeoutExpired):
            continue
    raise MlapatchError(
        Exit.ENVIRONMENT,
        f"verify --device {device} runs the backend and needs torch and triton",
        where=target.python,
        expected="import torch, triton",
        found="not installed",
        next="pip install torch triton numpy, or name an interpreter that has them by --python",
    )


def _outcome(verified: Sequence[Verified], target: Target, device: Device) -> Outcome:
    blocks: list[Block] = [Warn(note) for note in target.notes]
    blocks.append(Text((f"running stock and patched code of SGLang {target.version} side by side on {device}",)))
    for one in verified:
        rows = [
            (r.scenario, r.result, "" if r.max_abs_diff is None else f"{r.max_abs_diff:g}", r.detail)
            for r in one.results
        ]
        blocks.append(Table(("scenario", "result", "largest difference", "detail"), rows, title=one.name))
        blocks.append(Text((_verdict(one),), style="bold red" if one.failed else "bold green"))
    failed = any(one.failed for one in verified)
    data: dict[str, object] = {
        "sglang": str(target.version),
        "device": device,
        "patches": [one.as_dict() for one in verified],
    }
    return Outcome(Exit.FOUND if failed else Exit.OK, data, blocks)


def _verdict(one: Verified) -> str:
    counts = {kind: sum(r.result == kind for r in one.results) for kind in ("pass", "stock", "refused", "skip", "fail")}
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    if one.failed:
        return f"{one.name}: DIFFERS from stock in {', '.join(r.scenario for r in one.failed)} ({said})"
    return f"{one.name}: computes what stock computes ({said})"
