"""`doctor`: everything about the environment that matters to a start, on one page."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mlapatch import __version__
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.outcome import Block, Outcome, Pairs, Table, Text
from mlapatch.serve import gpu_state, libraries, redact
from mlapatch.serve.command import venv_python
from mlapatch.serve.preflight import OK, Context, Finding, tools
from mlapatch.serve.server_options import ServerOptions

if TYPE_CHECKING:
    from mlapatch.install.target import Target

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "HF_HOME", "HF_HUB_OFFLINE")
_NO_GPU = (
    "no GPU answers here: patches can be read, applied and checked, but no server starts; "
    "next: run doctor where the server will run (docker run --gpus all), or mlapatch apply auto --gpu NAME in a build"
)
_PREFIXES = ("SGLANG_", "FLASHINFER_", "NCCL_", "TRITON_", "TORCH_", "MLAPATCH_")


def doctor(*, sglang: Path | None = None, python: str | None = None) -> Outcome:
    """Look at the target, its libraries, the GPUs, the tools and the settings; judge only what is certain.

    Exit 5 where there is no SGLang: every other verb that needs one would end so.
    """
    rows, versions, missing, problems, code = _target(sglang, python)
    machine = _machine()
    gpus = gpu_state.look(os.environ)
    problems += [f"{f.text}; next: {f.next}" if f.next else f.text for f in _tool_findings(gpus)]
    settings = _settings(os.environ)
    gpu_rows = [
        (str(g.index), g.name, f"SM{g.sm}", f"{g.used / 2**30:.1f} of {g.total / 2**30:.0f} GiB", str(len(g.pids)))
        for g in gpus or ()
    ]
    blocks: list[Block] = [Pairs([("mlapatch", __version__), *rows]), Pairs(machine)]
    if versions:
        blocks.append(Pairs(sorted(versions.items())))
    if gpu_rows:
        blocks.append(Table(("GPU", "name", "SM", "memory in use", "processes"), gpu_rows))
    else:
        blocks.append(Text(("GPUs: none, or no driver answers (NVML)",)))
        problems.append(_NO_GPU)
    if settings:
        blocks.append(Pairs(settings))
    style = "yellow" if problems else "green"
    blocks.append(Text([f"look at: {problem}" for problem in problems] or ["nothing looks wrong"], style=style))
    data: dict[str, object] = {
        "mlapatch": __version__,
        "target": dict(rows),
        "machine": dict(machine),
        "packages": versions,
        "missing": {gone.name: gone.wants for gone in missing},
        "gpus": [{"index": g.index, "name": g.name, "sm": g.sm, "used": g.used, "total": g.total} for g in gpus or ()],
        "settings": dict(settings),
        "problems": problems,
    }
    return Outcome(code, data, blocks)


def beside(target: Target) -> tuple[dict[str, str], tuple[libraries.Missing, ...]]:
    """The packages that decide whether this SGLang starts, by version, and those that it asks for and has not got."""
    from mlapatch.install.wheelfile import parse_requires

    exe, places = _python_of(target)
    if not places:
        return libraries.installed([str(target.site)]), ()
    try:
        requires = parse_requires((target.dist_info / "METADATA").read_bytes()) if target.dist_info else []
    except OSError:
        requires = []
    have = libraries.installed(places)
    return have, libraries.missing(exe, places, requires, have)


def _python_of(target: Target) -> tuple[str, tuple[str, ...]]:
    """The interpreter that starts this SGLang, and where it looks for packages; nothing where that is not known.

    Of an SGLang that was named by its path only a venv around it says so.
    """
    from mlapatch.install.target import find_target

    if target.path:
        return target.python, (str(target.site), *target.path)
    own = venv_python(target.site)
    if own is None:
        return "", ()
    try:
        found = find_target(None, str(own))
    except MlapatchError:
        return "", ()
    return (str(own), (str(target.site), *found.path)) if found.package == target.package else ("", ())


_Target = tuple[list[tuple[str, str]], dict[str, str], tuple[libraries.Missing, ...], list[str], Exit]


def _target(sglang: Path | None, python: str | None) -> _Target:
    from mlapatch.install.target import find_target

    try:
        target = find_target(sglang, python)
    except MlapatchError as error:
        why = f" ({error.found})" if error.found else ""
        following = f"; next: {error.next}" if error.next else ""
        return [("sglang", f"none: {error.what}")], {}, (), [f"{error.what}{why}{following}"], error.exit
    rows = [
        ("sglang", f"{target.version or 'unknown version'} ({target.install})"),
        ("package", str(target.package)),
        ("python", target.python),
        ("writable", "yes" if os.access(target.package, os.W_OK) else "no"),
    ]
    problems = list(target.notes)
    if not os.access(target.package, os.W_OK):
        problems.append(
            f"{target.package} is not writable: patches cannot be applied by this user; next: run as its owner"
        )
    found, missing = beside(target)
    problems += libraries.problems(found, str(target.version or ""), os.environ)
    problems += [f"{gone.text}; next: {gone.next}" for gone in missing]
    return rows, found, missing, problems, Exit.OK


def _machine() -> list[tuple[str, str]]:
    shared = _disk("/dev/shm")  # noqa: S108 - where NCCL keeps its segments
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rows = [
        ("system", f"{platform.system()} {platform.release()}, {os.cpu_count()} CPUs"),
        ("container", "yes" if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() else "not seen"),
        ("/dev/shm", shared),  # noqa: S108
        ("memlock", "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / 2**20:.0f} MiB"),
        ("nvcc", _first_line(["nvcc", "--version"], "release")),
        ("ninja", _first_line(["ninja", "--version"])),
    ]
    for name, folder in (("flashinfer cache", "~/.cache/flashinfer"), ("triton cache", "~/.triton/cache")):
        path = Path(folder).expanduser()
        rows.append((name, f"{path}{'' if path.is_dir() else ' (none yet)'}"))
    return rows


def _tool_findings(gpus: object) -> Iterator[Finding]:
    """What `launch` would warn of; a check that finds everything there is nothing to look at."""
    ranks = str(len(gpus)) if isinstance(gpus, list) and len(gpus) > 1 else "1"
    found = tools(Context(ServerOptions({"tp-size": ranks}), os.environ))
    yield from (finding for finding in found if finding.state != OK)


def _disk(folder: str) -> str:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return "none"
    return f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"


def _first_line(command: list[str], holding: str = "") -> str:
    if shutil.which(command[0]) is None:
        return "not on PATH"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "does not run"
    return next((line.strip() for line in done.stdout.splitlines() if holding in line), "says nothing")


def _settings(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    chosen = [name for name in sorted(environment) if name in _VARIABLES or name.startswith(_PREFIXES)]
    return [(name, redact.HIDDEN if redact.is_secret_name(name) else environment[name]) for name in chosen]
