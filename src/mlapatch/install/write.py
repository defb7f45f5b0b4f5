"""The only place that writes to an installed SGLang: one file at a time, whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit

TEMPORARY = ".mlapatch-tmp"


def sha256(data: bytes) -> str:
    """Hex sha256."""
    return hashlib.sha256(data).hexdigest()


def replace_file(path: Path, data: bytes, *, found: str) -> None:
    """Replace a file's bytes if they still have the sha256 `found`; mode and owner are kept.

    The new bytes go to a temporary file in the same folder and take the name in one step, so a hard link's other
    names and a symlink's target keep theirs.
    """
    current = sha256(path.read_bytes())
    if current != found:
        raise MlapatchError(
            Exit.REFUSED,
            "the file changed while mlapatch was working; nothing was written",
            where=str(path),
            expected=f"sha256 {found[:16]}",
            found=f"sha256 {current[:16]}",
            next="run the same command again",
        )
    for leftover in path.parent.glob(f".{_escaped(path.name)}.*{TEMPORARY}"):  # of a kill; the lock is ours
        leftover.unlink(missing_ok=True)
    drop_bytecode(path)
    write_atomically(path, data, like=path.stat())
    drop_bytecode(path)


def write_atomically(path: Path, data: bytes, *, like: os.stat_result | None = None) -> None:
    """Write beside, fsync, rename; `like` gives mode and owner."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), stat.S_IMODE(like.st_mode) if like is not None else _new_file_mode())
            if like is not None and (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), like.st_uid, like.st_gid)
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    sync_folder(path.parent)


def _new_file_mode() -> int:
    """As `open` would make it (mkstemp's files are private): whoever runs the server must be able to read the state."""
    mask = os.umask(0o022)
    os.umask(mask)
    return 0o666 & ~mask


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder outlast a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems cannot
        pass
    finally:
        os.close(descriptor)


def drop_bytecode(path: Path) -> None:
    """Remove the compiled forms of a source file, of every interpreter and optimisation level.

    A restored file can have the size and time of the one that was compiled, and an unchecked-hash .pyc is never
    compared with its source at all.
    """
    for folder in bytecode_folders(path.parent):
        for compiled in folder.glob(f"{_escaped(path.stem)}.*.pyc"):
            with contextlib.suppress(FileNotFoundError):
                compiled.unlink()


def bytecode_folders(folder: Path) -> Iterator[Path]:
    """`__pycache__` beside the sources, and the same folder under PYTHONPYCACHEPREFIX."""
    yield folder / "__pycache__"
    for prefix in {os.environ.get("PYTHONPYCACHEPREFIX"), sys.pycache_prefix}:
        if prefix:
            yield Path(prefix) / folder.relative_to(folder.anchor)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


@contextlib.contextmanager
def environment_errors(where: Path) -> Iterator[None]:
    """Turn a read-only or full file system into a clear exit 5."""
    try:
        yield
    except PermissionError as error:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "no permission to write; nothing was changed",
            where=str(error.filename or where),
            found=f"owner {_owner(where)}, running as uid {os.geteuid()}",
            next="run as the owner, or patch when the image is built",
        ) from None
    except OSError as error:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            f"cannot write: {error.strerror}; nothing was changed",
            where=str(error.filename or where),
            next="make room or remount it writable, then run the same command again",
        ) from None


def _owner(path: Path) -> str:
    try:
        return f"uid {path.stat().st_uid}"
    except OSError:
        return "unknown"
