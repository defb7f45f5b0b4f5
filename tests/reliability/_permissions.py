"""Site-packages that may not be written, or not even read: exit 5 says what to do, and nothing is changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from tests.corpus import BACKEND
from tests.reliability._installing import Bench, Install, Kind, NotHere, Trial

SOMEBODY = 1234
DENIED = "error: no permission to write; nothing was changed"


def without_privileges(bench: Bench) -> str:
    """An interpreter that obeys modes and owners, as any user's does: root's powers are dropped before it starts."""
    if os.geteuid() != 0:
        return sys.executable
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise NotHere("setpriv is not installed, and root may write everywhere")
    return _script(bench.folder / "plain-python", f'exec {setpriv} --bounding-set=-all "{sys.executable}" "$@"')


def _script(path: Path, line: str) -> str:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def _each(folder: Path, change: Callable[[Path], None]) -> None:
    for path in [*folder.rglob("*"), folder]:
        change(path)


def _read_only(path: Path) -> None:
    path.chmod(0o555 if path.is_dir() else 0o444)


def _refused(here: Install, *words: str) -> None:
    """status works, and apply and revert say what to do; a patch that is there is seen, and stays."""
    assert here.facts("gather-cast")[2] == "applicable"
    here.refuses("apply", "gather-cast", code=5, words=(DENIED, *words))
    assert not (here.package.parent / ".mlapatch").exists()


def read_only_modes(bench: Bench) -> Iterator[Trial]:
    """The user's own folders, without the write bit (Nix and Guix do so)."""
    site = bench.small("site")
    here = Install(site / "sglang", ("--sglang", site), "wheel", run_by=without_privileges(bench))
    _each(site, _read_only)
    try:
        yield "all", partial(_refused, here, "it is yours: chmod u+w")
        if bench.thorough:
            site.chmod(0o755)
            yield "all but site-packages itself", partial(_state_only, here)
    finally:
        _each(site, lambda path: path.chmod(0o755))


def _state_only(here: Install) -> None:
    here.refuses("apply", "gather-cast", code=5, words=(DENIED,))
    assert here.facts("gather-cast")[2] == "applicable"


def other_owner(bench: Bench) -> Iterator[Trial]:
    if os.geteuid() != 0:
        raise NotHere("only root can give files away")
    plain = without_privileges(bench)
    site = bench.small("site")
    here = Install(site / "sglang", ("--sglang", site), "wheel", run_by=plain)
    _each(site, lambda path: os.chown(path, SOMEBODY, SOMEBODY))
    words = (
        f"found: owner uid {SOMEBODY}, running as uid 0",
        "next: run as the owner, or patch when the image is built",
    )
    yield "apply", partial(_refused, here, *words)

    def patched() -> None:
        root = Install(here.package, here.aim, "wheel")
        root.ok("apply", "gather-cast")
        assert here.facts("gather-cast") == ("wheel", "patched", "applied")
        here.ok("apply", "gather-cast")  # nothing to do needs no permission
        here.refuses("revert", code=5, words=(DENIED,))
        owner = here.file.stat()
        assert (owner.st_uid, owner.st_gid) == (SOMEBODY, SOMEBODY), "the owner is another"
        root.ok("revert")

    yield "a patch of the owner's", patched


def unreadable(bench: Bench) -> Iterator[Trial]:
    plain = without_privileges(bench)
    if os.geteuid() != 0:
        raise NotHere("only root can give files away")
    for name, relative in (("file", BACKEND), ("package", "sglang"), ("folder of the file", str(Path(BACKEND).parent))):
        site = bench.small(name)
        os.chown(site / relative, SOMEBODY, SOMEBODY)
        (site / relative).chmod(0o700)
        here = Install(site / "sglang", ("--sglang", site), "wheel", run_by=plain)
        for verb in ("status", "apply gather-cast", "revert", "guard check"):
            yield f"{name}: {verb}", partial(here.refuses, *verb.split(), code=5, words=("Permission denied",))


def read_only_mount(bench: Bench) -> Iterator[Trial]:
    site = bench.small("site")
    mount = "mount --bind {0} {0} && mount -o remount,ro,bind {0}".format("'" + str(site) + "'")
    unshare = ["unshare", "--mount", "--map-root-user"] if os.geteuid() else ["unshare", "--mount"]
    if subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, check=False).returncode:
        raise NotHere("no mount may be made here")
    line = f'exec {" ".join(unshare)} sh -c "{mount} && exec \'{sys.executable}\' \\"\\$@\\"" sh "$@"'
    inside = _script(bench.folder / "mounted-python", line)
    here = Install(site / "sglang", ("--sglang", site), "wheel", run_by=inside)
    words = ("error: cannot write: Read-only file system; nothing was changed", "remount it writable")

    def refused() -> None:
        assert here.facts("gather-cast")[2] == "applicable"
        here.refuses("apply", "gather-cast", code=5, words=words)
        assert not (site / ".mlapatch").exists()

    yield "apply", refused


def immutable(bench: Bench) -> Iterator[Trial]:
    site = bench.small("site")
    file = site / BACKEND
    if subprocess.run(["chattr", "+i", file], capture_output=True, check=False).returncode:
        raise NotHere("chattr +i is not possible here")
    here = Install(site / "sglang", ("--sglang", site), "wheel")
    try:
        yield "apply", partial(_state_only, here)
    finally:
        subprocess.run(["chattr", "-i", file], check=False)


KINDS: Iterable[Kind] = (
    Kind("read-only site-packages of one's own: exit 5 and what to do", read_only_modes, True),
    Kind("site-packages of another user: status works, apply and revert are exit 5", other_owner),
    Kind("a target, its folder or the package that this user may not read: exit 5", unreadable),
    Kind("a read-only mount: exit 5", read_only_mount),
    Kind("an immutable file (chattr +i): exit 5", immutable),
)
