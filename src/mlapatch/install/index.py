"""The package index, as the user's own pip sees it: which SGLang releases exist, and one release's wheel.

pip is run as a program, so mirrors, extra indexes, `find-links`, proxies, certificates and credentials are the user's.
The target is fixed (CPython 3.12 on Linux), since from 0.5.11 SGLang ships wheels for each Python and platform, and the
file that a patch edits is the same in all of them: so the host's own Python and platform do not matter.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from packaging.version import InvalidVersion, Version

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit

if TYPE_CHECKING:
    from pathlib import Path

Progress: TypeAlias = Callable[[str, int, "int | None"], None]
"""`(label, bytes done, bytes in all or None)`, called a few times a second during a download and once at its end."""

PROJECT = "sglang"
_GLIBC = ("2_34", "2_35", "2_39", "2_31", "2_28", "2_17")
_PLATFORMS = tuple(f"manylinux_{glibc}_{machine}" for machine in ("x86_64", "aarch64") for glibc in _GLIBC)
TARGET = (
    "--only-binary=:all:",
    "--python-version=3.12",
    "--implementation=cp",
    "--abi=cp312",
    "--abi=abi3",
    *(f"--platform={platform}" for platform in _PLATFORMS),
)
_OFFLINE = re.compile(
    r"Failed to establish a new connection|Temporary failure in name resolution|Name or service not known"
    r"|nodename nor servname|Connection refused|Connection reset|Connection aborted|Network is unreachable"
    r"|No route to host|Could not fetch URL|Read timed out|ConnectTimeout|ProxyError|Cannot connect to proxy"
    r"|IncompleteRead|Connection broken|RemoteDisconnected|RESOLVE_FAILED|Max retries exceeded",
    re.IGNORECASE,
)
_FROM_VERSIONS = re.compile(r"\(from versions: ([^)]*)\)")
_SIZE = re.compile(r"Downloading \S*?\.whl\S* \(([\d.]+) ?([kMG]?B)\)")
_UNITS = {"B": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3}


def pip_command() -> list[str]:
    """The command that runs pip: this interpreter's, else one on PATH, else uv's (uv's venvs have no pip)."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    if found := shutil.which("uv"):
        return [found, "tool", "run", "--quiet", "pip"]
    raise MlapatchError(
        Exit.ENVIRONMENT,
        "no pip to fetch SGLang's wheels with",
        where=sys.executable,
        expected="pip in this environment, pip on PATH, or uv on PATH",
        next=f"{sys.executable} -m ensurepip",
    )


def list_versions(*, timeout: float = 300) -> list[Version]:
    """Every release that has a wheel, pre-releases too, oldest first. Errors: offline, no pip."""
    flags = ["index", "versions", PROJECT, "--pre", *TARGET]
    if _pip_is_at_least("25.1"):
        flags.append("--json")
    done = subprocess.run(
        [*pip_command(), *flags], capture_output=True, text=True, env=_environment(), timeout=timeout, check=False
    )
    names = _versions_in(done.stdout) if done.returncode == 0 else []
    if not names:
        # pip older than 21.2 has no `index`; any pip names the versions when it is asked for one that cannot exist.
        probe = ["download", "--no-deps", *TARGET, "-d", os.devnull, f"{PROJECT}==0.0.0.dev0"]
        again = subprocess.run(
            [*pip_command(), *probe], capture_output=True, text=True, env=_environment(), timeout=timeout, check=False
        )
        output = again.stdout + again.stderr
        names = _from_versions(output)
        if not names:
            raise _cannot(f"cannot list the releases of {PROJECT}", output + done.stderr)
    return sorted(_parsed(names))


def download(version: Version, out: Path, scratch: Path, progress: Progress | None = None) -> Path:
    """Download the wheel of `version` into `out` and return its path.

    `scratch` takes pip's temporary files: the growing file is found there for `progress`. Errors: offline, no such
    version (the nearest are named), disk full.
    """
    command = [*pip_command(), "download", "--no-deps", *TARGET, "-d", str(out), f"{PROJECT}=={version}"]
    label = f"{PROJECT} {version}"
    lines: list[str] = []
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=_environment(TMPDIR=str(scratch)),
    )
    assert process.stdout is not None  # noqa: S101
    reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        while True:
            try:
                code = process.wait(timeout=0.15)
                break
            except subprocess.TimeoutExpired:
                if progress is not None:
                    progress(label, _largest(scratch, out), _announced(lines))
    finally:
        if process.poll() is None:  # interrupted: never leave a pip behind
            process.kill()
            process.wait()
        reader.join(timeout=5)
        process.stdout.close()
    wheels = sorted(out.glob("*.whl"))
    if code != 0 or not wheels:
        raise _download_failed(version, "".join(lines))
    if progress is not None:
        size = wheels[0].stat().st_size
        progress(label, size, size)
    return wheels[0]


def nearest(wanted: Version, known: Iterable[Version], count: int = 3) -> list[Version]:
    """The versions around `wanted`, closest first (for "no such version")."""
    ordered = sorted(known)
    below = [v for v in ordered if v < wanted][-count:]
    above = [v for v in ordered if v > wanted][:count]
    same_series = [v for v in (*below, *above) if v.release[:3] == wanted.release[:3]]
    rest = [v for v in (*reversed(below), *above) if v not in same_series]
    return sorted((same_series + rest)[:count])


def _environment(**extra: str) -> dict[str, str]:
    """The user's environment, less what would make a plain download fail or its output unreadable."""
    env = dict(os.environ)
    env.update(
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        PIP_NO_INPUT="1",
        PIP_PROGRESS_BAR="off",
        PIP_NO_COLOR="1",
        PIP_QUIET="0",
        PIP_VERBOSE="0",
        # Constraints, hash mode and "only in a venv" are about what gets installed; this only reads a wheel.
        PIP_CONSTRAINT=os.devnull,
        PIP_REQUIRE_HASHES="0",
        PIP_REQUIRE_VIRTUALENV="0",
        PYTHONSAFEPATH="1",
        PYTHONWARNINGS="ignore",
        LC_ALL="C.UTF-8",
        **extra,
    )
    if "PIP_INDEX_URL" not in env and (index := env.get("UV_DEFAULT_INDEX") or env.get("UV_INDEX_URL")):
        env["PIP_INDEX_URL"] = index
    return env


def _pip_is_at_least(version: str) -> bool:
    try:
        return Version(importlib.metadata.version("pip")) >= Version(version)
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return False


def _versions_in(stdout: str) -> list[str]:
    if stdout.lstrip().startswith("{"):
        try:
            return [str(v) for v in json.loads(stdout)["versions"]]
        except (ValueError, KeyError, TypeError):
            return []
    for line in stdout.splitlines():
        head, colon, tail = line.partition(":")
        if colon and head.strip().lower() == "available versions":
            return [v.strip() for v in tail.split(",") if v.strip()]
    return []


def _from_versions(output: str) -> list[str]:
    found = _FROM_VERSIONS.search(output)
    return [v.strip() for v in found[1].split(",") if v.strip() and v.strip() != "none"] if found else []


def _parsed(names: Sequence[str]) -> set[Version]:
    versions = set()
    for name in names:
        try:
            versions.add(Version(name))
        except InvalidVersion:
            continue
    return versions


def _announced(lines: Sequence[str]) -> int | None:
    """The size that pip announced, in bytes (it rounds to a tenth of a unit)."""
    for line in reversed(lines):
        if found := _SIZE.search(line):
            return int(float(found[1]) * _UNITS[found[2]])
    return None


def _largest(*folders: Path) -> int:
    """Bytes of the largest file below `folders`: the wheel as it arrives."""
    largest = 0
    for folder in folders:
        for path in folder.rglob("*"):
            try:
                largest = max(largest, path.stat().st_size if path.is_file() else 0)
            except OSError:  # pip moved it meanwhile
                continue
    return largest


def _download_failed(version: Version, output: str) -> MlapatchError:
    names = _from_versions(output)
    if names:
        close = nearest(version, _parsed(names))
        return MlapatchError(
            Exit.ENVIRONMENT,
            f"no wheel of {PROJECT} {version} on the package index",
            found=f"nearest: {', '.join(map(str, close))}" if close else "",
            next=f"mlapatch check --release {close[-1]}" if close else "",
        )
    return _cannot(f"cannot fetch the wheel of {PROJECT} {version}", output)


def _cannot(what: str, output: str) -> MlapatchError:
    """An error of pip's by its cause: disk full, offline, or pip's own last words."""
    if "No space left on device" in output or "Errno 28" in output:
        return MlapatchError(
            Exit.ENVIRONMENT, f"{what}: no space left on the disk", next="free some space and try again"
        )
    words = [line.strip() for line in output.splitlines() if line.strip().startswith(("ERROR", "error", "WARNING"))]
    detail = "\n".join(f"  pip: {line}" for line in words[-3:] or output.strip().splitlines()[-3:])
    if _OFFLINE.search(output) or "(from versions: none)" in output:
        or_empty = "" if _OFFLINE.search(output) else f", or has no wheel of {PROJECT}"
        return MlapatchError(
            Exit.ENVIRONMENT,
            f"{what}: the package index cannot be reached{or_empty}",
            expected="the index of pip's configuration (pip config list)",
            detail=detail,
            next="try again when online: what was fetched before is kept",
        )
    return MlapatchError(Exit.ENVIRONMENT, what, detail=detail, next=f"{' '.join(pip_command())} download {PROJECT} -v")
