"""`check --verify`: run the patched code of each distinct content once, on the release that has it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlapatch.compat import Row, Watch
from mlapatch.engine.judgement import Verdict
from mlapatch.engine.patch import Patch
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.target import Target
from mlapatch.install.wheels import WheelStore, unpack_wheel

_CAN_RUN = (Verdict.APPLICABLE, Verdict.APPLIED, Verdict.LOST)


@dataclass(frozen=True)
class Ran:
    """What `verify` found for a patch on one content."""

    name: str
    release: str
    sha256: str
    exit: Exit
    detail: str

    @property
    def failed(self) -> bool:
        """Whether a number differs, or the code could not be run."""
        return self.exit is not Exit.OK

    def told(self) -> str:
        """One line."""
        return f"verify {self.name} on {self.release}: {'differs' if self.failed else 'same numbers'}: {self.detail}"

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        result = "fail" if self.failed else "pass"
        return {
            "name": self.name,
            "version": self.release,
            "sha256": self.sha256,
            "result": result,
            "detail": self.detail,
        }


def verify_rows(
    rows: Sequence[Row],
    patches: Sequence[Patch],
    folders: Sequence[Path] | None,
    installed: Target | None,
    watch: Watch,
) -> dict[tuple[str, str], Ran]:
    """By content and patch name. A release is unpacked into a temporary folder; `installed` is verified where it is."""
    newest: dict[str, Row] = {row.sha256: row for row in rows if row.sha256}
    from mlapatch.commands.verify import BACKEND

    computing = {patch.name for patch in patches if patch.target == BACKEND}
    jobs = [
        (row, [j.patch for j in row.judgements if j.verdict in _CAN_RUN and j.patch in computing])
        for row in newest.values()
    ]
    watch.begin("verifying", sum(len(names) for _, names in jobs))
    found: dict[tuple[str, str], Ran] = {}
    for row, names in jobs:
        if not names:
            continue
        with tempfile.TemporaryDirectory(prefix="mlapatch-check-") as folder:
            place = installed.package if installed else _unpacked(row, Path(folder) / "site-packages", watch)
            for name in names:
                found[row.sha256, name] = _run(name, row, place, folders)
                watch.step(f"{name} on {row.subject.name}")
    return found


def _unpacked(row: Row, dest: Path, watch: Watch) -> Path:
    subject = row.subject
    if subject.wheel is not None:
        return unpack_wheel(subject.wheel, dest)
    if subject.version is None or subject.name != str(subject.version):
        raise MlapatchError(
            Exit.USAGE,
            "--verify needs a whole SGLang",
            found=f"only single files of {subject.name}",
            next="mlapatch check --verify --sglang PATH, --wheel FILE or --release X",
        )
    return WheelStore.default(watch.transfer).unpack(subject.version, dest)


def _run(name: str, row: Row, place: Path, folders: Sequence[Path] | None) -> Ran:
    from mlapatch.commands.verify import verify

    try:
        outcome = verify([name], sglang=place, patches=folders, keep=False)
    except MlapatchError as error:
        if error.exit is Exit.ENVIRONMENT:  # no torch: nothing was compared
            raise
        return Ran(name, row.subject.name, row.sha256, error.exit, error.what)
    return Ran(name, row.subject.name, row.sha256, outcome.exit, _detail(outcome.data))


def _detail(data: dict[str, object]) -> str:
    patches = data.get("patches")
    entry = patches[0] if isinstance(patches, list) and patches and isinstance(patches[0], dict) else {}
    scenarios = entry.get("scenarios") or []
    failed = entry.get("failed") or []
    return f"{len(scenarios)} scenarios" + (
        f", {len(failed)} failed: {', '.join(map(str, failed[:3]))}" if failed else ""
    )
