"""Bytes of a server log in, clean lines out: ANSI, carriage returns, binary noise, glued records, giant lines."""

from __future__ import annotations

import re
from dataclasses import dataclass

LINE_CAP = 64 * 1024
"""Bytes kept of one line; SGLang's longest, the dump of its arguments, has about 15 KiB."""

RECORD = re.compile(r"\[(20\d\d-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)?((?: [A-Z][A-Z_]*\d+)*)\] ?")
"""SGLang's log prefix: a time and, where there is more than one rank, `TP3` or `DP1 TP3` (its scheduler.py)."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffd]+")
_CARRIER = re.compile(
    r"^(?:[\w./-]+\s+\| "  # docker compose
    r"|20\d\d-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d) (?:(?:stdout|stderr) [FP] )?"  # kubernetes, docker logs -t
    r"|[A-Z][a-z]{2} +\d+ [\d:]{8} \S+ [\w.-]+\[\d+\]: )"  # journald
)
_TORCH_RANK = re.compile(r"^\[rank(\d+)\]:")


@dataclass(frozen=True)
class Line:
    """One record or continuation line. `rank` is as SGLang prints it (`TP3`, `DP1 TP3`), None without a prefix."""

    number: int
    text: str
    rank: str | None = None
    time: str | None = None

    @property
    def is_record(self) -> bool:
        """Whether the line starts a log record of its own."""
        return self.time is not None

    @property
    def shown(self) -> str:
        """The line as evidence: cleaned, with its prefix."""
        if self.time is None:
            return self.text
        return f"[{self.time}{f' {self.rank}' if self.rank else ''}] {self.text}"


class LineSplitter:
    """Cuts a stream of chunks into blobs of whole lines, in bounded memory."""

    def __init__(self) -> None:
        self._carry = b""
        self._skipping = False

    def feed(self, data: bytes) -> bytes:
        """Whole lines so far, `\\n`-separated and `\\n`-terminated; a carriage return ends a line too."""
        data = data.replace(b"\r", b"\n")
        if self._skipping:
            cut = data.find(b"\n")
            if cut < 0:
                return b""
            data, self._skipping = data[cut:], False
        data = self._carry + data
        end = data.rfind(b"\n") + 1
        self._carry = data[end:]
        whole = data[:end]
        if len(self._carry) > LINE_CAP:
            whole += self._carry[:LINE_CAP] + b"\n"
            self._carry, self._skipping = b"", True
        return whole

    def close(self) -> bytes:
        """The unfinished last line of a truncated file, if any."""
        rest, self._carry = self._carry, b""
        return rest + b"\n" if rest else b""


def clean(raw: bytes) -> str:
    """One line as text without escape sequences and control bytes."""
    text = raw[:LINE_CAP].decode("utf-8", "replace")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return _CONTROL.sub("", text).rstrip()


def parse(number: int, raw: bytes) -> list[Line]:
    """The lines in one physical line: a record glued to a progress bar becomes two."""
    text = _CARRIER.sub("", clean(raw))
    if not text:
        return []
    heads = list(RECORD.finditer(text))
    if not heads:
        torch_rank = _TORCH_RANK.match(text)
        return [Line(number, text, rank=f"TP{torch_rank[1]}" if torch_rank else None)]
    lines = []
    before = text[: heads[0].start()].rstrip()
    if before:
        lines.append(Line(number, before))
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        body = text[head.end() : following.start() if following else None].rstrip()
        lines.append(Line(number, body, rank=head[2].strip() or None, time=head[1]))
    return lines
