"""A small world to break: an SGLang with local edits, the caches, the runs and the logs, all below one folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import Version

import mlapatch.engine.verdict
import mlapatch.install.index
import mlapatch.install.journal
import mlapatch.rebase
from mlapatch.catalogue import load_catalogue
from mlapatch.commands.apply import apply
from mlapatch.commands.revert import revert
from mlapatch.commands.status import status
from mlapatch.engine.patch import Patch
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from tests.corpus import BACKEND, RUNNER, Corpus, cache_root
from tests.install.local_index import make_wheel

VERSION = "0.5.9"


@dataclass(frozen=True)
class World:
    """Its places. Only `root` is ever damaged; `root` can be copied to another folder and back."""

    home: Path

    @property
    def root(self) -> Path:
        return self.home / "world"

    @property
    def site(self) -> Path:
        return self.root / "site"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def baseline(self) -> Path:
        return self.root / "here" / "mlapatch-guard.toml"

    @property
    def database(self) -> Path:
        return self.root / "data" / "mlapatch" / "runs.sqlite3"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def wheel(self) -> Path:
        return next(self.home.glob("*.whl"))

    def build(self) -> None:
        """Both targets have an edit of the user's, so that no wheel can give the original back."""
        release = Corpus(cache_root()).release(VERSION)
        Corpus(cache_root()).install_tree(VERSION, self.site)
        own = {path: data for path, data in release.files.items() if path.startswith("sglang/")}
        make_wheel(self.home, VERSION, own)
        record = self.site / release.dist_info / "RECORD"  # only what is there: thousands of files take their time
        lines = [line for line in record.read_text().splitlines() if (self.site / line.split(",")[0]).exists()]
        record.write_text("\n".join(lines) + "\n")
        for path in (BACKEND, RUNNER):
            target = self.site / path
            target.write_bytes(target.read_bytes() + b"# a local edit\n")
            compile_(target)
        for folder in (self.cache, self.baseline.parent, self.logs):
            folder.mkdir(parents=True)

    def enter(self) -> None:
        """Let this process work in it and in nothing else."""
        os.environ["MLAPATCH_CACHE"] = str(self.cache)
        os.environ.pop("PYTHONPYCACHEPREFIX", None)
        mlapatch.install.journal.LOCK_SECONDS = 0.2
        vars(mlapatch.install.index)["download"] = self._download
        for module in (mlapatch.engine.verdict, mlapatch.rebase):  # bytes in, value out: what is known is known
            for name in {"judge", "presence", "apply"} & vars(module).keys():
                vars(module)[name] = _remembering(vars(mlapatch.engine.verdict)[name])
        catalogue = load_catalogue(None)
        for verb in ("apply", "revert", "status", "guard"):  # reading the patch folders is most of a command's time
            vars(sys.modules[f"mlapatch.commands.{verb}"])["load_catalogue"] = lambda _=None: catalogue

    def _download(self, version: object, out: Path, *_: object) -> Path:
        if str(version) != VERSION:
            raise MlapatchError(Exit.ENVIRONMENT, "the package index cannot be reached")
        fetched = out / self.wheel.name
        fetched.write_bytes(self.wheel.read_bytes())
        return fetched

    def copy(self, name: str) -> None:
        """Keep the world as it is under a name."""
        shutil.rmtree(self.home / name, ignore_errors=True)
        shutil.copytree(self.root, self.home / name, symlinks=True)

    def restore(self, name: str) -> None:
        """Make it what it was."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.home / name, self.root, symlinks=True)


def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    if hasattr(function, "known"):
        return function
    known: dict[Any, Any] = {}

    def remembered(source: bytes, patch: Patch, version: Version | None, **more: Any) -> Any:
        key = (source, patch.digest, patch.sglang, version, *sorted(more.items()))
        if key not in known:
            known[key] = function(source, patch, version, **more)
        return known[key]

    vars(remembered)["known"] = known
    return remembered


def compile_(source: Path) -> None:
    """A stand-in for a .pyc that Python would never check: the sha256 of the source that it was made from."""
    folder = source.parent / "__pycache__"
    folder.mkdir(exist_ok=True)
    (folder / f"{source.stem}.cpython-311.pyc").write_text(digest(source))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


@dataclass(frozen=True)
class WritePath:
    """One thing that writes: what comes before it, what it does, what can be seen of it, and what must hold after it.

    `errors` are the exit codes that a fault may end in; `undone`: an error that happens once leaves the old state.
    """

    name: str
    act: Callable[[World], Any]
    view: Callable[[World], Any]
    before: Callable[[World], Any] | None = None
    allowed: Callable[[Any, Any, Any], bool] = lambda now, old, new: now in (old, new)
    after: Callable[[World, WritePath, Any], list[str]] = field(default=lambda *_: [])
    errors: tuple[int, ...] = (0, 5)
    undone: bool = True
    lasting: bool = True  # what is done outlasts a power loss
    losses: int = 1  # every n-th state that a power loss may leave is tried; 0: nothing is promised


def targets(world: World) -> list[str]:
    return [digest(world.site / path) for path in (BACKEND, RUNNER)]


def each_old_or_new(now: list[str], old: list[str], new: list[str]) -> bool:
    return all(one in pair for one, pair in zip(now, zip(old, new, strict=True), strict=True))


def patched_state(world: World, path: WritePath, new: Any) -> list[str]:
    """What a user does after a bad end: a status, then either a revert, or the same command again and a revert."""
    problems = stale_bytecode(world)
    verdicts = {str(patch["verdict"]) for patch in status(sglang=world.site).data["patches"]}  # type: ignore[attr-defined]
    if verdicts & {"edited", "drifted", "ambiguous"}:
        problems.append(f"verdicts {sorted(verdicts)}")
    world.copy("aside")
    for again in (False, True):
        if again:
            world.restore("aside")
            path.act(world)
            if path.view(world) != new:
                problems.append("the same command does not finish")
        revert(sglang=world.site)
        problems += [f"{problem} ({'again and ' if again else ''}revert)" for problem in unclean(world)]
    return problems


def stale_bytecode(world: World) -> list[str]:
    stale = []
    for path in (BACKEND, RUNNER):
        for compiled in (world.site / path).parent.glob(f"__pycache__/{Path(path).stem}.*.pyc"):
            if compiled.read_text() != digest(world.site / path):
                stale.append(f"{compiled.name} is of other bytes than the source")
    return stale


def unclean(world: World) -> list[str]:
    """Why a tree is not as it was before mlapatch."""
    original = json.loads((world.home / "original.json").read_text())
    found = [] if targets(world) == original else ["the original bytes are lost"]
    found += stale_bytecode(world)
    found += [f"{left.name} stays" for left in world.site.rglob("*mlapatch-tmp")]
    journal = world.site / ".mlapatch" / "journal.json"
    if journal.exists():
        kept = json.loads(journal.read_text())
        found += ["the journal still speaks of patches"] if kept["targets"] or kept["pending"] else []
    return found


def _apply(*names: str) -> Callable[[World], Any]:
    return lambda world: apply(list(names), sglang=world.site)


def _revert(*names: str) -> Callable[[World], Any]:
    return lambda world: revert(list(names), sglang=world.site)


def _upgraded(world: World) -> None:
    """Applied, and then the file was replaced, as an upgrade does."""
    kept = (world.site / BACKEND).read_bytes()
    apply(["gather-cast"], sglang=world.site)
    (world.site / BACKEND).write_bytes(kept)
    compile_(world.site / BACKEND)


PATCHING = [
    WritePath(name, act, targets, before, each_old_or_new, patched_state)
    for name, act, before in (
        ("apply", _apply("gather-cast"), None),
        ("apply two", _apply("gather-cast", "profile-decode"), None),
        ("apply another", _apply("profile-decode"), _apply("gather-cast")),
        ("apply after an upgrade", _apply("gather-cast"), _upgraded),
        ("revert one", _revert("gather-cast"), _apply("gather-cast", "profile-decode")),
        ("revert", _revert(), _apply("gather-cast", "profile-decode")),
    )
]
