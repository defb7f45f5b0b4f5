"""What a server log says so far: phases and facts per rank, tracebacks, rule matches, health. Bounded memory."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from mlapatch.serve.log_stream import Line, LineSplitter, parse
from mlapatch.serve.rules import UNKNOWN, Fact, Phase, Rule, RuleBook, load
from mlapatch.serve.traceback_block import START, Block, is_bare_exception

READY = "ready"
WARM_UP = "warm-up"
_HEALTH = re.compile(rb'"GET /health(?:_generate)? HTTP/[\d.]+" (?P<code>\d{3})')
_ONLY_HEALTH = [b"get /health"]
_MARK = re.compile(r"mlapatch: (?P<patch>\S+) active in (?P<path>.+?) sha256=(?P<sha256>[0-9a-f]{64})")
_IGNORED = re.compile(r"Ignore import error when loading sglang\.srt\.models\.(?P<module>\w+): (?P<reason>.+)$")
_ENDED = re.compile(r"(?:sigquit|kill_process_tree called|^Killed$|\bKilled\b +\S)", re.IGNORECASE)
_STOPPED = re.compile(r"(?:^INFO: +Shutting down$|Gracefully exiting)")


@dataclass
class RankState:
    """One rank, or with rank None the parent (and the only scheduler, where there is one)."""

    rank: str | None
    phase: str | None = None
    phase_line: Line | None = None
    moves: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    recent: deque[Line] = field(default_factory=lambda: deque(maxlen=12))
    died: Block | None = None
    last_block: Block | None = None


@dataclass(frozen=True)
class Match:
    """A rule's text on a line, with the phase in which the rank was."""

    rule: Rule
    line: Line
    rank: str | None
    phase: str
    moves: int
    groups: dict[str, str]
    recent: tuple[Line, ...]
    before: Line | None
    block: Block | None


@dataclass(frozen=True)
class Mark:
    """A patched file's own line at import."""

    rank: str | None
    patch: str
    path: str
    sha256: str


Handler = Callable[[Line, RankState], None]


class Transcript:
    """Feed bytes, then read its attributes or hand it to `diagnosis.diagnose`.

    `known` are facts from elsewhere, such as the command line; what the log says outranks them.
    """

    def __init__(self, book: RuleBook | None = None, *, known: Mapping[str, str] | None = None) -> None:
        self.book = book or load()
        self._known = dict(known or {})
        self._handlers = self._table()
        self._splitter = LineSplitter()
        self.lines = 0
        self._reset()

    def _reset(self) -> None:
        self.states: dict[str | None, RankState] = {None: RankState(None)}
        self.facts: dict[str, str] = dict(self._known)
        self.matches: dict[tuple[int, str | None], Match] = {}
        self.marks: list[Mark] = []
        self.ignored_imports: dict[str, Line] = {}
        self.health_503 = 0
        self.health_failed: Line | None = None
        self.answered_200 = False
        self.ended: Line | None = None
        self.before_end: Line | None = None
        self.stopped: Line | None = None
        self.ready: Line | None = None
        self.sglang_lines = 0
        self.prefixed = False  # whether records carry a rank; SGLang prints none where there is only one
        self._block: Block | None = None
        self._last: dict[bytes, tuple[int, bytes]] = {}
        self._last_any: tuple[int, bytes] = (0, b"")

    # ------------------------------------------------------------------------------------------------- reading
    def feed(self, data: bytes) -> None:
        """Take the next bytes of the log, cut anywhere."""
        self._lines(self._splitter.feed(data))

    def close(self) -> None:
        """The log has ended: take a last line without a newline."""
        self._lines(self._splitter.close())

    def _lines(self, blob: bytes) -> None:
        if not blob:
            return
        lowered = blob.lower()
        active = [literal for literal in self._handlers if literal in lowered]
        for raw, low in zip(blob[:-1].split(b"\n"), lowered[:-1].split(b"\n"), strict=True):
            self.lines += 1
            if not raw:
                continue
            hits = [literal for literal in active if literal in low] if active else active
            if hits == _ONLY_HEALTH and raw[:3] == b"[20":  # the commonest line of a long log
                self._block = None
                self._health_answered(raw)
            elif hits or (self._block is not None and raw[:3] != b"[20") or b"\x1b" in raw:
                for line in parse(self.lines, raw):
                    self._take(line, hits)
            else:
                self._block = None
            if b"get /health" not in low:
                self._last_any = (self.lines, raw)
                if raw[:3] == b"[20":
                    end = raw.find(b"]", 20, 90)
                    self._last[raw[20:end].lstrip(b".,0123456789")] = self._last_any
                    self.sglang_lines += 1

    def _take(self, line: Line, hits: list[bytes]) -> None:
        if line.rank is not None and not line.is_record and not self.prefixed:
            line = replace(line, rank=None)
        self.prefixed = self.prefixed or (line.is_record and line.rank is not None)
        state = self.states.get(line.rank)
        if state is None:
            state = self.states[line.rank] = RankState(line.rank)
        if self._block is not None and not self._block.belongs(line):
            self._block = None
        if self._block is None and (START in line.text or is_bare_exception(line)):
            self._block = Block.open(
                line, phase=self.phase(line.rank), moves=self.moves(line.rank), before=self.last_line(line.rank)
            )
            state.last_block = self._block
            if self._block.died and state.died is None:
                state.died = self._block
        elif self._block is not None:
            self._block.add(line)
            state = self.states[self._block.rank]
        low = line.text.lower()
        for literal in hits:
            if literal.decode() in low:
                for handler in self._handlers[literal]:
                    handler(line, state)
        state.recent.append(line)

    # -------------------------------------------------------------------------------------------------- handlers
    def _table(self) -> dict[bytes, list[Handler]]:
        table: dict[bytes, list[Handler]] = {}

        def on(contains: str, handler: Handler) -> None:
            table.setdefault(contains.encode(), []).append(handler)

        for contains, handler in (
            ("traceback (most recent", _nothing),
            ("error", _nothing),
            ("exception", _nothing),
            ("get /health", self._on_health),
            ("health check failed", self._on_health_failed),
            ("mlapatch: ", self._on_mark),
            ("ignore import error", self._on_ignored),
            ("sigquit", self._on_end),
            ("kill_process_tree", self._on_end),
            ("killed", self._on_end),
            ("shutting down", self._on_stop),
            ("gracefully exiting", self._on_stop),
            ("server_args=serverargs(", self._on_start),
            ("server_args={", self._on_start),  # 0.5.23
        ):
            on(contains, handler)
        for fact in self.book.facts:
            on(fact.contains, partial(self._on_fact, fact))
        for phase in self.book.phases:
            for begin in phase.begins:
                on(begin.contains, partial(self._on_phase, phase, begin.pattern))
        for rule in self.book.rules:
            on(rule.match.contains, partial(self._on_rule, rule))
        return table

    def _on_start(self, line: Line, state: RankState) -> None:  # noqa: ARG002
        if self.ended is not None:  # the log of a restarted server: what counts is the last start
            block = self._block
            self._reset()
            self._block = block
            self.states[line.rank] = RankState(line.rank)

    def _on_fact(self, fact: Fact, line: Line, state: RankState) -> None:
        values = state.facts if fact.per_rank else self.facts
        for pattern in fact.patterns:
            found = pattern.search(line.text)
            if found:
                for name, value in found.groupdict().items():
                    if value is not None and not (fact.keep_first and name in values):
                        values[name] = value

    def _on_phase(self, entered: Phase, pattern: re.Pattern[str], line: Line, state: RankState) -> None:
        if self._block is not None or not pattern.search(line.text):
            return
        phase = entered.id
        order, now = self.book.rank_of(phase), self.book.rank_of(state.phase or UNKNOWN)
        if now >= self.book.rank_of(WARM_UP) and order < now:
            return
        if state.phase != phase:
            state.moves += 1
        state.phase, state.phase_line = phase, line
        if phase == READY and self.ready is None:
            self.ready = line

    def _on_rule(self, rule: Rule, line: Line, state: RankState) -> None:
        found = rule.match.pattern.search(line.text)
        if not found:
            return
        groups = {name: value.strip().rstrip(".") for name, value in found.groupdict().items() if value}
        if any(not regex.fullmatch(groups.get(group, "")) for group, regex in rule.value.items()):
            return
        phase = self.phase(state.rank)
        if rule.when and phase not in rule.when:
            return
        key = (rule.order, state.rank)
        known = self.matches.get(key)
        if known is None or not self.is_live(known):
            self.matches[key] = Match(
                rule,
                line,
                state.rank,
                rule.phase or phase,
                self.moves(state.rank),
                groups,
                tuple(state.recent),
                self._block.before if self._block else self.last_line(state.rank),
                self._block,
            )

    def _on_health(self, line: Line, state: RankState) -> None:  # noqa: ARG002
        self._health_answered(line.text.encode())

    def _health_answered(self, raw: bytes) -> None:
        found = _HEALTH.search(raw)
        if found and found["code"] == b"503":
            self.health_503 += 1
        elif found and found["code"] == b"200":
            self.health_503, self.health_failed, self.answered_200 = 0, None, True

    def _on_health_failed(self, line: Line, state: RankState) -> None:  # noqa: ARG002
        if "Health check failed. Server couldn't get a response" in line.text:
            self.health_failed = self.health_failed or line

    def _on_mark(self, line: Line, state: RankState) -> None:
        found = _MARK.search(line.text)
        if found:
            self.marks.append(Mark(state.rank, found["patch"], found["path"], found["sha256"]))

    def _on_ignored(self, line: Line, state: RankState) -> None:  # noqa: ARG002
        found = _IGNORED.search(line.text)
        if found:
            self.ignored_imports.setdefault(found["module"], line)

    def _on_end(self, line: Line, state: RankState) -> None:  # noqa: ARG002
        if self.ended is None and self._block is None and _ENDED.search(line.text):
            self.ended, self.before_end = line, self.last_line()

    def _on_stop(self, line: Line, state: RankState) -> None:  # noqa: ARG002
        if self.stopped is None and _STOPPED.search(line.text):
            self.stopped = line

    # --------------------------------------------------------------------------------------------------- reading out
    def phase(self, rank: str | None) -> str:
        """The phase of a rank: its own last phase line, or the server's once HTTP is bound."""
        server = self.states[None].phase
        if rank is None:
            return server or "start"
        own = self.states[rank].phase if rank in self.states else None
        if server is not None and self.book.rank_of(server) >= self.book.rank_of(WARM_UP):
            return server
        return own or UNKNOWN

    def moves(self, rank: str | None) -> int:
        """Grows with each phase that the rank enters, and when the server becomes ready."""
        state = self.states.get(rank)
        return (state.moves if state else 0) + (1000 if self.ready and rank is not None else 0)

    def is_live(self, event: Match | Block) -> bool:
        """Whether the rank made no progress after the event."""
        return self.moves(event.rank) == event.moves

    @property
    def ranks(self) -> list[str]:
        """The ranks that have printed something, as in the prefix."""
        return sorted(rank for rank in self.states if rank is not None)

    def server_phase(self) -> str:
        """The phase of the start as a whole: that of the slowest rank that has said one."""
        server = self.states[None].phase
        said = [state.phase for rank, state in self.states.items() if rank is not None and state.phase]
        if not said or (server and self.book.rank_of(server) >= self.book.rank_of(WARM_UP)):
            return server or "start"
        return min(said, key=self.book.rank_of)

    @property
    def last_number(self) -> int:
        """The number of the last line that is no health request: it grows while anything is said."""
        return self._last_any[0]

    def has_died(self) -> bool:
        """Whether a process has said that it ends because of an exception, and has said which."""
        return any(state.died is not None and state.died.exceptions for state in self.states.values())

    def last_line(self, rank: str | None = None) -> Line | None:
        """The last line that is no health request: of one rank, or with None of the whole log."""
        number, raw = self._last_any
        if rank is not None:
            number, raw = self._last.get(f" {rank}".encode(), (0, b""))
            if not raw and rank in self.states:  # a carrier's prefix (docker, journald) hides a record's head
                return next(reversed(self.states[rank].recent), None)
        lines = parse(number, raw) if raw else []
        return lines[-1] if lines else None

    def last_scheduler_line(self) -> Line | None:
        """The last line that a scheduler printed, whatever its rank."""
        latest = max((said for prefix, said in self._last.items() if prefix or not self.prefixed), default=(0, b""))
        lines = parse(*latest)
        return lines[-1] if lines else None

    def health_text(self) -> dict[str, str]:
        """What `/health` answered, for the texts."""
        return {"health_503": str(self.health_503)} if self.health_503 else {}


def _nothing(line: Line, state: RankState) -> None:
    """Makes a line be looked at; tracebacks need no more."""
