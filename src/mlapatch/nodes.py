"""Is this node's SGLang that of another node, an image or a deployment? One digest, and what differs if not."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from typing import Any

from mlapatch.assess import Assessment, File, digest_of
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit

STATES = 400
"""States of one tree that are tried: bundled patches make ten."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REPORT = "mlapatch status --json > node.json there, then mlapatch status --expect node.json here"


@dataclass(frozen=True)
class Expected:
    """A digest, and where it came with one, the other node's whole `status --json`."""

    digest: str
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """What differs, line by line (nothing: the digests are equal), the next command, and what else is worth knowing."""

    expected: str
    found: str
    difference: Sequence[str] = ()
    next: str = ""
    notes: Sequence[str] = ()

    def as_dict(self) -> dict[str, object]:
        """The `expected` of `status --json`."""
        return {
            "digest": self.expected,
            "equal": not self.difference,
            "difference": list(self.difference),
            "next": self.next,
            "notes": list(self.notes),
        }


def read_expected(text: str) -> Expected:
    """A digest, a file that holds another node's `status --json`, or `-`: that on standard input. MlapatchError (2)."""
    if _DIGEST.fullmatch(text):
        return Expected(text)
    try:
        raw = sys.stdin.read() if text == "-" else Path(text).read_text("utf-8")
    except (OSError, UnicodeDecodeError, ValueError):
        raise MlapatchError(
            Exit.USAGE,
            "--expect is neither a digest nor a file that can be read",
            expected="64 hex digits, or a file with the output of 'mlapatch status --json', or - for standard input",
            found=text,
            next="mlapatch status --json",
        ) from None
    stripped = raw.strip()
    if _DIGEST.fullmatch(stripped):
        return Expected(stripped)
    try:
        report = json.loads(raw)
        digest = report["digest"]
        _shape(report)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise MlapatchError(
            Exit.USAGE,
            "--expect: the file holds no digest of a node",
            where=text,
            expected="the output of 'mlapatch status --json', or one digest",
            found=" ".join(stripped[:60].split()) or "nothing",
            next="mlapatch status --json > node.json",
        ) from None
    return Expected(str(digest), report)


def _shape(report: Mapping[str, Any]) -> None:
    """KeyError, TypeError or ValueError unless it has what is read from it below."""
    if not _DIGEST.fullmatch(report["digest"]):
        raise ValueError(report["digest"])
    _shas(report), _verdicts(report), report["sglang"].get("version")


def _shas(report: Mapping[str, Any]) -> dict[str, str]:
    return {str(one["path"]): str(one["sha256"]) for one in report["targets"]}


def _verdicts(report: Mapping[str, Any]) -> dict[str, str]:
    return {str(one["name"]): str(one["verdict"]) for one in report["patches"]}


def compare(found: Assessment, expected: Expected) -> Comparison:
    """This tree against what is expected of it."""
    notes = tuple(_notes(found, expected.report)) if expected.report else ()
    if found.digest == expected.digest:
        return Comparison(expected.digest, found.digest, notes=notes)
    lines, following = _by_report(found, expected) if expected.report else _by_digest(found, expected.digest)
    return Comparison(expected.digest, found.digest, tuple(lines), following, notes)


def _notes(found: Assessment, report: Mapping[str, Any]) -> Iterator[str]:
    """What the digest does not cover."""
    flashinfer = found.machine.flashinfer
    here = {"version": str(found.target.version or ""), "flashinfer": str(flashinfer.version) if flashinfer else ""}
    for key, name in (("version", "SGLang"), ("flashinfer", "flashinfer")):
        there = str(report["sglang"].get(key) or "")
        if there != here[key]:
            yield f"{name} is {here[key] or 'unknown'} here and {there or 'unknown'} there"


def _by_report(found: Assessment, expected: Expected) -> tuple[list[str], str]:
    """Both sides are known: every file and every patch that differs."""
    here = {file.relative: file.sha256 for file in found.files.values()}
    there = _shas(expected.report)
    lines = [
        f"{path}: {_short(here.get(path))} here, {_short(there.get(path))} expected"
        for path in sorted({*here, *there})
        if here.get(path) != there.get(path)
    ]
    mine, theirs = {name: str(j.verdict) for name, j in found.judgements.items()}, _verdicts(expected.report)
    applied = {name for name in {*mine, *theirs} if (mine.get(name) == "applied") != (theirs.get(name) == "applied")}
    lines += [f"{n}: {mine.get(n, 'unknown')} here, {theirs.get(n, 'unknown')} expected" for n in sorted(applied)]
    if not lines:
        lines = [f"the digest: {found.digest} here, {expected.digest} expected (made by another mlapatch?)"]
    here_only = [name for name in applied if mine.get(name) == "applied"]
    return lines, _way(here_only, sorted(applied - set(here_only))) or "mlapatch guard check"


def _short(digest: str | None) -> str:
    return f"sha256 {digest[:16]}..." if digest else "absent"


def _way(here: Sequence[str], there: Sequence[str]) -> str:
    """The command that takes the patches of this tree to those expected."""
    revert = f"mlapatch revert {' '.join(sorted(here))}" if here else ""
    apply = f"mlapatch apply {' '.join(sorted(there))}" if there else ""
    return " && ".join(part for part in (revert, apply) if part)


# ------------------------------------------------------------------------------------------- only a digest is known
@dataclass(frozen=True)
class _State:
    """One file as it is, was, or would be: its sha256, the patches in it, and in words."""

    sha256: str
    patches: frozenset[str]
    words: str


def _by_digest(found: Assessment, digest: str) -> tuple[list[str], str]:
    """A digest says nothing of itself: those of the states that this tree can have are made and compared with it."""
    files = sorted(found.files.values(), key=lambda file: file.relative)
    for states in islice(product(*(list(_states(found, file)) for file in files)), STATES):
        if digest_of({f.relative: state.sha256 for f, state in zip(files, states, strict=True)}) == digest:
            return _named(found, files, states)
    here = [f"{file.relative} is {file.state(bool(found.applied(file.relative)))} here" for file in files]
    unknown = "no state that mlapatch can make of this SGLang has that digest: another release, other edits or patches"
    lines = [unknown, *here]
    return lines, _REPORT


def _named(found: Assessment, files: Sequence[File], states: Sequence[_State]) -> tuple[list[str], str]:
    lines, here, there = [], set[str](), set[str]()
    for file, state in zip(files, states, strict=True):
        if state.sha256 != file.sha256:
            now = frozenset(found.applied(file.relative))
            lines.append(f"{file.relative}: {_in_words(found, file)} here, {state.words} expected")
            here |= now - state.patches
            there |= state.patches - now
    return lines, _way(sorted(here), sorted(there)) or "mlapatch guard check"


def _in_words(found: Assessment, file: File) -> str:
    applied = found.applied(file.relative)
    edited = file.state(bool(applied)) == "edited"
    return _words(applied) + (", with local edits" if edited else "")


def _words(names: Sequence[str]) -> str:
    return f"with {' and '.join(names)}" if names else "without patches"


def _states(found: Assessment, file: File) -> Iterator[_State]:
    """The bytes now, the release's own, and this file with each of the patches alone, where the state has its bytes."""
    yield _State(file.sha256, frozenset(found.applied(file.relative)), "as it is")
    if file.original_sha256:
        yield _State(file.original_sha256, frozenset(), "pristine")
    clean = _without_patches(found, file)
    if clean is None:
        return
    from mlapatch.install.write import sha256
    from mlapatch.rebase import change_to

    edited = " with this node's local edits" if file.original_sha256 not in ("", sha256(clean.base)) else ""
    yield _State(sha256(clean.base), frozenset(), f"without patches{edited}")
    for patch in found.catalogue.patches.values():
        if patch.target == file.relative:
            try:
                made = change_to(found, file, clean, [patch])
            except MlapatchError:
                continue
            yield _State(sha256(made.new), frozenset({patch.name}), f"with {patch.name}{edited}")


def _without_patches(found: Assessment, file: File) -> Any:
    """`rebase.Unpatched`, or None where that would need the network, or cannot be had at all."""
    from mlapatch.install.journal import Journal
    from mlapatch.rebase import present_patches, unpatched

    try:
        if present_patches(found, file):
            journal = Journal(found.target.state_folder)
            if file.entry is None or journal.object(file.entry.base) is None:
                return None
        return unpatched(found, file)
    except MlapatchError:
        return None
