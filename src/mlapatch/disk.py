"""Files that are written whole or not at all, and outlast a kill and a power loss; every part writes through this."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit

TEMPORARY = ".mlapatch-tmp"
STALE_SECONDS = 3600.0  # no write takes that long: what is half-written since then is of a kill
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)  # some network file systems


def write_atomically(path: Path, data: bytes, *, like: os.stat_result | None = None) -> None:
    """Write beside, sync, rename, sync the folder; `like` gives mode and owner."""
    with contextlib.suppress(OSError):
        drop_leftovers(path.parent, path.name, older=STALE_SECONDS)
    temporary = written_beside(path, data, like)
    try:
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_output(path: Path, data: bytes) -> None:
    """A file where the user asked for one, whole or not at all; a link is followed, a device or pipe written to."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
    else:
        write_atomically(path.resolve(), data)


def written_beside(path: Path, data: bytes, like: os.stat_result | None) -> Path:
    """A file's new bytes, synced, under another name in its folder."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if like is not None:
                os.utime(file.fileno(), ns=(like.st_atime_ns, _later(like.st_mtime_ns)))
            os.fchmod(file.fileno(), stat.S_IMODE(like.st_mode) if like is not None else _new_file_mode())
            if like is not None and (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(PermissionError):
                    os.fchown(file.fileno(), like.st_uid, like.st_gid)
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    return Path(name)


def _later(modified: int) -> int:
    """Now, and never in the same second as the bytes before.

    Python looks at a source's time, in seconds, before it reads the bytes. A server that starts in between writes a
    .pyc of the new bytes with the old time; a revert within that second would make it look right.
    """
    return max(time.time_ns(), (modified // 1_000_000_000 + 1) * 1_000_000_000)


def _new_file_mode() -> int:
    """As `open` would make it (mkstemp's files are private): whoever runs the server must be able to read the state."""
    mask = os.umask(0o022)
    os.umask(mask)
    return 0o666 & ~mask


def drop_leftovers(folder: Path, name: str = "", *, older: float = 0.0) -> None:
    """Remove what kills left of half-written files, of one name or of any; `older` than so many seconds."""
    for leftover in folder.glob(f".{escaped(name)}.*{TEMPORARY}" if name else f".*{TEMPORARY}"):
        with contextlib.suppress(FileNotFoundError):
            if not older or time.time() - leftover.stat().st_mtime > older:
                leftover.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, so that they outlast a power loss.

    One that is there already is synced too: whoever made it may have been killed before that.
    """
    if not folder.parent.is_dir():
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the changes of names in a folder outlast a power loss."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder that may be written to and not be listed
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def escaped(name: str) -> str:
    """A name for `glob`."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


_WAYS = {
    errno.ELOOP: "remove the link that stands there (mlapatch writes through none), then run the same command again",
    errno.EIO: "look for a failing disk (dmesg), then run the same command again",
}


@contextlib.contextmanager
def environment_errors(
    where: Path, then: str = "nothing was changed", *, elsewhere: str = "patch when the image is built"
) -> Iterator[None]:
    """Turn a read-only or full file system into a clear exit 5.

    `then` says what that means; `elsewhere` is what a user can do who may not write there.
    """
    try:
        yield
    except PermissionError as error:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            f"no permission to write; {then}",
            where=str(error.filename or where),
            found=f"owner {_owner(where)}, running as uid {os.geteuid()}",
            next=f"{_way_to_write(where)}, or {elsewhere}",
        ) from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not where.is_dir():
            raise MlapatchError(
                Exit.ENVIRONMENT,
                f"cannot write: no such folder; {then}",
                where=str(where),
                next=f"make it first, or {elsewhere}",
            ) from None
        raise MlapatchError(
            Exit.ENVIRONMENT,
            f"cannot write: {error.strerror or error}; {then}",
            where=str(error.filename or where),
            found=f"{type(error).__name__} {error.errno}",
            next=_WAYS.get(error.errno or 0, "make room or remount it writable, then run the same command again"),
        ) from None


def _way_to_write(path: Path) -> str:
    if _owner(path) == f"uid {os.geteuid()}":
        return "it is yours: chmod u+w (chattr -i where lsattr shows an i)"
    return "run as the owner"


def _owner(path: Path) -> str:
    try:
        while not path.exists() and path != path.parent:
            path = path.absolute().parent
        return f"uid {path.stat().st_uid}"
    except OSError:
        return "unknown"
