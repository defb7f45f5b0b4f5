"""Which releases a user means, and their files: from the index, from a wheel file, or from a git ref of a checkout."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.index import Progress
from mlapatch.install.wheels import Listing, ReleaseFiles, WheelStore

LATEST = "latest"


def select(
    wanted: Sequence[str], listing: Callable[[], Listing], *, pre: bool = False
) -> tuple[list[Version], list[Version]]:
    """`0.5.9`, `>=0.5.9,<0.5.20`, `latest` -> the versions named one by one, and those that ranges bring in.

    The index is asked only where a range or `latest` needs it. Errors: neither version nor specifier (exit 2), a range
    that no release is in (exit 5).
    """
    named: dict[Version, None] = {}
    ranged: dict[Version, None] = {}
    for text in wanted:
        if text.strip().lower() == LATEST:
            found = _newest(listing().versions, pre)
            named[found] = None
            continue
        try:
            named[Version(text)] = None
            continue
        except InvalidVersion:
            pass
        specifier = _specifier(text)
        known = listing().versions
        inside = list(specifier.filter(known, prereleases=True if pre else None))
        if not inside:
            newest = ", ".join(str(v) for v in known[-3:])
            raise MlapatchError(
                Exit.ENVIRONMENT,
                f"no release of SGLang is {text}",
                found=f"the newest are {newest}",
                next="mlapatch check --release latest",
            )
        ranged.update(dict.fromkeys(inside))
    return sorted(named), sorted(version for version in ranged if version not in named)


def supported(specifiers: Iterable[str], known: Iterable[Version], *, pre: bool = False) -> list[Version]:
    """The known versions that at least one of the specifiers admits (pre-releases only with `pre`)."""
    sets = [SpecifierSet(text) for text in dict.fromkeys(specifiers)]
    return [
        version
        for version in sorted(known)
        if (pre or not version.is_prerelease) and any(s.contains(version, prereleases=True) for s in sets)
    ]


def _newest(known: Sequence[Version], pre: bool) -> Version:
    admitted = [version for version in known if pre or not version.is_prerelease]
    if not admitted:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "the package index has no release of SGLang",
            next="pip index versions sglang shows which index is asked",
        )
    return admitted[-1]


def _specifier(text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        raise MlapatchError(
            Exit.USAGE,
            f"'{text}' is neither a version nor a specifier",
            expected="such as 0.5.9, '>=0.5.9,<0.5.20' or latest",
            next="mlapatch check --release 0.5.9",
        ) from None


class _Stopped(Exception):
    pass


def fetch(
    store: WheelStore,
    versions: Sequence[Version],
    paths: Sequence[str],
    *,
    progress: Progress | None = None,
    fetched: Callable[[Version], None] | None = None,
    at_once: int = 2,
) -> dict[Version, ReleaseFiles | MlapatchError]:
    """The files of many releases, a few downloads at once; a release that cannot be had is an error in its place.

    An interruption stops the downloads; what is complete is kept. Two releases for which the index cannot be reached
    (pip tried each several times) answer for all that would need it.
    """
    stop = threading.Event()
    unreached: list[MlapatchError] = []

    def watched(label: str, done: int, total: int | None) -> None:
        if stop.is_set():
            raise _Stopped
        if progress is not None:
            progress(label, done, total)

    def one(version: Version) -> ReleaseFiles | MlapatchError:
        try:
            if len(unreached) > 1 and not store.has(version, paths):
                return unreached[0]
            return store.files(version, paths, progress=watched)
        except MlapatchError as error:
            if error.what.endswith("the package index cannot be reached"):
                unreached.append(error)
            return error

    found: dict[Version, ReleaseFiles | MlapatchError] = {}
    pool = ThreadPoolExecutor(at_once, thread_name_prefix="fetch")
    waiting: dict[Future[ReleaseFiles | MlapatchError], Version] = {pool.submit(one, v): v for v in versions}
    try:
        while waiting:
            ready, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ready:
                version = waiting.pop(future)
                found[version] = future.result()
                if fetched is not None:
                    fetched(version)
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
    return {version: found[version] for version in versions}


def files_at_ref(package: Path, repository: Path, ref: str, relatives: Iterable[str]) -> dict[str, bytes]:
    """Files of the package as a commit, branch or tag of its checkout has them."""
    from mlapatch.install.git import _git

    base = package.relative_to(repository).as_posix()
    if ref.startswith("-") or _git(repository, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}") is None:
        raise MlapatchError(
            Exit.USAGE,
            f"'{ref}' is no commit of the checkout",
            where=str(repository),
            next="git fetch --tags in that checkout, or name another ref",
        )
    found = {}
    for relative in relatives:
        data = _git(repository, "cat-file", "blob", f"{ref}:{base}/{relative}")
        if data is not None:
            found[relative] = data
    return found


def version_of_ref(ref: str) -> Version | None:
    """The version that a tag such as `v0.5.9` names; None for any other ref, which the structure alone decides."""
    name = ref.rpartition("/")[2]
    try:
        return Version(name) if name[:1] == "v" else None
    except InvalidVersion:
        return None
