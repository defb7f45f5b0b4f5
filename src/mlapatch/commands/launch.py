"""`launch`: preflight, start, follow, diagnose; what it starts is recorded beside its log."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlapatch.commands.diagnose import describe
from mlapatch.commands.doctor import beside
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.measure import outcomes
from mlapatch.measure.keeping import Kept, keeping
from mlapatch.outcome import Block, Outcome, Pairs, Table, Text, Warn
from mlapatch.serve import gpu_state, libraries, preflight, redact
from mlapatch.serve.effect import effect
from mlapatch.serve.follow import Follower, LogTail, Timing
from mlapatch.serve.health import Answer, try_prompt
from mlapatch.serve.model_fit import FIT_CHECKS
from mlapatch.serve.plan import Plan, of_command, of_script, set_up
from mlapatch.serve.preflight import CHECKS, FAIL, WARN, Context, Finding, PatchedFile, PatchFacts, run_checks
from mlapatch.serve.processes import Tree, start, terminable
from mlapatch.serve.ranks import RankReport, report
from mlapatch.serve.ready import rank_problem
from mlapatch.serve.run_record import FAILED, READY, STOPPED, RunRecord, log_path
from mlapatch.serve.transcript import Transcript
from mlapatch.serve.verdicts import Diagnosis

if TYPE_CHECKING:
    from mlapatch.assess import Assessment

GuardCheck = Callable[["Assessment"], tuple[str, str]]
Tell = Callable[[str], None]


def launch(
    *,
    script: Path | None = None,
    arguments: Sequence[str] = (),
    command: Sequence[str] | None = None,
    name: str = "",
    logs: Path = Path("logs"),
    detach: bool = False,
    dry_run: bool = False,
    force: bool = False,
    patience: Mapping[str, float] | None = None,
    require: Sequence[str] = (),
    sglang: Path | None = None,
    python: str | None = None,
    patches: Sequence[Path] | None = None,
    tell: Tell = print,
    timing: Timing | None = None,
    guard: GuardCheck | None = None,
    label: str = "",
    keep: bool = True,
    db: Path | None = None,
) -> Outcome:
    """Start a server through a script, or a command of the user's own, and follow it until it is ready.

    Without `detach` it goes on watching until the server ends. The exit code is 4 where the guard refuses, 5 where the
    preflight fails, 6 where the server does not start, dies, answers garbage or does not run the patched bytes.
    """

    def facts(exe: str | None) -> PatchFacts:
        return patch_facts(sglang, python or exe, patches, require, guard)

    if command is not None:
        chosen = sglang is not None or python is not None
        plan = of_command(command, facts=facts, chosen=chosen, sglang=sglang is not None, required=bool(require))
    else:
        plan = of_script(script or default_script(), arguments, facts=facts, sglang=sglang is not None)
    gpus = gpu_state.look(plan.environment)
    context = Context(plan.options, plan.environment, plan.facts, gpus, command=plan.said)
    findings = run_checks(context, (*CHECKS, *FIT_CHECKS, effect))
    refused = preflight.refusal(findings, force)
    if dry_run or refused is not None:
        return _preflight_outcome(plan, findings, refused)
    for finding in findings:
        if finding.state in (WARN, FAIL):
            tell(f"{'forced past' if finding.state == FAIL else 'warning'}: {finding.check}: {finding.text}")
    if plan.facts is None:
        tell(f"warning: sglang, patches, guard: {context.unseen}")
    timing = replace(timing or Timing(), patience=dict(patience or {}))
    name = name or plan.name
    kept = keeping(keep, db, "launch", set_up(plan, gpus, name), label, needed=False)
    tree, record, secrets = _start(plan, logs, name)
    tell(f"started pid {record.pid}; log {record.log}")
    log = LogTail(Path(record.log), Transcript(known=plan.options.facts))
    follower = Follower(tree, log, timing, tell, host=plan.options.host, port=plan.options.port)
    run = _Run(plan, tree, record, follower, secrets, findings, tell)
    with terminable():
        try:
            return run.follow(kept, detach=detach)
        except BaseException:  # Ctrl-C, SIGTERM or a bug of ours: nothing stays behind
            tell("stopping the server")
            run.stop(STOPPED)
            raise
        finally:
            follower.close()


def default_script() -> Path:
    """`scripts/run_tp8_cds16.sh` of this folder, else the one that ships with mlapatch."""
    from mlapatch.catalogue import bundled_folder

    here = Path("scripts/run_tp8_cds16.sh")
    return here if here.is_file() else bundled_folder("scripts") / here.name


def patch_facts(
    sglang: Path | None,
    python: str | None,
    folders: Sequence[Path] | None,
    require: Sequence[str],
    guard: GuardCheck | None,
) -> PatchFacts:
    """What `status` would say of the SGLang that the server will import."""
    from mlapatch.assess import assess, machine_of
    from mlapatch.catalogue import load_catalogue
    from mlapatch.install.target import find_target

    catalogue = load_catalogue(folders)
    required = tuple(catalogue.get(name).name for name in require)
    found_target = find_target(sglang, python)
    found = assess(found_target, catalogue, machine_of(found_target))
    files = tuple(
        PatchedFile(file.path, file.sha256, tuple(found.applied(file.relative)))
        for file in found.files.values()
        if found.applied(file.relative)
    )
    verdicts = {name: (str(j.verdict), j.reason) for name, j in found.judgements.items()}
    for name in (name for file in files for name in file.patches):
        objection = found.machine.objection(catalogue.patches[name])
        if objection:  # images move between GPUs: what fitted at apply time need not fit here
            verdicts[name] = ("unsupported", f"applied, but {objection}")
    state, text = guard(found) if guard is not None else ("none", "")
    flashinfer = found.machine.flashinfer
    versions, missing = beside(found_target)
    return PatchFacts(
        digests={name: catalogue.patches[name].digest for file in files for name in file.patches},
        sglang=str(found_target.version or ""),
        package=found_target.package,
        python=found_target.python,
        library_problems=tuple(libraries.problems(versions, str(found_target.version or ""), os.environ)),
        missing=missing,
        flashinfer=f"{flashinfer.version} ({flashinfer.source})" if flashinfer else "",
        files=files,
        verdicts=verdicts,
        required=required,
        guard=state,
        guard_text=text,
        notes=found_target.notes,
    )


# ---------------------------------------------------------------------------------------------------------- preflight
def _preflight_outcome(plan: Plan, findings: Sequence[Finding], refused: Exit | None) -> Outcome:
    shown = redact.command(plan.command, plan.environment)
    rows = [(f.state, f.check, f.text + (f" (next: {f.next})" if f.next else "")) for f in findings]
    blocks: list[Block] = [
        Pairs([("command", shlex.join(shown))]),
        Table(("state", "check", "finding"), rows, title="preflight"),
    ]
    if refused is not None:
        blocks.append(Text((f"not started: {preflight.refused_because(findings)}",), style="bold red"))
    data: dict[str, object] = {
        "state": "refused" if refused is not None else "dry-run",
        "command": shown,
        "preflight": [finding.as_dict() for finding in findings],
    }
    return Outcome(refused or Exit.OK, data, blocks)


# -------------------------------------------------------------------------------------------------------------- start
def _start(plan: Plan, logs: Path, name: str) -> tuple[Tree, RunRecord, tuple[str, ...]]:
    path = log_path(logs, name, time.strftime("%Y%m%d-%H%M%S"))
    secrets = redact.secrets(plan.command, plan.environment)
    try:
        tree = start(plan.command, environment={**plan.environment, "PYTHONUNBUFFERED": "1"}, log=path, secrets=secrets)
    except OSError as error:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "the server's command cannot be run",
            where=plan.command[0],
            found=str(error.strerror),
            next="check the path and that it is executable; mlapatch launch --dry-run shows the command",
        ) from None
    facts = plan.facts
    record = RunRecord(
        name=name,
        pid=tree.root.pid,
        created=tree.root.create_time(),
        session=tree.session,
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        log=str(path),
        command=redact.command(plan.command, plan.environment),
        host=plan.options.host,
        port=plan.options.port,
        sglang=facts.sglang if facts else "",
        patches={n: file.sha256 for file in facts.files for n in file.patches} if facts else {},
        facts=plan.options.facts,
    )
    record.save(otherwise=tree.stop)  # `stop` and `logs` would not find it
    return tree, record, secrets


@dataclass
class _Run:
    """One started server and what has been learned of it."""

    plan: Plan
    tree: Tree
    record: RunRecord
    follower: Follower
    secrets: tuple[str, ...]
    findings: Sequence[Finding]
    tell: Tell
    answer: Answer | None = None
    ranks: RankReport | None = None
    seconds: float = 0.0
    run: int | None = None

    def follow(self, keeping: AbstractContextManager[Kept], *, detach: bool) -> Outcome:
        """The run is kept when the start is decided: the server may live for weeks."""
        with keeping as kept:
            failed, warnings = self._until_decided()
            data = failed.data if failed is not None else self._data(READY)
            kept.result |= outcomes.of_launch(data, self.seconds)
            kept.status = "failed" if failed is not None else "done"
        self.run = kept.run
        warnings = [*warnings, *map(str, kept.result.get("notes", ()))]
        blocks: list[Block] = [Warn(text) for text in warnings]
        shown = [Pairs([("run", str(self.run))])] if self.run is not None else []
        if failed is not None:
            return replace(failed, data=failed.data | {"run": self.run}, blocks=[*blocks, *failed.blocks, *shown])
        summary = Pairs([("ready", self.follower.url), ("pid", str(self.record.pid)), ("log", self.record.log)])
        if detach:
            self.tree.leave()
            stop = Text((f"stop it with: mlapatch stop {self.record.name}",))
            return Outcome(Exit.OK, self._data("ready"), [*blocks, summary, *shown, stop])
        for text in warnings:
            self.tell(f"warning: {text}")
        self.tell(f"serving at {self.follower.url}; Ctrl-C stops it")
        failure = self.follower.until_ended()
        if failure is not None:
            return self._failed(failure)
        self.stop(STOPPED)
        return Outcome(Exit.OK, self._data("stopped"), [*blocks, Text(("the server was stopped",))])

    def _until_decided(self) -> tuple[Outcome | None, list[str]]:
        """Why it did not start, if so, and warnings."""
        failure = self.follower.until_ready()
        self.seconds = round(time.monotonic() - self.follower.began, 1)
        if failure is not None:
            return self._failed(failure), []
        problem, warnings = self._check_ready()
        if problem:
            return self._unfit(problem), []
        self.record = self.record.with_state(READY, tell=self.tell)
        return None, warnings

    def stop(self, state: str, diagnosis: dict[str, Any] | None = None) -> None:
        """End the whole tree and say so in the record."""
        self.follower.close()
        self.tree.stop()
        self.tree.finish_log()
        self.record = self.record.with_state(state, diagnosis, tell=self.tell)

    def _check_ready(self) -> tuple[str, list[str]]:
        options = self.plan.options
        files = self.plan.facts.files if self.plan.facts else ()
        ranks = report(self.follower.log, options)
        self.ranks = ranks if files else None
        problem, warnings = rank_problem(ranks, files), list[str]()
        level = options.text("log-level", "info")
        if problem and not self.follower.log.marks and level in ("warning", "error", "critical"):
            warnings.append(f"--log-level {level} hides the line by which each rank says which bytes it runs")
        elif problem:
            return problem, []
        elif files:
            self.tell(ranks.said)
        if ranks.layout.node:  # its /health is a stand-in: the model answers at node 0
            self.tell(f"{ranks.layout.where} answers no prompts: node 0 does, and its launch sends one")
            return "", warnings
        key = options.text("api-key")
        ids = "skip-tokenizer-init" in options.given
        self.answer = try_prompt(self.follower.url, api_key=key, ids=ids)
        if not self.answer.problem:
            self.tell(
                f"one prompt answered {self.answer.tokens} tokens in {self.answer.seconds:.2f} s: {self.answer.text!r}"
            )
            return "", warnings
        if options.text("load-format") == "dummy":
            return "", [*warnings, f"{self.answer.problem}; the weights are dummies, so that says nothing"]
        return self.answer.problem, []

    def _failed(self, found: Diagnosis) -> Outcome:
        shown = {**found.as_dict(), "evidence": [redact.text(line, self.secrets) for line in found.evidence]}
        self.stop(FAILED, shown)
        blocks = [*describe(found), Pairs([("log", self.record.log)])]
        return Outcome(Exit.SERVER, self._data("failed", diagnosis=shown), blocks)

    def _unfit(self, problem: str) -> Outcome:
        """It answers `/health`, but not as it should."""
        from mlapatch.serve.diagnosis import diagnose

        found = diagnose(self.follower.log)
        shown: dict[str, object] = {**found.as_dict(), "cause": problem, "verdict": "unfit", "rule": "ready-check"}
        blocks: list[Block] = [Text((problem,), style="bold red")]
        if found.verdict == "hazard":
            shown["advice"] = found.advice
            blocks.append(Pairs([("likely", found.cause), ("advice", found.advice)]))
        else:
            other = self.plan.options.text("attention-backend", "") != "triton"
            shown["advice"] = "compare with stock: mlapatch revert" + (
                ", or --attention-backend triton" if other else ""
            )
            blocks.append(Pairs([("advice", str(shown["advice"]))]))
        self.stop(FAILED, shown)
        blocks.append(Pairs([("log", self.record.log)]))
        return Outcome(Exit.SERVER, self._data("failed", diagnosis=shown), blocks)

    def _data(self, state: str, **more: object) -> dict[str, object]:
        data: dict[str, object] = {
            "state": state,
            "pid": self.record.pid,
            "url": self.follower.url,
            "log": self.record.log,
            "record": str(self.record.path),
            "run": self.run,
            "phases": self.follower.phases,
            "preflight": [finding.as_dict() for finding in self.findings],
        }
        if self.ranks is not None:
            data["ranks"] = self.ranks.as_dict()
        if self.answer is not None:
            data["answer"] = {"text": self.answer.text, "tokens": self.answer.tokens, "problem": self.answer.problem}
        return data | more
