"""SGLang's wheels: read the few files that matter, prove them by RECORD, and keep them by content hash.

Layout of the cache (`MLAPATCH_CACHE`, else the user's cache folder); whatever has its final name in it is complete:

    objects/ab/abcd...      one file's bytes by sha256, shared by all releases that have it
    releases/0.5.9.json     which wheel, and the sha256 of each file asked for so far
    wheels/<sha256>/x.whl   whole wheels, only of releases that were unpacked
    listing.json            the versions on the index, for an hour
    tmp/, locks/            downloads in progress; one lock a release
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from mlapatch.errors import MlapatchError
from mlapatch.install import index
from mlapatch.install.index import Progress
from mlapatch.install.wheelfile import ReleaseFiles, disk_error, hash_file, parse_record, read_wheel, unpack_wheel
from mlapatch.jsontext import parsed_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Listing", "Progress", "ReleaseFiles", "WheelStore", "read_wheel", "unpack_wheel"]

_LISTING_SECONDS = 3600.0
_STALE_TMP_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Listing:
    """The versions on the index, oldest first; `offline`: the index could not be asked, this is an older answer."""

    versions: list[Version]
    asked_at: float
    offline: bool = False


@dataclass
class WheelStore:
    """Releases fetched so far, and the way to fetch others. Safe with several processes, kills and lost connections."""

    root: Path
    progress: Progress | None = None
    fetched: list[str] = field(default_factory=list)
    """Wheels downloaded by this object, for reports and tests."""

    @classmethod
    def default(cls, progress: Progress | None = None) -> WheelStore:
        """The user's store: `MLAPATCH_CACHE`, else the user's cache folder."""
        if chosen := os.environ.get("MLAPATCH_CACHE"):
            return cls(Path(chosen), progress)
        from platformdirs import user_cache_path

        return cls(user_cache_path("mlapatch", appauthor=False), progress)

    def files(self, version: Version | str, paths: Iterable[str], *, progress: Progress | None = None) -> ReleaseFiles:
        """`paths` of a release (those that its wheel has), from the cache or the index."""
        version, wanted = _as_version(version), sorted(set(paths))
        if found := self._cached(version, wanted):
            return found
        with self._guarded(f"release-{version}"):
            if found := self._cached(version, wanted):
                return found
            with self._wheel(version, progress or self.progress, keep=False) as wheel:
                fresh = read_wheel(wheel, wanted)
            self._remember(version, fresh, wanted)
        return fresh

    def unpack(self, version: Version | str, dest: Path, *, progress: Progress | None = None) -> Path:
        """Unpack a whole release into `dest` (see `unpack_wheel`); its wheel is kept."""
        version = _as_version(version)
        with self._guarded(f"release-{version}"), self._wheel(version, progress or self.progress, keep=True) as wheel:
            return unpack_wheel(wheel, dest)

    def releases(self, *, pre: bool = False) -> list[Version]:
        """The versions on the index, oldest first; pre-releases only where asked for."""
        return [v for v in self.listing().versions if pre or not v.is_prerelease]

    def listing(self, *, max_age: float = _LISTING_SECONDS) -> Listing:
        """The index's versions, at most `max_age` seconds old; where the index cannot be reached, the last answer."""
        path, kept = self.root / "listing.json", None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            data = parsed_object(path.read_bytes())
            kept = Listing([Version(v) for v in data["versions"]], float(data["asked_at"]))
        now = time.time()
        if kept is not None and 0 <= now - kept.asked_at < max_age:
            return kept
        try:
            fresh = Listing(index.list_versions(), now)
        except MlapatchError:
            if kept is None:
                raise
            return Listing(kept.versions, kept.asked_at, offline=True)
        with contextlib.suppress(MlapatchError):  # a cache that cannot be written to costs time only
            self._write(path, json.dumps({"asked_at": now, "versions": [str(v) for v in fresh.versions]}).encode())
        return fresh

    def has(self, version: Version | str, paths: Iterable[str]) -> bool:
        """Whether `files` would need no download."""
        return self._cached(_as_version(version), sorted(set(paths))) is not None

    def _cached(self, version: Version, wanted: list[str]) -> ReleaseFiles | None:
        try:
            known = parsed_object(self._release_path(version).read_bytes())
            digests: dict[str, str | None] = dict(known["meta"])
            unasked = [path for path in wanted if path not in known["files"]]
            if unasked:  # RECORD tells what the wheel has; another release may have brought the same bytes
                record = parse_record(self._object(known["meta"][f"{known['dist_info']}/RECORD"]))
                known["files"].update({path: record.get(path) for path in unasked})
            digests.update({path: known["files"][path] for path in wanted})
            held = {path: digest for path, digest in digests.items() if digest is not None}
            files = {path: self._object(digest) for path, digest in held.items()}
            return ReleaseFiles(version, known["wheel"], known["wheel_sha256"], known["dist_info"], files, held)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _object(self, digest: str) -> bytes:
        if not re.fullmatch(r"[0-9a-f]{64}", digest):  # a damaged entry can name any file
            raise ValueError(f"no digest: {digest!r:.70}")
        data = self._object_path(digest).read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"damaged object {digest}")
        return data

    def _remember(self, version: Version, fresh: ReleaseFiles, wanted: list[str]) -> None:
        for path, data in fresh.files.items():
            self._write(self._object_path(fresh.sha256[path]), data)
        files: dict[str, str | None] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            known = parsed_object(self._release_path(version).read_bytes())
            if known["wheel_sha256"] == fresh.wheel_sha256:
                files = dict(known["files"])
        files.update({path: fresh.sha256.get(path) for path in wanted})
        meta = {path: digest for path, digest in fresh.sha256.items() if path.startswith(fresh.dist_info + "/")}
        known = {
            "wheel": fresh.wheel,
            "wheel_sha256": fresh.wheel_sha256,
            "dist_info": fresh.dist_info,
            "meta": meta,
            "files": files,
        }
        self._write(self._release_path(version), json.dumps(known, indent=1).encode())

    @contextlib.contextmanager
    def _wheel(self, version: Version, progress: Progress | None, *, keep: bool) -> Iterator[Path]:
        """The wheel of a release: the kept one, else a download, dropped afterwards unless `keep` (pip has a cache)."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
            known = parsed_object((self.root / "wheels" / f"{version}.json").read_bytes())
            wheel = self.root / "wheels" / known["sha256"] / known["name"]
            if wheel.is_file() and hash_file(wheel) == known["sha256"]:
                yield wheel
                return
        self._drop_stale()
        staging = Path(tempfile.mkdtemp(prefix=f"{version}-", dir=self._folder("tmp")))
        try:
            out, scratch = staging / "out", staging / "scratch"
            out.mkdir()
            scratch.mkdir()
            wheel = index.download(version, out, scratch, progress)
            self.fetched.append(wheel.name)
            if keep:
                digest = hash_file(wheel)
                kept = self._folder("wheels", digest) / wheel.name
                wheel = wheel.replace(kept)
                line = json.dumps({"name": kept.name, "sha256": digest})
                self._write(self.root / "wheels" / f"{version}.json", line.encode())
            yield wheel
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _drop_stale(self) -> None:
        """Remove what killed processes left in tmp/."""
        for left in self._folder("tmp").iterdir():
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _STALE_TMP_SECONDS:
                    shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        from filelock import FileLock

        try:
            with FileLock(self._folder("locks") / f"{name}.lock"):
                yield
        except OSError as error:
            raise disk_error(error, self.root) from error

    def _folder(self, *parts: str) -> Path:
        folder = self.root.joinpath(*parts)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, folder) from error
        return folder

    def _object_path(self, digest: str) -> Path:
        return self.root / "objects" / digest[:2] / digest

    def _release_path(self, version: Version) -> Path:
        return self.root / "releases" / f"{version}.json"

    def _write(self, path: Path, data: bytes) -> None:
        """A whole file or none; not synced: what a power loss cuts is found out by its sha256, or is no JSON."""
        try:
            handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=self._folder("tmp"))
            try:
                with os.fdopen(handle, "wb") as out:
                    out.write(data)
                self._folder(*path.parent.relative_to(self.root).parts)
                Path(name).replace(path)
            finally:
                Path(name).unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(error, path) from error


def _as_version(version: Version | str) -> Version:
    return version if isinstance(version, Version) else Version(version)
