"""`apply auto`: which patch fits this GPU, SGLang and flashinfer best, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlapatch.assess import Assessment
from mlapatch.engine.judgement import Verdict
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit

#: Best first, each with the reason. Times: one H200, real server, bench/results.
PREFERENCE = (
    ("active-cast", "casts only the active slots, inside CUDA graphs too, with no host work a step"),
    ("gather-cast", "casts only the active slots; compact in eager mode"),
    ("fp8-plan", "flashinfer reads the FP8 pool itself"),
    ("fused-decode", "reads the FP8 slots itself: the fastest, with arithmetic of its own, measured on one GPU"),
)


@dataclass(frozen=True)
class Choice:
    """The patch that was picked, and a line that says why."""

    name: str
    why: str


def choose(found: Assessment) -> Choice:
    """The best patch that fits; one that is applied already stays. MlapatchError where none fits."""
    names = [(name, why) for name, why in PREFERENCE if name in found.judgements]
    verdicts = {name: found.judgements[name].verdict for name, _ in names}
    for name, why in names:
        if verdicts[name] is Verdict.APPLIED:
            return Choice(name, f"auto: {name} is applied already ({why})")
    for name, why in names:
        if verdicts[name] is Verdict.SUPERSEDED:
            return Choice(name, f"auto: {name} and its kind are superseded ({why})")
    for name, why in names:
        if verdicts[name] in (Verdict.APPLICABLE, Verdict.LOST):
            gpu = ", ".join(f"SM{sm}" for sm in found.machine.sms) or "any GPU"
            passed = [f"{other} is {verdicts[other]}" for other, _ in names if other != name]
            rest = f"; also looked at: {', '.join(passed)}" if passed else ""
            return Choice(name, f"auto: {name} for {gpu}, SGLang {found.target.version}: it {why}{rest}")
    by_reason: dict[str, list[str]] = {}
    for name, _ in names:
        by_reason.setdefault(f"{verdicts[name]}: {found.judgements[name].reason}", []).append(name)
    reasons = "; ".join(f"{', '.join(alike)}: {reason}" for reason, alike in by_reason.items())
    hard = {Verdict.EDITED: Exit.REFUSED, Verdict.UNSUPPORTED: Exit.ENVIRONMENT}
    code = hard.get(next(iter(verdicts.values()), Verdict.DRIFTED), Exit.DOES_NOT_FIT)
    raise MlapatchError(
        code,
        "no patch fits this SGLang",
        where=str(found.target.package),
        found=reasons,
        next=_next(found, [name for name, _ in names]),
    )


def _next(found: Assessment, names: Sequence[str]) -> str:
    """What to do about the best patch, where this install is to blame and not the release."""
    judgement = found.judgements[names[0]] if names else None
    if judgement is not None and judgement.verdict in (Verdict.DRIFTED, Verdict.AMBIGUOUS):
        file = found.files.get(found.catalogue.patches[names[0]].target)
        if judgement.next and (file is None or file.edited):
            return judgement.next
    return "mlapatch status; mlapatch check --release latest tells whether a newer SGLang is better off"
