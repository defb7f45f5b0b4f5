"""Questions to git about a checkout, through GitPython; a user's settings change no answer, nor does a missing git."""

from __future__ import annotations

import os
from pathlib import Path

from mlapatch.install.gitobjects import Objects

#: No external diff, pager, hooks or prompts; a checkout owned by somebody else may be read.
_SETTINGS = ("safe.directory=*", "core.fsmonitor=false", "core.quotePath=false", "color.ui=false")
_NOT_OURS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE", "GIT_EXTERNAL_DIFF")


def head_bytes(repository: Path, file: Path) -> bytes | None:
    """A file as HEAD has it, with the line ending that the working file has; None where git cannot say."""
    committed = committed_bytes(repository, "HEAD", file.relative_to(repository).as_posix())
    if committed is None:
        return None
    try:
        working = file.read_bytes()
    except OSError:
        return committed
    if b"\r\n" in working and b"\r\n" not in committed:  # core.autocrlf
        return committed.replace(b"\n", b"\r\n")
    return committed


def committed_bytes(repository: Path, commit: str, path: str) -> bytes | None:
    """A file's bytes in a commit, whatever git's filters would make of them; None where it is not there."""
    found = _git(repository, "cat-file", "blob", f"{commit}:{path}")
    if found is not None:
        return found
    objects = Objects(repository)
    return objects.blob(objects.head() if commit == "HEAD" else commit, path)


def committed_files(repository: Path, commit: str, folder: str) -> dict[str, str] | None:
    """The object id of every file below a folder of a commit, by path inside the folder; None where nobody can say."""
    listed = _git(repository, "ls-tree", "-r", "-z", "--full-tree", commit, "--", f"{folder}/")
    if listed is None:
        return Objects(repository).tree(commit, folder)
    found = {}
    for row in listed.decode("utf-8", "surrogateescape").split("\0"):
        about, _, path = row.partition("\t")
        mode, _, rest = about.partition(" ")
        if mode.startswith("100"):
            found[path.removeprefix(f"{folder}/")] = rest.rpartition(" ")[2]
    return found


def tracks(repository: Path, file: Path) -> bool | None:
    """Whether the index has the file; None where git cannot say."""
    listed = _git(repository, "ls-files", "--", file.relative_to(repository).as_posix())
    return None if listed is None else bool(listed)


def head_commit(repository: Path) -> str:
    """The commit that HEAD names ('' without one)."""
    said = _git(repository, "rev-parse", "--verify", "HEAD^{commit}")
    return said.decode().strip() if said is not None else Objects(repository).head()


def _git(repository: Path, *args: str) -> bytes | None:
    try:
        from git import Git
        from git.exc import GitError
    except ImportError:  # GitPython refuses to load where there is no git program
        return None
    settings = [item for setting in _SETTINGS for item in ("-c", setting)]
    environment = {name: "" for name in _NOT_OURS if name in os.environ}
    git = Git(repository)
    try:
        with _unset(environment):
            out = git.execute(
                ["git", *settings, *args],
                stdout_as_string=False,
                strip_newline_in_stdout=False,
                env={"GIT_OPTIONAL_LOCKS": "0", "GIT_NO_REPLACE_OBJECTS": "1", "LC_ALL": "C"},
            )
    except (GitError, OSError):
        return None
    return bytes(out) if isinstance(out, bytes) else None


class _unset:
    """Take variables out of the environment for a moment."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def __enter__(self) -> None:
        self.kept = {name: os.environ.pop(name) for name in self.names}

    def __exit__(self, *_: object) -> None:
        os.environ.update(self.kept)
