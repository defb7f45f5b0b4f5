"""A patch that does not fit may be this install's doing, and not the release's: what to do then."""

from __future__ import annotations

import shlex
from dataclasses import replace

from mlapatch.engine.judgement import Judgement, Verdict
from mlapatch.engine.patch import Patch
from mlapatch.install.target import Target


def in_edited_file(judgement: Judgement, target: Target) -> Judgement:
    """The judgement of a patch that does not fit a file with edits of the user's own."""
    why = "the file is edited here (it is not as it came), which may be why"
    return replace(judgement, reason=f"{judgement.reason}; {why}", next=_after_own_edit(target, judgement.patch))


def _after_own_edit(target: Target, name: str) -> str:
    shows = "mlapatch guard check shows your edits of the file"
    if target.repository is not None:
        place = f"--ref HEAD --sglang {shlex.quote(str(target.package))}"
        return f"{shows}; whether it fits without them: mlapatch check {name} {place}"
    if target.version is None:
        return shows
    return f"{shows}; whether it fits without them: mlapatch check {name} --release {target.version.public}"


def absent(target: Target, patch: Patch, *, came: bool) -> Judgement:
    """The file of a patch is not there; `came`: the installer or git says that it was."""
    version, relative = target.version, patch.target
    if not patch.supports(version):
        return Judgement(patch.name, Verdict.UNSUPPORTED, f"SGLang {version}: {patch.sglang_reason}")
    why, following = f"{relative} is not in this SGLang", ""
    if came:
        why += f", though {'HEAD has' if target.repository else 'its RECORD lists'} it"
        following = f"put it back: {_put_back(target, relative)}"
    elif not target.file("srt").is_dir():
        why = f"{relative} is not there, nor is any other file of srt/: this is no whole SGLang"
        following = "install SGLang anew, or name another: mlapatch status --sglang PATH"
    return Judgement(patch.name, Verdict.DRIFTED, why, relative, relative, "nothing", next=following)


def _put_back(target: Target, relative: str) -> str:
    if target.repository is not None:
        place, file = shlex.quote(str(target.repository)), shlex.quote(str(target.file(relative)))
        return f"git -C {place} checkout HEAD -- {file}"
    return f"pip install --force-reinstall --no-deps sglang=={target.version}, with the pip of that install"
