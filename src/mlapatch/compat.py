"""Releases x patches: judge many SGLangs at once. Work grows with distinct file contents, not with releases."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol, TypeAlias

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from mlapatch.assess import Machine
from mlapatch.engine.judgement import Judgement, Verdict
from mlapatch.engine.patch import Patch
from mlapatch.install.facts import Flashinfer
from mlapatch.install.write import sha256
from mlapatch.verdict_cache import VerdictCache

PACKAGE = "sglang"


class Watch(Protocol):
    """Where progress goes; the command line draws it, everything else may ignore it."""

    def say(self, line: str) -> None:
        """What is about to be done."""

    def begin(self, title: str, total: int) -> None:
        """A stage of `total` steps starts."""

    def step(self, done: str) -> None:
        """One step is done."""

    def transfer(self, label: str, done: int, total: int | None) -> None:
        """Bytes of a download."""


class Silent:
    """No progress at all."""

    def say(self, line: str) -> None:
        """Ignore."""

    def begin(self, title: str, total: int) -> None:
        """Ignore."""

    def step(self, done: str) -> None:
        """Ignore."""

    def transfer(self, label: str, done: int, total: int | None) -> None:
        """Ignore."""


@dataclass(frozen=True)
class Subject:
    """One SGLang to judge: its name for people, version (None where unknown), files by path in the package."""

    name: str
    version: Version | None
    files: Mapping[str, bytes]
    requires: Sequence[str] = ()
    asked: bool = True
    """Named by the user, and not one of a range."""
    wheel: Path | None = None
    """The wheel file, where the user named one."""


@dataclass
class Row:
    """The verdicts on one subject, in the order of the patches."""

    subject: Subject
    sha256: str
    judgements: list[Judgement] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        version = str(self.subject.version) if self.subject.version else None
        patches = [judgement.as_dict() for judgement in self.judgements]
        return {"version": version, "name": self.subject.name, "sha256": self.sha256, "patches": patches}


_Task: TypeAlias = "tuple[str, Patch, Version | None]"


def judge_all(
    subjects: Sequence[Subject],
    patches: Sequence[Patch],
    *,
    sms: tuple[int, ...] = (),
    sm_source: str = "",
    watch: Watch | None = None,
    processes: int | None = None,
) -> list[Row]:
    """A row a subject. Verdicts are cached by content, patch and engine; what is finished survives an interruption.

    Without `sms` a patch's need for a GPU is not judged: a release is no machine.
    """
    cache = VerdictCache.default()
    tasks: dict[_Task, bytes] = {}
    standing: dict[tuple[str, str, object], Version | None] = {}
    planned: list[list[_Task | None]] = []
    for subject in subjects:
        planned.append([_task(subject, patch, standing, tasks) for patch in patches])
    try:
        done = _judged(tasks, cache, watch or Silent(), processes)
    finally:
        cache.save()
    rows = []
    for subject, plan in zip(subjects, planned, strict=True):
        row = Row(subject, _main_sha256(subject, patches))
        for patch, task in zip(patches, plan, strict=True):
            judgement = _without_file(subject, patch) if task is None else _named(done[task], task, subject)
            row.judgements.append(_with_machine(judgement, patch, subject, sms, sm_source))
        rows.append(row)
    return rows


def _task(
    subject: Subject, patch: Patch, standing: dict[tuple[str, str, object], Version | None], tasks: dict[_Task, bytes]
) -> _Task | None:
    """What to judge for a subject: versions that make no difference to a patch share the first one's verdict."""
    source = subject.files.get(patch.target)
    if source is None:
        return None
    digest, version = sha256(source), subject.version
    counts = [part.count for part in patch.edits] + [part.count for part in patch.posts]
    difference = None if version is None else (patch.supports(version), *(c.expected(version) for c in counts))
    first = standing.setdefault((digest, patch.digest, difference), version)
    task = (digest, patch, first)
    tasks[task] = source
    return task


class _NotCached(Exception):
    pass


def _judged(
    tasks: Mapping[_Task, bytes], cache: VerdictCache, watch: Watch, processes: int | None
) -> dict[_Task, Judgement]:
    done: dict[_Task, Judgement] = {}

    def proven(source: bytes, patch: Patch, version: Version | None) -> Judgement:  # its name is part of the key
        with contextlib.suppress(KeyError):
            return done[sha256(source), patch, version]
        raise _NotCached

    todo: list[_Task] = []
    for task, source in tasks.items():
        try:
            done[task] = cache.judge(source, task[1], task[2], proven)
        except _NotCached:
            todo.append(task)
    if not todo:
        return done
    watch.begin("judging", len(todo))
    for task, judgement in _computed(todo, tasks, processes):
        done[task] = judgement
        cache.judge(tasks[task], task[1], task[2], proven)
        watch.step(f"{task[1].name} on {task[2]}")
    return done


def _computed(
    todo: Sequence[_Task], tasks: Mapping[_Task, bytes], processes: int | None
) -> Iterable[tuple[_Task, Judgement]]:
    """Judgements as they come, the patches of one content together: they share its parsed tree."""
    jobs: dict[str, list[_Task]] = {}
    for task in todo:
        jobs.setdefault(task[0], []).append(task)
    count = min(processes or os.cpu_count() or 1, len(jobs), 8)
    if count < 2 or len(todo) < 4:  # a worker takes half a second to start
        for job in jobs.values():
            yield from zip(job, _prove(tasks[job[0]], job), strict=True)
        return
    with ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_start_worker) as pool:
        futures = {pool.submit(_prove, tasks[job[0]], job): job for job in jobs.values()}
        try:
            for future in as_completed(futures):
                yield from zip(futures[future], future.result(), strict=True)
        except BaseException:  # Ctrl-C: what is judged is kept, what is queued is not waited for
            for worker in list(pool._processes.values()):
                worker.terminate()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start_worker() -> None:
    import gc

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # a fifth of the time of parsing; a worker lives for seconds


def _prove(source: bytes, job: Sequence[_Task]) -> list[Judgement]:
    from mlapatch.engine.verdict import judge

    return [judge(source, patch, version, prove=True) for _, patch, version in job]


def _without_file(subject: Subject, patch: Patch) -> Judgement:
    if not patch.supports(subject.version):
        return Judgement(patch.name, Verdict.UNSUPPORTED, f"SGLang {subject.version}: {patch.sglang_reason}")
    return Judgement(patch.name, Verdict.DRIFTED, f"{patch.target} is not in {subject.name}", expected=patch.target)


def _named(judgement: Judgement, task: _Task, subject: Subject) -> Judgement:
    """The verdict on a content, in the words of the release that has it."""
    if task[2] == subject.version:
        return judgement
    reason = judgement.reason.replace(f"SGLang {task[2]}", f"SGLang {subject.version}")
    found = str(subject.version) if judgement.found == str(task[2]) else judgement.found
    return replace(judgement, reason=reason, found=found)


def _with_machine(
    judgement: Judgement, patch: Patch, subject: Subject, sms: tuple[int, ...], sm_source: str
) -> Judgement:
    if judgement.verdict is not Verdict.APPLICABLE:
        return judgement
    needs = patch if sms else replace(patch, requires=replace(patch.requires, sm=()))
    objection = Machine(sms, sm_source, pinned_flashinfer(subject.requires)).objection(needs)
    return judgement.but(Verdict.UNSUPPORTED, objection) if objection else judgement


def pinned_flashinfer(requires: Iterable[str]) -> Flashinfer | None:
    """The flashinfer that a release's metadata pins."""
    for line in requires:
        if not line.lower().lstrip().startswith("flashinfer"):  # a release has a hundred others
            continue
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.name.lower().replace("_", "-") == "flashinfer-python":
            for specifier in requirement.specifier:
                if specifier.operator == "==":
                    return Flashinfer(Version(specifier.version), "pinned")
    return None


def _main_sha256(subject: Subject, patches: Sequence[Patch]) -> str:
    """The sha256 of the file that most of the patches target ('' where it is missing)."""
    targets = [patch.target for patch in patches]
    most = max(dict.fromkeys(targets), key=targets.count, default="")
    source = subject.files.get(most)
    return sha256(source) if source is not None else ""
