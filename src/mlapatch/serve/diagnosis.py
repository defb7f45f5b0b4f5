"""Why a server log ended as it did: the first failing rank's first known cause, or an honest "unknown"."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from mlapatch.serve.log_stream import Line
from mlapatch.serve.rules import Rule, fill
from mlapatch.serve.standing import alive, ended, silent
from mlapatch.serve.traceback_block import Block
from mlapatch.serve.transcript import Match, Transcript
from mlapatch.serve.verdicts import FAILED, Diagnosis, Ending, Silence, common_values, derived

_GROUP = re.compile(r"\b(?:DP|PP)\d+")
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'$")
_VENV = re.compile(r'^\s+File "(/[^"]+)/lib/python3[\d.]*/site-packages/')
_BY_SIGNAL = re.compile(r"\b(?:Killed|Segmentation fault|Aborted|Bus error|Illegal instruction|Terminated)\b")
_SIGNALLED = ("rank-killed", "rank-segfault", "rank-aborted")
_USER_BASE = "/.local"
_UNCAUGHT = 1
"""The exit code of a Python process that ended with an exception."""


def diagnose(log: Transcript, *, ending: Ending | None = None, silence: Silence | None = None) -> Diagnosis:
    """Decide. `ending` and `silence` add what only a running launcher knows; a log alone needs neither."""
    failure = _Case(log, ending).decide()
    if failure is not None and (failure.known or ending is None or log.has_died()):
        return failure  # who said why it dies outranks what then happened to the others
    if ending is not None:
        died = ended(log, ending)
        return died if failure is None or died.known else failure
    if silence is not None:
        return silent(log, silence)
    return alive(log)


class _Case:
    """One decision over a transcript; see rules.toml for the words fatal, ending and secondary."""

    def __init__(self, log: Transcript, ending: Ending | None = None) -> None:
        self.log, self.ending = log, ending
        self.matches = sorted(log.matches.values(), key=lambda m: m.line.number)
        self.blocks = [s.died for s in log.states.values() if s.died]
        loose = [s.last_block for s in log.states.values() if s.last_block and s.last_block.died is None]
        self.loose = [b for b in loose if log.is_live(b) and (log.ready is None or log.ended is not None)]

    def decide(self) -> Diagnosis | None:
        """The failure, or None where the log shows none."""
        deaths: list[Block | Match] = [b for b in self.blocks if not self._is_secondary(b)]
        deaths += [m for m in self.matches if m.rule.fatal and not m.rule.ending and not m.rule.secondary]
        first = min(deaths, key=_line_number, default=None)
        if first is None:
            first = min((m for m in self.matches if self._counts(m)), key=_line_number, default=None)
        endings = [m for m in self.matches if m.rule.ending]
        loose = min((b for b in self.loose if not self._is_secondary(b)), key=_line_number, default=None)
        if first is None and endings and not (loose and endings[0].rule.id == "rank-died"):
            return self._from_match(min(endings, key=lambda m: m.rule.order))
        first = first or loose
        if first is not None:
            return self._of_rank(first)
        secondary = [
            m for m in self.matches if m.rule.secondary and (m.block is None or m.block in self.blocks + self.loose)
        ]
        if endings:
            return self._from_match(min(endings, key=lambda m: m.rule.order))
        if secondary and (self.log.ready is None or self.log.ended):
            return self._from_match(secondary[0])
        if self.log.ended is not None and self.log.stopped is None:
            before = self.log.before_end
            values = {"last_line": before.shown} if before else {}
            shown = (*((before,) if before else ()), self.log.ended)
            return self._special("unknown-end", FAILED, None, shown, known=False, values=values)
        return None

    # --------------------------------------------------------------------------------------------------- choosing
    def _counts(self, match: Match) -> bool:
        """A known cause outside a dying traceback counts while its rank made no progress after it."""
        if match.rule.secondary or match.rule.ending or not self.log.is_live(match):
            return False
        return self.log.ready is None or self.log.ended is not None or match.line.number < self.log.ready.number

    def _is_secondary(self, block: Block) -> bool:
        rules = [m.rule for m in self.matches if m.block is block]
        return bool(rules) and all(rule.secondary for rule in rules)

    def _of_rank(self, first: Block | Match) -> Diagnosis:
        rank = first.rank
        block = first if isinstance(first, Block) else first.block
        rules = [
            m
            for m in self.matches
            if m.rank == rank
            and not m.rule.secondary
            and not m.rule.ending
            and (m is first or (block is not None and m.block is block) or (m.block is None and self._counts(m)))
        ]
        best = min(rules, key=lambda m: m.rule.order, default=None)
        fallback = self._fallback(first, best.rule if best else None)
        if fallback is not None:
            return fallback
        if best is not None:
            return self._from_match(best)
        assert isinstance(first, Block)  # noqa: S101 - a match is always among its own rules
        missing = _NO_MODULE.match(first.final.text)
        if missing and self._ended(first):
            return self._module_missing(first, missing[1])
        values = {"exception": first.final.text, "frame": first.frame}
        shown = (first.first, first.final)
        return self._special(
            "unknown", FAILED, first, shown, known=False, values={k: v for k, v in values.items() if v}
        )

    def _fallback(self, first: Block | Match, rule: Rule | None) -> Diagnosis | None:
        """A native model class that failed to import outranks what its generic stand-in then did (case 37)."""
        arch = self.log.facts.get("fallback_arch")
        if arch is None or (rule is not None and rule.phase is not None):
            return None
        module = self.log.book.architectures.get(arch, "")
        line = self.log.ignored_imports.get(module)
        if line is None or line.number > _line_number(first):
            return None
        template = self.log.book.specials["fallback-model"]
        reason = line.text.split(": ", 1)[1]
        missing = re.search(r"No module named '(\w+)[\w.]*'$", reason)
        package = template.packages.get(missing[1], "") if missing else ""
        values = {"arch": arch, "module": module, "reason": reason} | ({"package": package} if package else {})
        block = first if isinstance(first, Block) else first.block
        shown = (line, *((block.first, block.final) if block else (first.line if isinstance(first, Match) else line,)))
        return self._special("fallback-model", FAILED, first, shown, values=values)

    def _ended(self, block: Block) -> bool:
        """Whether a process ended with this exception, and the server with it: no import that was tried and handled.

        A script's own frame comes first in what its `print_exc()` shows, too: there nothing may follow. What ends by a
        signal does not end by an exception.
        """
        if block.died:
            return True
        after = [line for line in block.lines if line.number > block.final.number]
        if not block.uncaught or any(_BY_SIGNAL.search(line.text) for line in after):
            return False
        if block.by_script and (after or self.log.last_number > block.final.number):
            return False
        if self.ending is not None:
            return self.ending.code in (None, _UNCAUGHT)
        last = block.lines[-1].number
        said = [m for m in self.matches if (m.rule.ending or m.rule.secondary) and m.line.number > last]
        if said:
            return min(said, key=lambda m: (m.line.number, m.rule.order)).rule.id not in _SIGNALLED
        ended = self.log.ended is not None and not _BY_SIGNAL.search(self.log.ended.text)
        return ended or self.log.last_number <= last

    def _module_missing(self, block: Block, module: str) -> Diagnosis:
        """What no rule knows more of: an import of a package that is not there."""
        package = self.log.book.specials["module-missing"].packages.get(module.partition(".")[0], "")
        homes = [found[1] for line in block.lines if (found := _VENV.match(line.text))]
        homes = [home for home in homes if not home.endswith(_USER_BASE)]  # pip install --user: no Python is there
        python = f"{homes[-1]}/bin/python" if homes else ""
        values = {"module": module, "frame": block.frame, "package": package, "python": python}
        values["exe"] = shlex.quote(python) if python else ""
        values["pip"] = f"{values['exe']} -m pip" if python else "pip"
        known = {k: v for k, v in values.items() if v}
        return self._special("module-missing", FAILED, block, (block.first, block.final), values=known)

    # ---------------------------------------------------------------------------------------------------- telling
    def _from_match(self, match: Match) -> Diagnosis:
        rule = match.rule
        after = [line for line in self.log.states[match.rank].recent if line.number > match.line.number]
        around = [match.line, *(match.block.lines if match.block else after), *reversed(match.recent)]
        groups = dict(match.groups)
        shown = [match.line]
        for capture in rule.captures:
            for line in around:
                found = capture.search(line.text)
                if found:
                    groups |= {k: v for k, v in found.groupdict().items() if v and k not in groups}
                    shown.append(line)
                    break
        rank = self._rank(match)
        dead = groups.get("dead") or (re.search(r"scheduler_(\d+)", groups.get("name", "")) or [None, None])[1]
        if dead is not None:
            rank = self._named(dead)
        if match.block is not None:
            shown += [match.block.first, match.block.final]
        phase, values = match.phase, self._values(match, rank, match.phase)
        if dead is not None and rule.ending:  # what it did last is in its own lines, not in the parent's
            phase = self.log.phase(rank) if rank in self.log.states else self.log.server_phase()
            values = self._values(match, rank, phase)
            own = self.log.last_line(rank)
            if own is not None:
                shown += [line for line in (self._entered(rank), own) if line]
                values["last_line"] = own.shown
        values = derived(values | groups)
        compiler = values.get("compiler_error")
        shown += [line for line in around if compiler and compiler in line.text][:1]
        return Diagnosis(
            FAILED,
            fill(rule.cause, values),
            phase,
            fill(rule.advice_for.get(values.get("attention_backend", ""), rule.advice), values),
            rank,
            rule.id,
            rule.source,
            rule.case,
            lines=self._evidence(match.rank, shown),
        )

    def _special(
        self,
        name: str,
        verdict: str,
        event: Block | Match | None,
        shown: Iterable[Line],
        *,
        known: bool = True,
        values: dict[str, str] | None = None,
    ) -> Diagnosis:
        template = self.log.book.specials[name]
        rank = self._rank(event) if event else None
        phase = event.phase if event else self.log.server_phase()
        filled = self._values(event, rank, phase) | (values or {})
        return Diagnosis(
            verdict,
            fill(template.cause, filled),
            phase,
            fill(template.advice, filled),
            rank,
            name,
            template.source,
            template.case,
            known,
            self._evidence(event.rank if event else None, shown),
        )

    def _named(self, number: str) -> str:
        """A scheduler's rank as in the log's prefix: `TP3`, or `DP1 TP3` where no other replica or stage has spoken.

        Where several have, the one TP3 that has spoken may be another one's than the TP3 that died without a word.
        """
        name = f"TP{number}"
        meant = [rank for rank in self.log.ranks if name in rank.split()]
        groups = {tuple(_GROUP.findall(rank)) for rank in self.log.ranks}
        return meant[0] if len(meant) == len(groups) == 1 else name

    def _entered(self, rank: str | None) -> Line | None:
        """The line by which a rank entered its phase, where that is its phase still."""
        state = self.log.states.get(rank)
        return state.phase_line if state and state.phase == self.log.phase(rank) else None

    def _rank(self, event: Block | Match) -> str | None:
        if event.rank is not None:
            return event.rank
        block = event if isinstance(event, Block) else event.block
        return "TP0" if not self.log.prefixed and block is not None and block.died == "Scheduler" else None

    def _values(self, event: Block | Match | None, rank: str | None, phase: str) -> dict[str, str]:
        values = common_values(self.log, event.rank if event else None, rank, phase)
        before = event.before if event else self.log.last_line()
        return values | ({"last_line": before.shown} if before else {})

    def _evidence(self, prefix: str | None, shown: Iterable[Line]) -> tuple[Line, ...]:
        state = self.log.states.get(prefix)
        wanted = [*shown, *([state.phase_line] if state and state.phase_line else [])]
        unique = {(line.number, line.text): line for line in wanted}
        return tuple(sorted(unique.values(), key=lambda line: line.number))


def _line_number(event: Block | Match) -> int:
    return event.first.number if isinstance(event, Block) else event.line.number
