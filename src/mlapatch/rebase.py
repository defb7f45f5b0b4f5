"""How a file gets from what it is to the patches that it should have. One way for apply and revert:

1. find the file without mlapatch's patches: the journal's bytes, with what the user changed since merged in;
2. apply the wanted patches to that, in order, each proven.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mlapatch.assess import Assessment, File, kept_patch
from mlapatch.catalogue import Catalogue
from mlapatch.engine.judgement import Judgement, Verdict
from mlapatch.engine.merge import Conflict, merge
from mlapatch.engine.patch import Patch
from mlapatch.engine.verdict import apply, presence
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.journal import Change, Entry, Journal
from mlapatch.install.original import original_bytes
from mlapatch.install.write import sha256


@dataclass(frozen=True)
class Unpatched:
    """A file without mlapatch's patches, and the patches that it has now."""

    base: bytes
    patches: dict[str, Patch]


def present_patches(found: Assessment, file: File) -> dict[str, Patch]:
    """The patches in the file now, as they were applied: from the state, else from the catalogue."""
    journal = Journal(found.target.state_folder)
    patches: dict[str, Patch] = {}
    for name in file.entry.patches if file.entry else ():
        kept = kept_patch(journal, file.entry, name) if file.entry else None
        kept = kept or found.catalogue.patches.get(name)
        kept = kept and replace(kept, sglang="")  # it is there already, forced or not
        judged = found.judgements.get(name)
        rival = judged is not None and judged.verdict is Verdict.CONFLICTS  # the signs are another patch's
        if kept and not rival and presence(file.data, kept, found.target.version):
            patches[name] = kept
    for name in found.present(file.relative):
        patches.setdefault(name, replace(found.catalogue.patches[name], sglang=""))
    return patches


@contextlib.contextmanager
def before_writing() -> Iterator[None]:
    """Around step 1 of a verb that writes: a refusal says that nothing was written, which others never do."""
    try:
        yield
    except MlapatchError as error:
        error.what += "; nothing was written"
        raise


def unpatched(found: Assessment, file: File) -> Unpatched:
    """Step 1. MlapatchError (exit 4) where the user changed lines that a patch changed too."""
    present = present_patches(found, file)
    if not present:
        return Unpatched(file.data, {})
    base, after = _as_applied(found, file, present)
    merged = merge(after, file.data, base)
    if isinstance(merged, Conflict):
        raise MlapatchError(
            Exit.REFUSED,
            f"lines inside the edits of {', '.join(present)} were changed by hand",
            where=str(file.path),
            expected="changes outside the patch's own lines (they are kept)",
            found=f"{merged.count} conflict(s)",
            detail=merged.text,
            next="undo what stands under 'your file' at those lines, run the same command again, redo your change",
        )
    for patch in present.values():
        left = presence(merged.source, patch, found.target.version)
        if left and left.verdict is Verdict.APPLIED:
            raise MlapatchError(
                Exit.REFUSED,
                f"taking {patch.name} out would not remove it",
                where=str(file.path),
                found=left.reason,
                next="mlapatch status",
            )
    return Unpatched(merged.source, present)


def stock_for(found: Assessment, file: File) -> Unpatched:
    """What a file is compared with: itself without the patches, or, where that cannot be had because their lines were
    changed by hand, what they were applied to. A file without patches is compared with the release's."""
    try:
        clean = unpatched(found, file)
    except MlapatchError as error:
        if error.exit is not Exit.REFUSED:
            raise
        present = present_patches(found, file)
        return Unpatched(_as_applied(found, file, present)[0], present)
    if clean.patches or found.target.recorded_sha256(file.relative) == sha256(file.data):
        return clean
    try:
        return Unpatched(original_bytes(found.target, file.relative), {})
    except MlapatchError as error:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "the file has no patch of mlapatch's, and there is nothing to compare it with",
            where=str(file.path),
            expected="the release's own file, by a wheel's RECORD or a commit",
            found=error.found or error.what,
            next="name a patch to compare with the file as it is: mlapatch verify active-cast",
        ) from None


def _as_applied(found: Assessment, file: File, present: Mapping[str, Patch]) -> tuple[bytes, bytes]:
    """What the patches were applied to, and what came of it: from the state, else from the release."""
    journal = Journal(found.target.state_folder)
    base = journal.object(file.entry.base) if file.entry else None
    after = journal.object(file.entry.after) if file.entry else None
    if base is None or after is None:
        base = original_bytes(found.target, file.relative)
        after = _apply_all(base, list(present.values()), found)
    return base, after


def change_to(found: Assessment, file: File, clean: Unpatched, wanted: Sequence[Patch]) -> Change:
    """Step 2: the change of a file to exactly the wanted patches."""
    new = _apply_all(clean.base, wanted, found)
    if not wanted:
        return Change(file.relative, file.path, file.data, new, None)
    patches = {patch.name: patch.digest for patch in wanted}
    raws = {patch.digest: patch.raw.encode() for patch in wanted}
    kept_names = {digest: sha256(raw) for digest, raw in raws.items()}
    entry = Entry(
        base=sha256(clean.base),
        after=sha256(new),
        sglang=str(found.target.version),
        patches={name: kept_names[digest] for name, digest in patches.items()},
    )
    kept = {entry.base: clean.base, entry.after: new, **{kept_names[d]: raw for d, raw in raws.items()}}
    return Change(file.relative, file.path, file.data, new, entry, kept)


def _apply_all(source: bytes, patches: Sequence[Patch], found: Assessment) -> bytes:
    for patch in in_order(patches):
        outcome = apply(source, patch, found.target.version)
        if isinstance(outcome, Judgement):
            raise misfit_error(outcome)
        source = outcome.source
    return source


def in_order(patches: Sequence[Patch]) -> list[Patch]:
    """The patches in the order in which they apply."""
    by_name: Mapping[str, Patch] = {patch.name: patch for patch in patches}
    return Catalogue(dict(by_name), {}).ordered(by_name)


def misfit_error(judgement: Judgement) -> MlapatchError:
    """A judgement that stops a command, as an error with its exit code."""
    code = {Verdict.EDITED: Exit.REFUSED, Verdict.UNSUPPORTED: Exit.ENVIRONMENT}.get(
        judgement.verdict, Exit.DOES_NOT_FIT
    )
    found = judgement.found + (f"; nearest candidate: {judgement.nearest}" if judgement.nearest else "")
    return MlapatchError(
        code,
        f"{judgement.patch}: {judgement.verdict}: {judgement.reason}",
        where=judgement.scope,
        expected=judgement.expected,
        found=found,
        next=judgement.next or f"mlapatch status; mlapatch check {judgement.patch}",
    )
