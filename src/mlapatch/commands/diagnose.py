"""`diagnose`: why a server log ended as it did."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.outcome import Block, Outcome, Pairs, Text

if TYPE_CHECKING:
    from mlapatch.serve.ranks import RankReport
    from mlapatch.serve.transcript import Transcript
    from mlapatch.serve.verdicts import Diagnosis

CHUNK = 1 << 20


def diagnose(
    *,
    log: str,
    ranks: bool = False,
    sglang: Path | None = None,
    python: str | None = None,
    patches: Sequence[Path] | None = None,
) -> Outcome:
    """Read a log (`-` is standard input) in bounded memory and name the first failing rank's cause.

    Where `launch` kept a run record beside the log, it says what the log may hide: the attention backend.
    The exit code is 0 whenever the log could be read: that a server failed is the answer, not an error. With `ranks` it
    is 1 unless every rank of the log's node has said that it runs the patched bytes of the SGLang installed here.
    """
    from mlapatch.serve.diagnosis import diagnose as decide
    from mlapatch.serve.ranks import listed, report

    transcript = _read(log)
    found, heard = decide(transcript), report(transcript)
    blocks: list[Block] = [*describe(found)]
    rows = [("ranks", f"{listed(heard.expected)}{_of_node(heard)}")] if heard.files or ranks else []
    blocks += [Pairs([*rows, *(("runs", file.text) for file in heard.files)])] if rows else []
    data: dict[str, object] = {**found.as_dict(), "ranks": heard.as_dict()}
    if not ranks:
        return Outcome(data=data, blocks=blocks)
    problem = _rank_problem(heard, sglang, python, patches)
    data["ranks_problem"] = problem
    said = problem or "every rank of this log runs the bytes that are installed here"
    blocks.append(Text([said], style="bold red" if problem else "green"))
    return Outcome(Exit.FOUND if problem else Exit.OK, data, blocks)


def _of_node(heard: RankReport) -> str:
    return f", {heard.layout.where}" if heard.layout.where else ""


def _rank_problem(heard: RankReport, sglang: Path | None, python: str | None, patches: Sequence[Path] | None) -> str:
    from mlapatch.commands.launch import patch_facts
    from mlapatch.serve.ready import rank_problem

    files = patch_facts(sglang, python, patches, (), None).files
    if not files:
        return "no patch is applied in the SGLang that is installed here: nothing to compare with"
    return rank_problem(heard, files)


def _read(log: str) -> Transcript:
    if log == "-":
        return _transcript(sys.stdin.buffer)
    from mlapatch.serve.run_record import known_of

    try:
        with Path(log).open("rb") as stream:
            return _transcript(stream, known_of(Path(log)))
    except OSError as error:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            what="the log cannot be read",
            where=log,
            found=error.strerror or str(error),
            next="pass the file that holds the server's stdout and stderr, or - to read standard input",
        ) from None


def _transcript(stream: BinaryIO, known: Mapping[str, str] | None = None) -> Transcript:
    from mlapatch.serve.transcript import Transcript

    transcript = Transcript(known=known)
    while chunk := stream.read(CHUNK):
        transcript.feed(chunk)
    transcript.close()
    return transcript


def read(stream: BinaryIO) -> Diagnosis:
    """The diagnosis of a whole stream."""
    from mlapatch.serve.diagnosis import diagnose as decide

    return decide(_transcript(stream))


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
