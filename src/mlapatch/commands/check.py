"""`mlapatch check`: do the patches still fit? The installed SGLang, releases of the index, wheels, or git refs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.version import Version

from mlapatch.assess import Assessment, assess, given_sms, machine_of
from mlapatch.catalogue import Catalogue, load_catalogue
from mlapatch.compat import PACKAGE, Row, Silent, Subject, Watch, judge_all
from mlapatch.compat_report import blocks, markdown
from mlapatch.compat_verify import verify_rows
from mlapatch.engine.judgement import Judgement, Verdict
from mlapatch.engine.patch import Patch
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.releases import fetch, files_at_ref, select, supported, version_of_ref
from mlapatch.install.target import Target, find_target
from mlapatch.install.wheels import ReleaseFiles, WheelStore, read_wheel
from mlapatch.outcome import Block, Outcome, Text, Warn
from mlapatch.selection import PREFERENCE

_FITS = (Verdict.APPLIED, Verdict.APPLICABLE, Verdict.SUPERSEDED)
_WAS_APPLIED = (Verdict.APPLIED, Verdict.LOST, Verdict.EDITED)


@dataclass
class _Gathered:
    """What to judge, and what could not be had."""

    subjects: list[Subject] = field(default_factory=list)
    missing: list[tuple[str, MlapatchError]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check(
    names: Sequence[str] = (),
    *,
    releases: Sequence[str] = (),
    all_releases: bool = False,
    pre: bool = False,
    wheels: Sequence[Path] = (),
    refs: Sequence[str] = (),
    sglang: Path | None = None,
    python: str | None = None,
    patches: Sequence[Path] | None = None,
    gpu: str | None = None,
    sm: int | None = None,
    verify: bool = False,
    as_markdown: bool = False,
    watch: Watch | None = None,
) -> Outcome:
    """Exit 1 if a patch of `names` (default: those applied in the installed SGLang) does not fit somewhere.

    A range's releases that a patch does not support do not count; one that was named does. Exit 5 if a release could
    not be fetched and nothing worse was found. `verify` runs the patched code too, once for each distinct content.
    """
    sms, source = given_sms(gpu, sm)  # a release runs on no machine, so what is in this one does not count
    catalogue = load_catalogue(patches)
    chosen = [catalogue.get(name) for name in dict.fromkeys(names)] or list(catalogue.patches.values())
    watch = watch or Silent()
    elsewhere = bool(releases or all_releases or wheels or refs)
    installed = _installed(catalogue, sglang, python, gpu, sm, needed=not elsewhere or bool(refs))
    counted = set(names) or _applied(installed)
    gathered = _Gathered()
    if installed is not None and refs:
        _from_refs(gathered, installed.target, refs, chosen)
    _from_wheels(gathered, wheels, chosen)
    if releases or all_releases:
        _from_index(gathered, chosen, releases, all_releases=all_releases, pre=pre, watch=watch)
    rows = judge_all(gathered.subjects, chosen, sms=sms, sm_source=source, watch=watch)
    if installed is not None and not elsewhere:
        rows.append(_installed_row(installed, chosen))
    where = installed.target if installed is not None and not elsewhere else None
    verified = verify_rows(rows, chosen, patches, where, watch) if verify else {}
    failing = [(row, judgement) for row in rows for judgement in row.judgements if _fails(row, judgement, counted)]
    wrong = [result for result in verified.values() if result.failed]
    exit_code = Exit.FOUND if failing or wrong else Exit.ENVIRONMENT if gathered.missing else Exit.OK
    data: dict[str, object] = {
        "releases": [row.as_dict() for row in rows],
        "counted": sorted(counted),
        "failing": [{"name": j.patch, "version": row.subject.name} for row, j in failing],
        "catalogue": catalogue.digest,
    }
    if verify:
        data["verified"] = [result.as_dict() for result in verified.values()]
    if gathered.missing:
        data["missing"] = [{"version": name, **error.as_dict()} for name, error in gathered.missing]
    shown: list[Block] = [Warn(text) for text in gathered.warnings]
    shown += [Warn(f"{name} was not checked: {error.what}") for name, error in gathered.missing]
    if as_markdown:
        shown.append(Text(markdown(rows, chosen, catalogue, sms).splitlines()))
    else:
        shown += blocks(rows, chosen, sms)
        shown += [Text((result.told(),)) for result in verified.values()]
        shown.append(_summary(rows, chosen, failing, counted, _as_asked(releases, all_releases, wheels, refs)))
    return Outcome(exit_code, data, shown)


def _installed(
    catalogue: Catalogue, sglang: Path | None, python: str | None, gpu: str | None, sm: int | None, *, needed: bool
) -> Assessment | None:
    """The SGLang that is installed; where it is not needed, it is no error that there is none."""
    try:
        target = find_target(sglang, python)
    except MlapatchError:
        if needed or sglang is not None or python is not None:
            raise
        return None
    return assess(target, catalogue, machine_of(target, gpu=gpu, sm=sm))


def _applied(installed: Assessment | None) -> set[str]:
    if installed is None:
        return set()
    found = {name for name, j in installed.judgements.items() if j.verdict in _WAS_APPLIED}
    for file in installed.files.values():
        if file.entry is not None:
            found.update(name for name in file.entry.patches if name in installed.judgements)
    return found


def _installed_row(installed: Assessment, chosen: Sequence[Patch]) -> Row:
    target = installed.target
    files = {relative: file.data for relative, file in installed.files.items()}
    subject = Subject(f"installed {target.version or target.package}", target.version, files)
    main = installed.files.get(chosen[0].target)
    return Row(subject, main.sha256 if main else "", [installed.judgements[patch.name] for patch in chosen])


def _fails(row: Row, judgement: Judgement, counted: set[str]) -> bool:
    if judgement.patch not in counted or judgement.verdict in _FITS:
        return False
    return judgement.verdict is not Verdict.UNSUPPORTED or row.subject.asked


def _from_index(
    gathered: _Gathered,
    chosen: Sequence[Patch],
    releases: Sequence[str],
    *,
    all_releases: bool,
    pre: bool,
    watch: Watch,
) -> None:
    store = WheelStore.default()
    named, ranged = select(releases, store.listing, pre=pre)
    if all_releases:
        listing = store.listing()
        inside = supported([patch.sglang for patch in chosen], listing.versions, pre=pre)
        ranged = sorted({*ranged, *inside} - set(named))
        if listing.offline:
            gathered.warnings.append("the package index cannot be reached: checking the releases it last listed")
    paths = sorted({f"{PACKAGE}/{patch.target}" for patch in chosen})
    wanted = sorted([*named, *ranged])
    cold = [version for version in wanted if not store.has(version, paths)]
    if cold:
        watch.begin("fetching", len(cold))
    found = fetch(
        store,
        wanted,
        paths,
        progress=watch.transfer,
        fetched=lambda version: watch.step(f"{PACKAGE} {version}") if version in cold else None,
    )
    for version, files in found.items():
        if isinstance(files, ReleaseFiles):
            gathered.subjects.append(_subject(files, str(version), version, asked=version in named))
        elif len(wanted) == 1:
            raise files
        else:
            gathered.missing.append((str(version), files))


def _from_wheels(gathered: _Gathered, wheels: Sequence[Path], chosen: Sequence[Patch]) -> None:
    paths = sorted({f"{PACKAGE}/{patch.target}" for patch in chosen})
    for wheel in wheels:
        files = read_wheel(wheel, paths)
        gathered.subjects.append(replace(_subject(files, wheel.name, files.version, asked=True), wheel=wheel))


def _subject(files: ReleaseFiles, name: str, version: Version, *, asked: bool) -> Subject:
    inside = {path.removeprefix(f"{PACKAGE}/"): data for path, data in files.files.items() if path.startswith(PACKAGE)}
    return Subject(name, version, inside, files.requires, asked)


def _from_refs(gathered: _Gathered, target: Target, refs: Sequence[str], chosen: Sequence[Patch]) -> None:
    if target.repository is None:
        raise MlapatchError(
            Exit.USAGE,
            "--ref needs a git checkout of SGLang",
            where=str(target.package),
            found=target.install,
            next="mlapatch check --sglang PATH/TO/CHECKOUT --ref REF",
        )
    relatives = sorted({patch.target for patch in chosen})
    for ref in refs:
        files = files_at_ref(target.package, target.repository, ref, relatives)
        gathered.subjects.append(Subject(ref, version_of_ref(ref), files))


def _summary(
    rows: Sequence[Row],
    chosen: Sequence[Patch],
    failing: Sequence[tuple[Row, Judgement]],
    counted: set[str],
    asked: str,
) -> Text:
    what = f"{len(rows)} checked" + (f" ({_contents(rows, chosen)})" if len(rows) > 1 else "")
    if failing:
        names = ", ".join(dict.fromkeys(f"{j.patch} on {row.subject.name}" for row, j in failing[:5]))
        more = f" and {len(failing) - 5} more" if len(failing) > 5 else ""
        return Text((f"{what}: does not fit: {names}{more}",), style="bold red")
    if not counted:
        one = next((name for name, _ in PREFERENCE if name in {patch.name for patch in chosen}), chosen[0].name)
        nothing = "no patch was named and none is applied, so nothing can fail"
        return Text((f"{what}; {nothing}. Next: name those that must fit: mlapatch check {one}{asked}",))
    return Text((f"{what}: {', '.join(sorted(counted))} fit{'s' if len(counted) == 1 else ''}",))


def _contents(rows: Sequence[Row], chosen: Sequence[Patch]) -> str:
    """How many different contents the files have that the patches change: releases often share one."""
    counts = [
        (target, len({row.subject.files[target] for row in rows if target in row.subject.files}))
        for target in dict.fromkeys(patch.target for patch in chosen)
    ]
    return "distinct contents: " + ", ".join(f"{count} of {Path(target).name}" for target, count in counts)


def _as_asked(releases: Sequence[str], all_releases: bool, wheels: Sequence[Path], refs: Sequence[str]) -> str:
    """The options that said what to look at, to be typed again."""
    given = [*(f"--release {shlex.quote(one)}" for one in releases), *(["--all-releases"] if all_releases else [])]
    given += [*(f"--wheel {shlex.quote(str(one))}" for one in wheels), *(f"--ref {shlex.quote(one)}" for one in refs)]
    return "".join(f" {one}" for one in given)
