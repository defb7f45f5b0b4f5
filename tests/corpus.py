"""The shared test corpus: real SGLang files from real wheels, fetched on first use and kept by content hash.

SGLang's text is never committed: `tests/data/contents.json` holds hashes only. The folder `MLAPATCH_TEST_CACHE` (else
the user's cache folder) keeps what was fetched, across runs and pytest-xdist workers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock
from packaging.version import Version
from platformdirs import user_cache_path

from mlapatch.install.wheels import ReleaseFiles, WheelStore

BACKEND = "sglang/srt/layers/attention/flashinfer_mla_backend.py"
RUNNER = "sglang/srt/model_executor/model_runner.py"
TARGETS = (BACKEND, RUNNER)

RELEASES = ("0.4.6.post5", "0.5.9", "0.5.12.post1", "0.5.15.post1", "0.5.23")
"""The releases that the patches were first written for."""

CONTENTS = json.loads((Path(__file__).parent / "data" / "contents.json").read_text())
"""Each distinct content of BACKEND from 0.4.3.post4 on: `{"sha256", "releases", "lines", "cast"}`, oldest first."""

WITHOUT_CAST = tuple(str(content["releases"][-1]) for content in CONTENTS if not content["cast"])
"""One release for each content from before the whole-pool cast (to 0.4.6.post4): nothing to fix."""

ALL_CONTENTS = tuple(str(content["releases"][-1]) for content in CONTENTS if content["cast"])
"""One release for each distinct content that has the cast."""

ALL_RELEASES = tuple(str(release) for content in CONTENTS if content["cast"] for release in content["releases"])
"""Every release on the index that has the cast."""

_IN_TREE = (
    *TARGETS,
    "sglang/__init__.py",
    "sglang/version.py",
    "sglang/_version.py",
    "sglang/srt/server_args.py",
    "sglang/srt/models/deepseek_v2.py",
)
_DIST_INFO = ("entry_points.txt", "top_level.txt", "licenses/LICENSE")


def cache_root() -> Path:
    """Where the corpus is kept."""
    chosen = os.environ.get("MLAPATCH_TEST_CACHE")
    return Path(chosen) if chosen else user_cache_path("mlapatch-tests", appauthor=False)


@dataclass
class Corpus:
    """Real files by release."""

    root: Path
    _seen: dict[str, ReleaseFiles] = field(default_factory=dict)

    @property
    def store(self) -> WheelStore:
        return WheelStore(self.root)

    def release(self, version: str) -> ReleaseFiles:
        """The files that `install_tree` is made of, with RECORD and METADATA."""
        if version not in self._seen:
            extra = [f"sglang-{version}.dist-info/{name}" for name in _DIST_INFO]
            self._seen[version] = self.store.files(version, [*_IN_TREE, *extra])
        return self._seen[version]

    def text(self, version: str, path: str = BACKEND) -> bytes:
        """One file's bytes as the wheel has them."""
        return self.release(version).files[path]

    def install_tree(self, version: str, site_packages: Path) -> Path:
        """Make a small site-packages: sglang's targets and version files, and its whole dist-info, as pip would."""
        release = self.release(version)
        for path, data in release.files.items():
            target = site_packages / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        (site_packages / release.dist_info / "INSTALLER").write_bytes(b"pip\n")
        return site_packages

    def wheel_dir(self, version: str) -> Path:
        """The whole wheel unpacked, shared by all tests: never write in it."""
        folder = self.root / "unpacked" / version
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f"{version}.lock"):
            if folder.is_dir() and not self._pristine(version, folder):
                shutil.rmtree(folder)
            if not folder.is_dir():
                self.store.unpack(version, folder)
        return folder

    def _pristine(self, version: str, folder: Path) -> bool:
        record = self.release(version).record
        for path in TARGETS:
            try:
                if hashlib.sha256((folder / path).read_bytes()).hexdigest() != record[path]:
                    return False
            except OSError:
                return False
        return True


def contents(corpus: Corpus, first: str = "0.4.3.post4", last: str = "0.5.23") -> list[dict[str, object]]:
    """The table of distinct contents, from the index."""
    found: dict[str, dict[str, object]] = {}
    releases: dict[str, list[str]] = {}
    for version in corpus.store.releases(pre=True):
        if Version(first) <= version <= Version(last):
            text = corpus.text(str(version))
            digest = hashlib.sha256(text).hexdigest()
            releases.setdefault(digest, []).append(str(version))
            cast = re.search(rb"\.get_key_buffer\([^()]*\)\.to\(", text) is not None
            lines = len(text.splitlines())
            found[digest] = {"sha256": digest, "releases": releases[digest], "lines": lines, "cast": cast}
    return list(found.values())


if __name__ == "__main__":  # python -m tests.corpus: write tests/data/contents.json anew
    rows = ",\n".join(json.dumps(row) for row in contents(Corpus(cache_root())))
    (Path(__file__).parent / "data" / "contents.json").write_text(f"[\n{rows}\n]\n")
