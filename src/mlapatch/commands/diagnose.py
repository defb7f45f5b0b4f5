"""`diagnose`: why a server log ended as it did."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.outcome import Outcome, Pairs, Text

if TYPE_CHECKING:
    from mlapatch.serve.verdicts import Diagnosis

CHUNK = 1 << 20


def diagnose(*, log: str) -> Outcome:
    """Read a log (`-` is standard input) in bounded memory and name the first failing rank's cause.

    The exit code is 0 whenever the log could be read: that a server failed is the answer, not an error.
    """
    if log == "-":
        found = read(sys.stdin.buffer)
    else:
        try:
            with Path(log).open("rb") as stream:
                found = read(stream)
        except OSError as error:
            raise MlapatchError(
                Exit.ENVIRONMENT,
                what="the log cannot be read",
                where=log,
                found=error.strerror or str(error),
                next="pass the file that holds the server's stdout and stderr, or - to read standard input",
            ) from None
    return Outcome(data=found.as_dict(), blocks=describe(found))


def read(stream: BinaryIO) -> Diagnosis:
    """The diagnosis of a whole stream."""
    from mlapatch.serve.diagnosis import diagnose as decide
    from mlapatch.serve.transcript import Transcript

    transcript = Transcript()
    while chunk := stream.read(CHUNK):
        transcript.feed(chunk)
    transcript.close()
    return decide(transcript)


def describe(found: Diagnosis) -> list[Pairs | Text]:
    """A diagnosis for people."""
    from mlapatch.serve.rules import load

    style = "bold red" if found.is_failure else "yellow" if found.verdict == "hazard" else "green"
    rows = [("phase", load().title(found.phase)), ("rank", found.rank or "-"), ("advice", found.advice)]
    if found.source:
        rows.append(("rule", f"{found.rule} ({found.source})"))
    blocks: list[Pairs | Text] = [Text([found.cause], style=style), Pairs(rows)]
    if found.lines:
        evidence = [f"  {line.number}: {text}" for line, text in zip(found.lines, found.evidence, strict=True)]
        blocks.append(Text(["evidence:", *evidence]))
    return blocks
