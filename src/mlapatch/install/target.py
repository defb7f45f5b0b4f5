"""Find the SGLang that a server would import, without importing it: path, version, kind of install, other copies."""

from __future__ import annotations

import csv
import importlib.machinery
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.version import InvalidVersion, Version

from mlapatch.errors import MlapatchError, NoSglangError
from mlapatch.exits import Exit
from mlapatch.install.wheelfile import parse_record
from mlapatch.jsontext import parsed_object

STATE_FOLDER = ".mlapatch"
#: Run in the target interpreter; `-c` puts the working folder first on sys.path, as `python -m sglang.launch_server`.
_PROBE = """
import importlib.util, json, sys
spec = importlib.util.find_spec("sglang")
print(json.dumps({"origin": spec and spec.origin, "places": list(spec and spec.submodule_search_locations or []),
                  "path": sys.path, "exe": sys.executable, "version": sys.version.split()[0]}))
"""


@dataclass(frozen=True)
class Target:
    """One SGLang on disk.

    `install` is `wheel`, `editable`, `checkout` or `folder`; `others` are further copies that could be imported.
    """

    package: Path
    install: str
    version: Version | None
    python: str
    path: tuple[str, ...] = ()
    dist_info: Path | None = None
    repository: Path | None = None
    others: tuple[Path, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def site(self) -> Path:
        """The folder that holds the package (site-packages, or `python/` of a checkout)."""
        return self.package.parent

    @property
    def state_folder(self) -> Path:
        """Where the journal and the original bytes are kept."""
        return self.site / STATE_FOLDER

    def file(self, relative: str) -> Path:
        """A file of the package by its path inside it."""
        return self.package.joinpath(*relative.split("/"))

    @cached_property
    def record(self) -> dict[str, str]:
        """sha256 (hex) by path in site-packages, from the wheel's RECORD; empty without one."""
        try:
            return parse_record(self._record, installed=True)
        except (ValueError, csv.Error):
            return {}

    @cached_property
    def _record(self) -> bytes:
        if self.dist_info is None:
            return b""
        try:
            return (self.dist_info / "RECORD").read_bytes()
        except OSError:
            return b""

    def recorded_sha256(self, relative: str) -> str:
        """What RECORD says of a file of the package ('' if nothing): one line of thousands is parsed."""
        if self.install != "wheel":
            return ""
        path = f"{self.package.name}/{relative}"
        begin = self._record.find(f"\n{path},".encode()) + 1
        end = self._record.find(b"\n", begin)
        try:
            return parse_record(self._record[begin : None if end < 0 else end], installed=True).get(path, "")
        except (ValueError, csv.Error):
            return ""


def find_target(sglang: Path | None = None, python: str | None = None) -> Target:
    """The SGLang at a path, or that an interpreter would import; MlapatchError (exit 5) where there is none."""
    try:
        if sglang is not None:
            named = _package_in(sglang)
            return _at(named.resolve(), python or sys.executable, (), named)
        probe = _probe_other(python) if python else _probe_here()
        named = _imported(probe)
        return _at(named.resolve(), str(probe["exe"]), tuple(str(p) for p in probe["path"]), named)
    except PermissionError as error:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "no permission to look for SGLang",
            where=str(error.filename),
            expected="folders that this user may enter and read",
            found=str(error.strerror),
            next="run as a user who may, or open them: chmod a+rX",
        ) from None
    except OSError as error:  # a name that no file system takes
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "cannot look for SGLang there",
            where=f"{sglang or python!s:.200}",
            found=str(error.strerror or error),
            next="mlapatch status --sglang PATH",
        ) from None


def _probe_here() -> dict[str, Any]:
    spec = importlib.util.find_spec("sglang")
    places = list(spec.submodule_search_locations or []) if spec else []
    return {"origin": spec and spec.origin, "places": places, "path": list(sys.path), "exe": sys.executable}


def _probe_other(python: str) -> dict[str, Any]:
    try:
        if Path(python).is_dir():
            raise OSError("a folder: --sglang takes folders")
        done = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise OSError((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
        said = done.stdout.splitlines()  # a sitecustomize or .pth of theirs may have printed before
        found = json.loads(said[-1] if said else "")
        if not isinstance(found, dict) or not found.keys() >= {"origin", "places", "path", "exe"}:
            raise ValueError(found)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "the interpreter cannot be asked for its SGLang",
            where=python,
            expected="a Python interpreter",
            found="a program that does not answer as Python does" if isinstance(error, ValueError) else str(error),
            next="mlapatch status --python /path/to/venv/bin/python",
        ) from None
    return found


def _imported(probe: dict[str, Any]) -> Path:
    origin, places = probe["origin"], probe["places"]
    if origin and not Path(str(origin)).is_file():
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "sglang is not a folder on disk (a zip archive?), and its files cannot be patched",
            where=str(origin),
            next="install sglang as files, or name another by --sglang PATH",
        )
    if origin:
        return Path(str(origin)).parent
    for place in map(Path, places):
        if (init := place / "__init__.py").is_symlink():
            raise NoSglangError(
                Exit.ENVIRONMENT,
                "the files of sglang are links to nothing (was uv's cache cleaned after an install with symlinks?)",
                where=str(init),
                expected="a file",
                found=f"a link to {init.readlink()}",
                next="install sglang anew: uv pip install --reinstall --no-deps sglang==VERSION",
            )
    if places:
        raise NoSglangError(
            Exit.ENVIRONMENT,
            "sglang is a leftover folder without __init__.py (a namespace package), not an installed SGLang",
            where=", ".join(map(str, places)),
            next="remove the folder and install sglang, or name another by --sglang PATH",
        )
    raise NoSglangError(
        Exit.ENVIRONMENT,
        "no SGLang found",
        where=str(probe["exe"]),
        expected="an importable package 'sglang'",
        found="none on sys.path",
        next="mlapatch status --sglang PATH, or --python /path/to/venv/bin/python",
    )


def _package_in(path: Path) -> Path:
    """The package folder for a package folder, its site-packages, a venv or a checkout."""
    candidates = [path, path / "sglang", path / "python" / "sglang"]
    candidates += sorted(path.glob("lib/python3*/site-packages/sglang"))
    for candidate in candidates:
        if candidate.name == "sglang" and (candidate / "__init__.py").is_file():
            return candidate
    found = "no sglang/__init__.py" if path.exists() else "nothing there"
    following = "mlapatch status --sglang PATH: the package, its site-packages, or a checkout"
    if path.suffix == ".whl" and path.is_file():
        found = "a wheel, not unpacked"
        following = f"unpack it: python -m zipfile -e {shlex.quote(str(path))} DIR, then mlapatch status --sglang DIR"
    given = os.environ.get("MLAPATCH_SGLANG")
    if given and Path(given) == path:
        found += "; the variable MLAPATCH_SGLANG names it"
        following += "; or unset MLAPATCH_SGLANG"
    raise MlapatchError(
        Exit.ENVIRONMENT,
        "no SGLang found",
        where=str(path),
        expected="the sglang package folder, its site-packages, or a checkout (python/sglang)",
        found=found,
        next=following,
    )


def _at(package: Path, python: str, path: Sequence[str], named: Path) -> Target:
    said = _version(package, None)
    dist_info, left = _dist_info(package.parent, said)
    recorded = dist_info is not None
    repository = None if recorded else _repository(package)
    if repository is not None and not _tracked(repository, package):
        repository = None
    editable = None if recorded else _editable_dist_info(package, path)
    if recorded:
        install = "wheel"
    elif editable is not None:
        install = "editable"
    else:
        install = "checkout" if repository else "folder"
    others = tuple(p for p in _copies(path) if p != package)
    notes = tuple(f"another SGLang could be imported from {p}; a server uses {package}" for p in others)
    notes += tuple(f"{p} is left of another install; mlapatch and importlib.metadata may differ" for p in left)
    if dist_info is not None and said not in (None, _named_version(dist_info)):
        notes += (f"the package says that it is SGLang {said}, and {dist_info} that it is another",)
    if named.is_symlink():
        notes += (f"{named} is a link to {package}: everything that uses that folder gets what is changed in it",)
    here = Path.cwd() / "sglang" / "__init__.py"
    if path and here.is_file() and here.parent.resolve() != package:
        notes += (f"a server started in {Path.cwd()} with 'python -m' would import {here.parent}, not {package}",)
    return Target(
        package=package,
        install=install,
        version=_version(package, dist_info if recorded else editable),
        python=python,
        path=tuple(path),
        dist_info=dist_info if recorded else editable,
        repository=repository,
        others=others,
        notes=notes,
    )


def _dist_info(site: Path, said: Version | None) -> tuple[Path | None, list[Path]]:
    """The `sglang-*.dist-info` whose RECORD lists the package, and the ones left of other installs.

    Of several the one that agrees with the version that the package says, else the newest.
    """
    found = [(v == said, v, p) for p in site.glob("sglang-*.dist-info") if (v := _named_version(p))]
    listing = [row for row in found if _lists_package(row[2])]
    chosen = max(listing)[2] if listing else None
    return chosen, [p for _, _, p in sorted(found) if chosen is not None and p != chosen]


def _lists_package(dist_info: Path) -> bool:
    try:
        return b"\nsglang/__init__.py," in b"\n" + (dist_info / "RECORD").read_bytes()
    except OSError:
        return False


def _editable_dist_info(package: Path, path: Sequence[str]) -> Path | None:
    """The dist-info of an editable install whose source folder holds the package."""
    for entry in path:
        for dist_info in Path(entry).glob("sglang-*.dist-info") if entry else ():
            try:
                direct = parsed_object((dist_info / "direct_url.json").read_bytes())
            except (OSError, ValueError):
                continue
            source = unquote(str(direct.get("url", "")).removeprefix("file://"))
            info = direct.get("dir_info")
            editable = isinstance(info, dict) and info.get("editable")
            if editable and source and package.is_relative_to(Path(source).resolve()):
                return dist_info
    return None


def _repository(package: Path) -> Path | None:
    """The git work tree that the package lies in (a `.git` folder, or file: worktrees and submodules have one)."""
    return next((parent for parent in package.parents if (parent / ".git").exists()), None)


def _tracked(repository: Path, package: Path) -> bool:
    """Not where git says that the package is no part of the work tree around it."""
    from mlapatch.install.git import tracks

    return tracks(repository, package / "__init__.py") is not False


def _copies(path: Sequence[str]) -> Iterator[Path]:
    seen = set()
    for entry in path:
        init = Path(entry or ".") / "sglang" / "__init__.py"
        if init.is_file() and (folder := init.parent.resolve()) not in seen:
            seen.add(folder)
            yield folder


def _version(package: Path, dist_info: Path | None) -> Version | None:
    if dist_info is not None and (version := _named_version(dist_info)):
        return version
    for name in ("_version.py", "version.py"):
        try:
            text = (package / name).read_text(encoding="utf-8") if (package / name).is_file() else ""
        except (OSError, UnicodeDecodeError):
            continue
        for match in re.finditer(
            r"^\s*(?:__version__|version)\b[^\n=]*=[^\n]*?['\"]([^'\"]+)['\"]", text, re.MULTILINE
        ):
            version = _parsed(match[1])
            if version and version.release != (0, 0, 0):
                return version
    return None


def _named_version(dist_info: Path) -> Version | None:
    """The version in `NAME-VERSION.dist-info`."""
    return _parsed(dist_info.name.removesuffix(".dist-info").partition("-")[2])


def _parsed(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
