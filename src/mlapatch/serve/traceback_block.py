"""One traceback in a log, chained or not, with the process that printed it."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field

from mlapatch.serve.log_stream import Line

START = "Traceback (most recent call last):"
_CHAIN = re.compile(r"(?:During handling of the above exception|The above exception was the direct cause)")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$')
_DIED = re.compile(r"\b(?P<process>\w+) hit an exception: ")
_BARE = re.compile(r"^(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt|Exit)(?::|$)")
_HEAD, _TAIL = 30, 80

_MAIN = ("_run_module_as_main", "_bootstrap")  # runpy; a child of multiprocessing
_IMPORTED = re.compile(r"/(?:site|dist)-packages/|/sglang/")


def is_bare_exception(line: Line) -> bool:
    """An exception line without the frames above it, as excerpts and cut-off logs have."""
    return not line.is_record and _BARE.match(line.text) is not None


@dataclass
class Block:
    """A traceback and its message, in bounded memory.

    `before` is the last line of the same rank before it. `died` names the SGLang process that says it is ending because
    of it ("Scheduler hit an exception"); without it, it may have been handled. `frame` is the innermost one in
    SGLang or flashinfer, or else the innermost. `uncaught`: the last traceback begins where a process's main thread
    does, so nothing above it could have handled the exception. `by_script`: that is a script, whose own `<module>`
    may have handled it all the same.
    """

    first: Line
    phase: str
    moves: int
    before: Line | None = None
    died: str | None = None
    exceptions: list[Line] = field(default_factory=list)
    frame: str = ""
    uncaught: bool = False
    by_script: bool = False
    _head: list[Line] = field(default_factory=list)
    _tail: deque[Line] = field(default_factory=lambda: deque(maxlen=_TAIL))
    _in_frames: bool = False
    _outermost: bool = True
    _frame_is_ours: bool = False
    _chained: bool = False

    @classmethod
    def open(cls, line: Line, *, phase: str, moves: int, before: Line | None) -> Block:
        """Start a block at a `Traceback` line or at a bare exception line."""
        died = _DIED.search(line.text)
        block = cls(line, phase, moves, before, died["process"] if died else None)
        block._in_frames = START in line.text
        block._head.append(line)
        if not block._in_frames:
            block.exceptions.append(line)
        return block

    @property
    def rank(self) -> str | None:
        """The rank that printed it, as in the log's prefix."""
        return self.first.rank

    @property
    def lines(self) -> list[Line]:
        """Its first and last lines."""
        return [*self._head, *self._tail]

    @property
    def final(self) -> Line:
        """The line of the last exception of the chain, or the first line where the log is cut off before it."""
        return self.exceptions[-1] if self.exceptions else self.first

    def belongs(self, line: Line) -> bool:
        """Whether a following line is part of this traceback."""
        if line.is_record:
            return False
        return START not in line.text or self._chained or not self.exceptions

    def add(self, line: Line) -> None:
        """Take a line that belongs."""
        (self._head if len(self._head) < _HEAD else self._tail).append(line)
        if START in line.text:
            self._in_frames, self._chained, self._frame_is_ours = True, False, False
            self._outermost, self.uncaught, self.by_script = True, False, False
        elif _CHAIN.search(line.text):
            self._chained = True
        elif self._in_frames:
            frame = _FRAME.match(line.text)
            if frame:
                if self._outermost:
                    self.by_script = frame["name"] == "<module>" and not _IMPORTED.search(frame["file"])
                    self.uncaught, self._outermost = self.by_script or frame["name"] in _MAIN, False
                ours = "/sglang/" in frame["file"] or "/flashinfer/" in frame["file"]
                if ours or not self._frame_is_ours:
                    self.frame = f"{frame['file']}:{frame['line']} in {frame['name']}"
                    self._frame_is_ours = ours
            elif not line.text[:1].isspace():
                self.exceptions.append(line)
                self._in_frames = False
        elif not self._chained and is_bare_exception(line) and not self.frame:
            self.exceptions.append(line)
