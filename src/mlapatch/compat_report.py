"""The compat table: for terminals and pipes as blocks, for a repository as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

from mlapatch import __version__
from mlapatch.catalogue import Catalogue
from mlapatch.compat import Row
from mlapatch.engine.judgement import Judgement, Verdict
from mlapatch.engine.patch import Patch
from mlapatch.outcome import Block, Table, Text

_SILENT = (Verdict.APPLICABLE, Verdict.APPLIED)
_NUMBERS = re.compile(r"\d+(?:\.\w+)*")


def blocks(rows: Sequence[Row], patches: Sequence[Patch], sms: tuple[int, ...]) -> list[Block]:
    """A table with a line per subject, then each reason once, with the releases that it is about."""
    columns = ("release", "sha256", *(patch.name for patch in patches))
    table = Table(columns, [(row.subject.name, row.sha256[:12], *_verdicts(row)) for row in rows])
    shown: list[Block] = [table]
    if lines := [*_reasons(rows), *_not_judged(rows, patches, sms)]:
        shown.append(Text(lines))
    return shown


def markdown(
    rows: Sequence[Row], patches: Sequence[Patch], catalogue: Catalogue, sms: tuple[int, ...], *, today: str = ""
) -> str:
    """The table as a page, with its date and the catalogue's digest."""
    today = today or datetime.now(timezone.utc).strftime("%Y-%m-%d")
    head = ["release", "sha256 of the file", *(patch.name for patch in patches)]
    lines = [
        "# Which patches fit which SGLang",
        "",
        f"Written on {today}.",
        "",
        f"By `mlapatch check --all-releases --markdown`, mlapatch {__version__}, catalogue `{catalogue.digest[:16]}`.",
        "`applicable`: the patch was applied to that file, the result was parsed again and compiled, and its",
        "postconditions hold.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for row in reversed(rows):
        lines.append("| " + " | ".join([row.subject.name, f"`{row.sha256[:12]}`", *_verdicts(row)]) + " |")
    notes = [*_reasons(rows), *_not_judged(rows, patches, sms)]
    if notes:
        lines += ["", "## Reasons", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _verdicts(row: Row) -> list[str]:
    return [str(judgement.verdict) for judgement in row.judgements]


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Each reason once; those that differ in version numbers only count as one, told with the span of each number."""
    groups: dict[tuple[str, Verdict, str], list[tuple[Row, Judgement]]] = {}
    for row in rows:
        for judgement in row.judgements:
            if judgement.verdict not in _SILENT:
                key = (judgement.patch, judgement.verdict, _NUMBERS.sub("#", judgement.reason))
                groups.setdefault(key, []).append((row, judgement))
    lines = []
    for (name, verdict, _), members in groups.items():
        last = members[-1][1]
        reason = _spanned([judgement.reason for _, judgement in members])
        lines.append(f"{name} on {_span(rows, [row for row, _ in members])}: {verdict}: {reason}")
        if last.next:
            lines[-1] += f" (next: {last.next})"
    return lines


def _spanned(reasons: Sequence[str]) -> str:
    """One reason for all that are equal but for their numbers: `flashinfer 0.6.3 to 0.6.12 is pinned`."""
    numbers = [_NUMBERS.findall(reason) for reason in reasons]
    spans = iter([dict.fromkeys(column) for column in zip(*numbers, strict=True)])

    def span(_: re.Match[str]) -> str:
        first, *rest = next(spans)
        return f"{first} to {rest[-1]}" if rest else first

    return _NUMBERS.sub(span, reasons[-1])


def _span(rows: Sequence[Row], members: Sequence[Row]) -> str:
    """`0.5.9, 0.5.11 to 0.5.23 (14 releases)`: what follows each other in the table is one run."""
    runs: list[list[str]] = []
    last = -2
    for place, row in enumerate(rows):
        if any(row is member for member in members):
            if place == last + 1:
                runs[-1].append(row.subject.name)
            else:
                runs.append([row.subject.name])
            last = place
    text = ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"{text} ({len(members)} releases)" if len(members) > 1 else text


def _not_judged(rows: Sequence[Row], patches: Iterable[Patch], sms: tuple[int, ...]) -> list[str]:
    """What a verdict on a release leaves open."""
    if sms or all(row.subject.name.startswith("installed ") for row in rows):
        return []
    return [
        f"{patch.name} needs {' or '.join(f'SM{sm}' for sm in patch.requires.sm)} too: "
        "a release is no machine, so no GPU was judged (--gpu NAME or --sm NN stands in for one)"
        for patch in patches
        if patch.requires.sm
    ]
