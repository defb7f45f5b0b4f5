"""A wheel as a file: read members by their path in site-packages, each proven by RECORD; or unpack it whole."""

from __future__ import annotations

import base64
import contextlib
import csv
import errno
import hashlib
import io
import shutil
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from packaging.version import Version

_META = ("RECORD", "METADATA", "WHEEL")


@dataclass(frozen=True)
class ReleaseFiles:
    """Files of one release, by path in site-packages; each one's sha256 is the one in the wheel's RECORD."""

    version: Version
    wheel: str
    """The wheel's file name."""
    wheel_sha256: str
    dist_info: str
    """`sglang-0.5.9.dist-info`."""
    files: Mapping[str, bytes]
    """The files asked for that the wheel has, and its RECORD, METADATA and WHEEL."""
    sha256: Mapping[str, str]

    @cached_property
    def record(self) -> dict[str, str]:
        """sha256 (hex) of every file of the wheel, by path in site-packages."""
        return parse_record(self.files[f"{self.dist_info}/RECORD"])

    @cached_property
    def requires(self) -> list[str]:
        """`Requires-Dist` of METADATA."""
        return parse_requires(self.files[f"{self.dist_info}/METADATA"])


def parse_record(text: bytes, *, installed: bool = False) -> dict[str, str]:
    """RECORD -> sha256 (hex) by path in site-packages; what is not sha256 (RECORD itself) is left out.

    `installed`: it is the one in site-packages, where pip and uv list the scripts that they made outside, too.
    """
    found = {}
    for row in csv.reader(io.StringIO(text.decode("utf-8"))):
        if len(row) < 2 or not row[1].startswith("sha256=") or (installed and _escapes(row[0])):
            continue
        encoded = row[1].removeprefix("sha256=")
        path = _installed_path(row[0])
        if path is not None:
            found[path] = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
    return found


def parse_requires(metadata: bytes) -> list[str]:
    """The `Requires-Dist` lines of a METADATA file."""
    head = metadata.decode("utf-8", "replace").split("\n\n", 1)[0]
    return [line.partition(":")[2].strip() for line in head.splitlines() if line.lower().startswith("requires-dist:")]


def read_wheel(wheel: Path, paths: Iterable[str]) -> ReleaseFiles:
    """Read `paths` (in site-packages) from a wheel file, each proven by its RECORD. Errors: not a wheel, damaged."""
    with _opened(wheel) as archive:
        names = {installed: name for name in archive.namelist() if (installed := _installed_path(name))}
        infos = [name for name in names if name.count("/") == 1 and name.endswith(".dist-info/RECORD")]
        if len(infos) != 1:
            raise _damaged(wheel, "exactly one .dist-info/RECORD", f"{len(infos)}")
        dist_info = infos[0].partition("/")[0]
        record = parse_record(archive.read(names[infos[0]]))
        wanted = [*paths, *(f"{dist_info}/{name}" for name in _META)]
        files = {path: archive.read(names[path]) for path in wanted if path in names}
    digests = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
    for path, digest in digests.items():
        if path != infos[0] and record.get(path) != digest:
            raise _damaged(wheel, f"sha256 {record.get(path)} by RECORD", f"{digest} in {path}")
    return ReleaseFiles(_version_of(wheel), wheel.name, hash_file(wheel), dist_info, files, digests)


def unpack_wheel(wheel: Path, dest: Path) -> Path:
    """Unpack a whole wheel as an install would, all or nothing; of `.data` only purelib and platlib, merged.

    `dest` must not exist or be an empty folder. Every file is proven by RECORD.
    """
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "the folder to unpack into is not empty",
            where=str(dest),
            next="name a folder that does not exist yet",
        )
    dest.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    try:
        with _opened(wheel) as archive:
            names = {name: path for name in archive.namelist() if (path := _installed_path(name))}
            record_name = next(
                (n for n, p in names.items() if p.count("/") == 1 and p.endswith(".dist-info/RECORD")), ""
            )
            if not record_name:
                raise _damaged(wheel, "a .dist-info/RECORD", "none")
            record = parse_record(archive.read(record_name))
            for name, path in names.items():
                data = archive.read(name)
                digest = hashlib.sha256(data).hexdigest()
                if name != record_name and record.get(path) != digest:
                    raise _damaged(wheel, f"sha256 {record.get(path)} by RECORD", f"{digest} in {path}")
                target = staging / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
                if (archive.getinfo(name).external_attr >> 16) & 0o111:
                    target.chmod(0o755)
        staging.chmod(0o755)
        staging.replace(dest)
    except OSError as error:
        raise disk_error(error, dest) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return dest


def hash_file(path: Path) -> str:
    """sha256 (hex) of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def disk_error(error: OSError, where: Path) -> MlapatchError:
    """The error for a folder that cannot be written: full, or not writable."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MlapatchError(
            Exit.ENVIRONMENT, "no space left on the disk", str(where), next="free some space, or set MLAPATCH_CACHE"
        )
    return MlapatchError(
        Exit.ENVIRONMENT, f"cannot write the cache: {error}", str(where), next="set MLAPATCH_CACHE to a writable folder"
    )


def _installed_path(name: str) -> str | None:
    """A member's path in site-packages; None for folders, scripts and headers. Errors: a path that escapes."""
    parts = PurePosixPath(name).parts
    if name.endswith("/") or not parts:
        return None
    if _escapes(name):
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "the wheel has a member outside its own folder",
            found=name,
            next="do not install it; download it again from an index that you trust",
        )
    if parts[0].endswith(".data"):
        return "/".join(parts[2:]) if len(parts) > 2 and parts[1] in ("purelib", "platlib") else None
    return "/".join(parts)


def _escapes(name: str) -> bool:
    """Whether a path leads out of site-packages, here or on another system."""
    parts = PurePosixPath(name).parts
    return name.startswith("/") or ".." in parts or "\\" in name or any(":" in part for part in parts[:1])


def _version_of(wheel: Path) -> Version:
    try:
        return parse_wheel_filename(wheel.name)[1]
    except InvalidWheelFilename as error:
        raise _damaged(wheel, "a wheel's file name (name-version-tags.whl)", wheel.name) from error


@contextlib.contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        archive = zipfile.ZipFile(wheel)
    except FileNotFoundError as error:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "no such wheel",
            where=str(wheel),
            next="pip download --no-deps sglang==X, then mlapatch check --wheel FILE",
        ) from error
    except (zipfile.BadZipFile, OSError) as error:
        raise _damaged(wheel, "a readable wheel", str(error)) from error
    with archive:
        try:
            yield archive
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise _damaged(wheel, "a readable wheel", str(error)) from error


def _damaged(wheel: Path, expected: str, found: str) -> MlapatchError:
    return MlapatchError(
        Exit.ENVIRONMENT,
        "the wheel is damaged",
        str(wheel),
        expected,
        found,
        next="download it again: pip download --no-deps sglang",
    )
