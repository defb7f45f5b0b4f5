"""A small SGLang of real 0.5.9 files, as a wheel install and as a git checkout, and edits as in the original story."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlapatch.commands.guard import check, record
from mlapatch.exits import Exit
from tests.corpus import BACKEND, RUNNER, Corpus

VERSION = "0.5.9"
ARGS = "srt/server_args.py"
COMMUNICATOR = "srt/layers/communicator.py"
TOPK = "srt/layers/moe/topk.py"
MODEL_RUNNER = RUNNER.removeprefix("sglang/")
MLA = BACKEND.removeprefix("sglang/")
OTHER = "srt/models/deepseek_v2.py"
FILES = (ARGS, COMMUNICATOR, TOPK, MODEL_RUNNER, MLA, OTHER, "__init__.py", "version.py", "_version.py")

#: path, a line of the real file (once in it), and what stands in its place: the earlier edits that nearly were lost.
EDITS = (
    (ARGS, b"import tempfile\n", b"import tempfile  # SM120: flashinfer_cutlass is allowed below\n"),
    (ARGS, b"\nlogger = logging.getLogger(__name__)\n", b"\nlogger = logging.getLogger(__name__)\nSM120 = True\n"),
    (COMMUNICATOR, b"\nimport torch\n", b"\nimport torch\n\nFUSED_ALLREDUCE_ON_SM120 = True\n"),
    (TOPK, b"\nimport torch\n", b"\n\nimport torch\nTOPK_ON_SM120 = True\n"),
    (MODEL_RUNNER, b"import logging\nimport os\n", b"import logging  # kept by hand\nimport os\n"),
)
ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
}


def git(folder: Path, *args: str, **environment: str) -> str:
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("GIT_")}, **ENVIRONMENT, **environment}
    settings = ("-c", "safe.directory=*", "-c", "protocol.file.allow=always", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *settings, *args], cwd=folder, env=env, capture_output=True, text=True, check=True)
    return done.stdout


@dataclass
class Tree:
    """One install. `kind` is `wheel` or `checkout`."""

    kind: str
    root: Path  # site-packages, or the checkout
    corpus: Corpus

    @property
    def package(self) -> Path:
        return self.root / "sglang" if self.kind == "wheel" else self.root / "python" / "sglang"

    def path(self, relative: str) -> Path:
        return self.package.joinpath(*relative.split("/"))

    def original(self, relative: str) -> bytes:
        return real(self.corpus, relative)

    def replace(self, relative: str, old: bytes, new: bytes) -> None:
        data = self.path(relative).read_bytes()
        assert data.count(old) == 1, (relative, old)
        self.path(relative).write_bytes(data.replace(old, new))

    def edit_all(self) -> None:
        for relative, old, new in EDITS:
            self.replace(relative, old, new)

    def restore(self, relative: str) -> None:
        """What `git checkout FILE`, or a reinstall, does."""
        if self.kind == "checkout":
            git(self.root, "checkout", "--", f"python/sglang/{relative}")
        else:
            self.path(relative).write_bytes(self.original(relative))

    def record(self, **options: Any) -> dict[str, Any]:
        return dict(record(sglang=self.package, **options).data)

    def check(self, **options: Any) -> tuple[int, dict[str, str]]:
        """The exit code, and the state of each file that is not as recorded."""
        outcome = check(sglang=self.package, **options)
        files: Any = outcome.data["files"]
        fine = ("untouched", "unedited")
        return int(outcome.exit), {f["path"]: f["state"] for f in files if f["state"] not in fine}

    def diff(self, relative: str, **options: Any) -> str:
        files: Any = check(sglang=self.package, **options).data["files"]
        return next(str(f["diff"]) for f in files if f["path"] == relative)


CLEAN: tuple[int, dict[str, str]] = (int(Exit.OK), {})


def real(corpus: Corpus, relative: str, version: str = VERSION) -> bytes:
    return corpus.store.files(version, [f"sglang/{name}" for name in FILES]).files[f"sglang/{relative}"]


def wheel(corpus: Corpus, site: Path, version: str = VERSION) -> Tree:
    """A site-packages whose RECORD lists the files that are there."""
    release = corpus.store.files(version, [f"sglang/{name}" for name in FILES])
    rows = release.files[f"{release.dist_info}/RECORD"].decode().splitlines(keepends=True)
    for path, data in release.files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
    kept = "".join(row for row in rows if row.split(",")[0] in release.files)
    (site / release.dist_info / "RECORD").write_text(kept)
    return Tree("wheel", site, corpus)


def checkout(corpus: Corpus, root: Path, version: str = VERSION) -> Tree:
    """A repository with SGLang's layout and one commit."""
    release = corpus.store.files(version, [f"sglang/{name}" for name in FILES])
    for path, data in release.files.items():
        if path.startswith("sglang/"):
            target = root / "python" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    git(root, "init", "--quiet")
    git(root, "add", "--force", ".")
    git(root, "commit", "--quiet", "-m", "release")
    return Tree("checkout", root, corpus)


def install(kind: str, corpus: Corpus, folder: Path, version: str = VERSION) -> Tree:
    folder.mkdir(parents=True, exist_ok=True)
    return (wheel if kind == "wheel" else checkout)(corpus, folder, version)


def upgrade(tree: Tree, version: str) -> None:
    """Replace everything by another release's files, as pip or `git checkout -f TAG` does."""
    if tree.kind == "wheel":
        for item in tree.root.iterdir():
            if item.name != ".mlapatch":
                shutil.rmtree(item)
        wheel(tree.corpus, tree.root, version)
        return
    for relative in FILES:
        data = tree.corpus.store.files(version, [f"sglang/{relative}"]).files.get(f"sglang/{relative}")
        if data is not None:
            tree.path(relative).write_bytes(data)
    git(tree.root, "commit", "--quiet", "-a", "-m", "upgrade")
