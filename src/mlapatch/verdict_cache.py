"""Verdicts by content: the same bytes, patch, version and engine give the same verdict, without parsing anything."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packaging.version import Version

from mlapatch import __version__
from mlapatch.disk import write_atomically
from mlapatch.engine.judgement import Judgement
from mlapatch.engine.patch import Patch
from mlapatch.install.write import sha256
from mlapatch.jsontext import parsed_object

LIMIT = 4000


class VerdictCache:
    """A JSON file of judgements. A missing, broken or unwritable one costs time, never a verdict."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.kept: dict[str, Any] = {}
        self.changed = False
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                self.kept = parsed_object(path.read_bytes())

    @classmethod
    def default(cls) -> VerdictCache:
        """In `MLAPATCH_CACHE`, else the user's cache folder; `MLAPATCH_CACHE=` (empty) keeps none."""
        chosen = os.environ.get("MLAPATCH_CACHE")
        if chosen == "":
            return cls(None)
        if chosen:
            return cls(Path(chosen) / "verdicts.json")
        from platformdirs import user_cache_path

        return cls(user_cache_path("mlapatch", appauthor=False) / "verdicts.json")

    def judge(
        self, source: bytes, patch: Patch, version: Version | None, how: Callable[..., Judgement] | None = None
    ) -> Judgement:
        """The kept judgement, or a new one (`how` defaults to the engine's, without the proof by compilation)."""
        key = f"{sha256(source)} {patch.digest} {version} {_engine_digest()} {getattr(how, '__name__', '')}"
        if key in self.kept:
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
                kept = Judgement.from_cache(self.kept[key])
                if kept.patch == patch.name:  # else the file is damaged
                    return kept
        if how is None:
            from mlapatch.engine.verdict import judge

            judgement = judge(source, patch, version, prove=False)
        else:
            judgement = how(source, patch, version)
        self.kept[key] = judgement.to_cache()
        self.changed = True
        return judgement

    def save(self) -> None:
        """Write what was added, the newest last; older ones go when there are too many."""
        if self.path is None or not self.changed:
            return
        kept = dict(list(self.kept.items())[-LIMIT:])
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(kept).encode())
        self.changed = False


_digest = ""


def _engine_digest() -> str:
    """Changes with the engine's own code and the Python that reads with it: another one's verdict is never believed."""
    global _digest
    if not _digest:
        folder = Path(__file__).parent / "engine"
        texts = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        _digest = sha256(f"{__version__} {sys.version_info[:2]}".encode() + texts)[:16]
    return _digest
