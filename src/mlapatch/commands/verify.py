"""`mlapatch verify`: does the patched backend compute what the stock one computes? Runs both, in another process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlapatch
from mlapatch.assess import Assessment, assess, machine_of
from mlapatch.catalogue import load_catalogue
from mlapatch.compat import Silent, Watch
from mlapatch.engine.judgement import Judgement
from mlapatch.engine.patch import Patch
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.git import head_commit
from mlapatch.install.target import Target, find_target
from mlapatch.install.write import sha256
from mlapatch.measure import outcomes
from mlapatch.measure.keeping import Kept, keeping
from mlapatch.outcome import Block, Outcome, Table, Text, Warn
from mlapatch.rebase import misfit_error, stock_for, unpatched
from mlapatch.verify.runner import Job, Report, ScenarioResult, run_job, scenario_names

BACKEND = "srt/layers/attention/flashinfer_mla_backend.py"
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class _Pair:
    """Two texts of the backend, in files; `digests` are those of the patches between them, by name."""

    name: str
    stock: Path
    patched: Path
    exact: bool
    digests: dict[str, str]


@dataclass(frozen=True)
class Verified:
    """What the scenarios found for one patch. `files` are the sha256 of what was run, stock and patched."""

    pair: _Pair
    files: tuple[str, str]
    report: Report
    seconds: float

    @property
    def name(self) -> str:
        """The patch, or those that are installed."""
        return self.pair.name

    @property
    def results(self) -> Sequence[ScenarioResult]:
        """One a scenario."""
        return self.report.results

    @property
    def failed(self) -> list[ScenarioResult]:
        """The scenarios that differ."""
        return [result for result in self.results if result.failed]

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "name": self.name,
            "digests": self.pair.digests,
            "stock_sha256": self.files[0],
            "patched_sha256": self.files[1],
            "result": "fail" if self.failed else "pass",
            "failed": [result.scenario for result in self.failed],
            "seconds": round(self.seconds, 1),
            "scenarios": [
                {
                    "scenario": r.scenario,
                    "result": r.result,
                    "max_abs_diff": r.max_abs_diff,
                    "detail": r.detail,
                    "seconds": round(r.seconds, 3),
                    "census": r.census or None,
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
    label: str = "",
    keep: bool = True,
    db: Path | None = None,
    watch: Watch | None = None,
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
        jobs = [_job(pair, target, device, scenarios) for pair in pairs]
        files = [(sha256(pair.stock.read_bytes()), sha256(pair.patched.read_bytes())) for pair in pairs]
        setup = _set_up(pairs, files, target, device, installed=installed, scenarios=scenarios)
        verified: list[Verified] = []
        watch = watch or Silent()
        watch.say(_side_by_side(target, device))
        count = sum(not scenarios or name in scenarios for name in scenario_names())
        with keeping(keep, db, "verify", setup, label, needed=False) as kept:
            for pair, job, both in zip(pairs, jobs, files, strict=True):
                began = time.monotonic()
                watch.begin(f"scenarios of {pair.name}", count)
                report = run_job(job, python=interpreter, timeout_s=timeout_s, done=watch.step)
                verified.append(Verified(pair, both, report, time.monotonic() - began))
                kept.setup["ran_with"] = _facts(verified)
                kept.result |= outcomes.of_verify([one.as_dict() for one in verified])
            kept.status = "failed" if any(one.failed for one in verified) else "done"
    return _outcome(verified, target, device, kept)


def _set_up(
    pairs: Sequence[_Pair],
    files: Sequence[tuple[str, str]],
    target: Target,
    device: Device,
    *,
    installed: bool,
    scenarios: Sequence[str],
) -> dict[str, Any]:
    """What a kept run was done with; `ran_with` comes from the process that runs the scenarios."""
    setup: dict[str, Any] = {"sglang": str(target.version), "device": device, "commit": _commit()}
    setup["judged"] = "the bytes on disk" if installed else "each patch alone"
    setup["patches"] = {pair.name: pair.digests for pair in pairs}
    setup["files"] = {
        pair.name: dict(zip(("stock", "patched"), both, strict=True)) for pair, both in zip(pairs, files, strict=True)
    }
    return setup | ({"scenarios": list(scenarios)} if scenarios else {})


def _pair(found: Assessment, patch: Patch, folder: Path) -> _Pair:
    """The file without mlapatch's patches, and with this one."""
    from mlapatch.engine.verdict import apply

    file = found.files.get(patch.target)
    if patch.target != BACKEND:
        raise MlapatchError(
            Exit.USAGE,
            f"{patch.name} changes {patch.target}, which computes nothing to compare",
            expected=BACKEND,
            next="mlapatch verify active-cast",
        )
    if file is None:
        raise misfit_error(found.judgements[patch.name])
    base = unpatched(found, file).base
    outcome = apply(base, patch, found.target.version)
    if isinstance(outcome, Judgement):
        judged = found.judgements[patch.name]
        raise misfit_error(judged if judged.verdict is outcome.verdict else outcome)
    return _written(patch.name, base, outcome.source, folder, [patch])


def _installed(found: Assessment, folder: Path) -> _Pair:
    file = found.files.get(BACKEND)
    if file is None:
        raise MlapatchError(
            Exit.ENVIRONMENT, "there is no flashinfer MLA backend to verify", where=BACKEND, next="mlapatch status"
        )
    clean = stock_for(found, file)
    if clean.base == file.data:
        raise MlapatchError(
            Exit.FOUND,
            "no patch is in the installed file: it is the release's own, and there is nothing to compare",
            where=str(file.path),
            next="mlapatch apply active-cast",
        )
    names = ", ".join(clean.patches) or "installed file"
    return _written(names, clean.base, file.data, folder, clean.patches.values())


def _written(name: str, stock: bytes, patched: bytes, folder: Path, patches: Collection[Patch]) -> _Pair:
    digests = {patch.name: patch.digest for patch in patches}
    exact = all(patch.arithmetic == "stock" for patch in patches)
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "stock.py").write_bytes(stock)
    (place / "patched.py").write_bytes(patched)
    return _Pair(name, place / "stock.py", place / "patched.py", exact, digests)


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


_CHECK = """
import importlib.util as u, sys
sys.path.append(sys.argv[1])
names = ["torch", "triton"] + ["flashinfer"] * (sys.argv[2] == "cuda")
missing = [name for name in names if not u.find_spec(name)]
if not missing and sys.argv[2] == "cuda":
    import torch
    missing = [] if torch.cuda.is_available() else ["a GPU that torch can use"]
print(", ".join(missing))
sys.exit(bool(missing))
"""


def _interpreter(target: Target, device: Device) -> str:
    """The target's interpreter if it has what the device needs, else the running one; MlapatchError (exit 5)."""
    missing = ""
    for python in dict.fromkeys((target.python, sys.executable)):
        try:
            command = [python, "-c", _CHECK, str(target.package.parent), device]
            done = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return python
        missing = missing or (done.stdout.strip().splitlines() or [""])[-1]
    needs = "torch and triton" if device == "cpu" else "torch, triton, flashinfer and a GPU"
    raise MlapatchError(
        Exit.ENVIRONMENT,
        f"verify --device {device} runs the backend and needs {needs}",
        where=target.python,
        expected=f"an interpreter with {needs}",
        found=f"without {missing}" if missing else "an interpreter that does not run",
        next=_way_to(device, missing.split(", ")),
    )


#: What has each module, for pip.
_PROJECTS = {"torch": "torch", "triton": "triton", "flashinfer": "flashinfer-python"}


def _way_to(device: Device, missing: Collection[str]) -> str:
    """What to type where an interpreter lacks something (''; it did not run, and nothing is known)."""
    needed = [name for name in _PROJECTS if device == "cuda" or name != "flashinfer"]
    wanted = [_PROJECTS[name] for name in needed if name in missing or not any(missing)]
    wanted += ["numpy"] if "torch" in wanted else []
    ways = [f"pip install {' '.join(wanted)}, or --python an interpreter that has them"] if wanted else []
    ways += ["where torch sees no GPU: --device cpu"] if device == "cuda" else []
    return "; ".join(ways)


def _outcome(verified: Sequence[Verified], target: Target, device: Device, kept: Kept) -> Outcome:
    notes = [str(note) for note in kept.result.get("notes", ())]
    blocks: list[Block] = [Warn(note) for note in (*target.notes, *notes)]
    blocks.append(Text((_side_by_side(target, device),)))
    for one in verified:
        rows = [
            (r.scenario, r.result, "" if r.max_abs_diff is None else f"{r.max_abs_diff:g}", r.detail)
            for r in one.results
        ]
        blocks.append(Table(("scenario", "result", "largest difference", "detail"), rows, title=one.name))
        blocks.append(Text((_verdict(one),), style="bold red" if one.failed else "bold green"))
    failed = any(one.failed for one in verified)
    if kept.run is not None:
        blocks.append(Text((f"Kept as run {kept.run}: mlapatch runs {kept.run}",)))
    data: dict[str, object] = {
        "run": kept.run,
        "sglang": str(target.version),
        "device": device,
        "mlapatch": {"version": mlapatch.__version__, "commit": kept.setup["commit"]},
        "ran_with": kept.setup["ran_with"],
        "patches": [one.as_dict() for one in verified],
    }
    return Outcome(Exit.FOUND if failed else Exit.OK, data, blocks)


def _side_by_side(target: Target, device: Device) -> str:
    return f"running stock and patched code of SGLang {target.version} side by side on {device}"


def _facts(verified: Sequence[Verified]) -> dict[str, Any] | None:
    """What the harness says of its own process: one interpreter and one machine ran everything."""
    return next((one.report.facts for one in verified if one.report.facts), None)


def _commit() -> str | None:
    """`MLAPATCH_COMMIT`, else what is checked out where mlapatch runs from its own checkout; else None."""
    root = Path(mlapatch.__file__).resolve().parents[2]
    given = os.environ.get("MLAPATCH_COMMIT")
    if given or not (root / ".git").exists() or not (root / "src" / "mlapatch").is_dir():
        return given or None
    return head_commit(root) or None


def _verdict(one: Verified) -> str:
    counts = {kind: sum(r.result == kind for r in one.results) for kind in ("pass", "stock", "refused", "skip", "fail")}
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    if one.failed:
        return f"{one.name}: DIFFERS from stock in {', '.join(r.scenario for r in one.failed)} ({said})"
    return f"{one.name}: computes what stock computes ({said})"
