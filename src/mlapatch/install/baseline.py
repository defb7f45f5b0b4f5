"""The guard's baseline: `mlapatch-guard.toml`, which people read, commit and compare, and the bytes behind it.

The file says everything that a verdict needs. The bytes of each edited file, as recorded and as it came, are kept in
the state folder too; they are a hint: the diff and the origin give them again.
"""

from __future__ import annotations

import contextlib
import re
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlapatch.disk import environment_errors, make_folder, write_atomically
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.journal import Journal
from mlapatch.install.target import Target
from mlapatch.install.write import sha256

NAME = "mlapatch-guard.toml"
FORMAT = 1
WATCHED = (
    "srt/server_args.py",
    "srt/layers/communicator.py",
    "srt/layers/moe/topk.py",
    "srt/model_executor/model_runner.py",
)
"""Always in the baseline, edited or not: where the SM120 and flashinfer_cutlass edits of GLM-5 live."""

_PATH = re.compile(r"(?!/)[^\x00-\x1f\x7f]{1,1000}")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_HEAD = """\
# The local edits of an SGLang, without mlapatch's own, as `mlapatch guard record` found them.
# Commit this file; `mlapatch guard check` compares the installed SGLang with it. Paths are inside the sglang package.
"""


@dataclass(frozen=True)
class Recorded:
    """One file: sha256 as it came and as it was edited (equal: no edit; '': not there), and the diff between them."""

    path: str
    original: str
    edited: str
    diff: str = ""

    @property
    def has_edit(self) -> bool:
        """Whether there is an edit to guard; a watched file may have none."""
        return self.original != self.edited


@dataclass(frozen=True)
class Baseline:
    """What was recorded, of which SGLang, from which commit ('' for a wheel)."""

    sglang: str
    commit: str
    files: Mapping[str, Recorded]


def default_places(target: Target) -> list[Path]:
    """Where a baseline is looked for, first match first: here, the checkout, the site folder, the state folder."""
    folders = [Path.cwd(), *([target.repository] if target.repository else []), target.site]
    return [*dict.fromkeys(folder / NAME for folder in folders), kept_folder(target) / NAME]


def kept_folder(target: Target) -> Path:
    """The copy of the last baseline and the bytes behind it."""
    return target.state_folder / "guard"


def find_baseline(target: Target, file: Path | None = None) -> Path | None:
    """The baseline named, or the first one found. MlapatchError (exit 2) where the named one is missing."""
    if file is None:
        return next((place for place in default_places(target) if is_there(place)), None)
    if not is_there(file):
        raise MlapatchError(
            Exit.USAGE, "there is no baseline", where=str(file), next=f"mlapatch guard record --file {file}"
        )
    return file


def is_there(path: Path) -> bool:
    """Whether a file is there. MlapatchError (exit 4) where this user may not look: what is not seen guards nothing."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise MlapatchError(
            Exit.REFUSED,
            "a baseline may be there that cannot be looked at, so nothing proves that local edits are untouched",
            where=str(path),
            found=f"{type(error).__name__}: {error.strerror}",
            expected="folders that this user may look into",
            next=f"run as its owner, or: chmod o+rx {path.parent}; chmod o+r {path.parent}/*",
        ) from None


def load_baseline(path: Path) -> Baseline:
    """Read a baseline. MlapatchError (exit 4) where it does not say one: nothing would be guarded."""
    try:
        return _parsed(path.read_text("utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MlapatchError(
            Exit.REFUSED,
            "the baseline cannot be read, so nothing proves that local edits are untouched",
            where=str(path),
            found=f"{type(error).__name__}: {error}",
            next="restore the file, or record anew: mlapatch guard record --replace",
        ) from None


def save_baseline(path: Path, baseline: Baseline) -> None:
    """Write a baseline, whole or not at all."""
    elsewhere = f"in a folder of yours: mlapatch guard record --file FOLDER/{NAME}"
    then = "what is there is whole, the old baseline or the new one"
    with environment_errors(path.parent, then, elsewhere=elsewhere):
        write_atomically(path, rendered(baseline).encode(), like=path.stat() if path.exists() else None)


def keep(target: Target, baseline: Baseline, contents: Iterable[bytes]) -> None:
    """Keep a copy of the baseline and the bytes behind it in the state folder; MlapatchError where it is read-only."""
    folder = kept_folder(target)
    with Journal(target.state_folder).locked(), environment_errors(folder):
        make_folder(folder)
        wanted = {sha256(data): data for data in contents}
        for name, data in wanted.items():
            if kept_bytes(target, name) is None:
                write_atomically(folder / name, data)
        write_atomically(folder / NAME, rendered(baseline).encode())
        for item in folder.iterdir():
            if item.name not in wanted and item.name != NAME:
                item.unlink()


def kept_bytes(target: Target, digest: str) -> bytes | None:
    """Bytes behind the last baseline, proven by their sha256."""
    with contextlib.suppress(OSError):
        data = (kept_folder(target) / digest).read_bytes()
        return data if sha256(data) == digest else None
    return None


def rendered(baseline: Baseline) -> str:
    """The baseline as TOML; the same edits give the same text."""
    lines = [_HEAD, f"format = {FORMAT}", f"sglang = {_basic(baseline.sglang)}"]
    if baseline.commit:
        lines.append(f"commit = {_basic(baseline.commit)}")
    for _, file in sorted(baseline.files.items()):
        lines += ["", "[[file]]", f"path = {_basic(file.path)}", f"state = {_basic(_state(file))}"]
        lines += [f"original = {_basic(file.original)}"] if file.original else []
        lines += [f"edited = {_basic(file.edited)}"] if file.edited and file.has_edit else []
        lines += [f"diff = {_block(file.diff)}"] if file.diff else []
    return "\n".join(lines) + "\n"


def _state(file: Recorded) -> str:
    if not file.has_edit:
        return "unedited"
    return "edited" if file.original and file.edited else "added" if file.edited else "deleted"


def _parsed(text: str) -> Baseline:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    table = tomllib.loads(text)
    if table.get("format") != FORMAT:
        raise ValueError(f"format {table.get('format')!r} is not {FORMAT}; a newer mlapatch wrote it?")
    files: dict[str, Recorded] = {}
    for row in table.get("file", []):
        file = _file(row)
        if file.path in files:
            raise ValueError(f"{file.path} is there twice")
        files[file.path] = file
    return Baseline(str(table["sglang"]), str(table.get("commit", "")), files)


def _file(row: Mapping[str, Any]) -> Recorded:
    path, state, original = str(row["path"]), str(row["state"]), str(row.get("original", ""))
    edited = original if state == "unedited" else str(row.get("edited", ""))
    file = Recorded(path, original, edited, str(row.get("diff", "")))
    if not _PATH.fullmatch(path) or ".." in path.split("/"):
        raise ValueError(f"{path!r:.120} is no path inside the sglang package")
    if _state(file) != state:
        raise ValueError(f"{path}: 'state', 'original' and 'edited' do not go together")
    for digest in filter(None, (original, edited)):
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ValueError(f"{path}: {digest!r:.70} is no sha256")
    return file


def _block(diff: str) -> str:
    """A diff (which ends in a newline) as it is where TOML allows it, else with escapes."""
    if "'''" not in diff and not _CONTROL.search(diff):
        return f"'''\n{diff}'''"
    escaped = diff.replace("\\", "\\\\").replace('"""', '""\\"')
    return f'"""\n{_CONTROL.sub(_as_escape, escaped)}"""'


def _basic(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{_CONTROL.sub(_as_escape, escaped)}"'


def _as_escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
