"""A small real site-packages of SGLang 0.5.9, and a cache of its own that holds the release: nothing is fetched."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.corpus import BACKEND, RUNNER, Corpus
from tests.reliability.figures import Setting

VERSION = "0.5.9"


@dataclass(frozen=True)
class Place:
    """Where inputs are tried. `originals`: the targets' bytes as released, by path in the site folder."""

    work: Path
    site: Path
    cache: Path
    corpus: Corpus
    originals: dict[str, bytes]

    @property
    def backend(self) -> Path:
        return self.site / BACKEND

    @property
    def state(self) -> Path:
        return self.site / ".mlapatch"

    @property
    def writable(self) -> tuple[Path, ...]:
        """The target, the state folder, and the cache: the only places that a verb on this site may write to."""
        return (self.site / "sglang", self.state, self.cache)

    def contents(self) -> dict[str, str]:
        """Every file of the site but the state, by its hash."""
        files = [path for path in self.site.rglob("*") if path.is_file() and ".mlapatch" not in path.parts]
        return {str(p.relative_to(self.site)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    def restore(self) -> None:
        """As installed: without state, with the released bytes."""
        shutil.rmtree(self.state, ignore_errors=True)
        for path, data in self.originals.items():
            (self.site / path).write_bytes(data)


def prepare(setting: Setting) -> Place:
    """Make it."""
    site = setting.corpus.install_tree(VERSION, (setting.work / "site").resolve())
    record = next(site.glob("*.dist-info/RECORD"))
    listed = [line for line in record.read_text().splitlines() if (site / line.split(",")[0]).exists()]
    record.write_text("\n".join(listed) + "\n")  # the tree is a small part of the wheel, and whole
    cache = setting.work.resolve() / "cache"
    entry = json.loads((setting.corpus.root / "releases" / f"{VERSION}.json").read_text())
    wanted = [digest for digest in (*entry["meta"].values(), *entry["files"].values()) if digest]
    for path in (f"releases/{VERSION}.json", *(f"objects/{digest[:2]}/{digest}" for digest in wanted)):
        (cache / path).parent.mkdir(parents=True, exist_ok=True)
        if (setting.corpus.root / path).is_file():
            shutil.copyfile(setting.corpus.root / path, cache / path)
    originals = {path: (site / path).read_bytes() for path in (BACKEND, RUNNER)}
    return Place(setting.work.resolve(), site, cache, setting.corpus, originals)


@contextlib.contextmanager
def own_environment(place: Place) -> Iterator[None]:
    """Its cache, no index, and none of the developer's settings."""
    kept = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("MLAPATCH_", "PIP_", "UV_")) or name in ("NO_COLOR", "FORCE_COLOR"):
            del os.environ[name]
    os.environ.update(MLAPATCH_CACHE=str(place.cache), PIP_NO_INDEX="1", XDG_DATA_HOME=str(place.work / "data"))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
