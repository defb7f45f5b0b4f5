"""What a diagnosis is, and the values that its texts may use."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlapatch.serve.log_stream import Line
from mlapatch.serve.transcript import Transcript

FAILED, UNHEALTHY, HAZARD = "failed", "unhealthy", "hazard"
RUNNING, READY_VERDICT, STOPPED, EMPTY = "running", "ready", "stopped", "empty"
_EVIDENCE_CAP = 600


@dataclass(frozen=True)
class Ending:
    """What the process table said, for `launch`: which process ended and how."""

    process: str
    code: int | None
    rank: str | None = None


@dataclass(frozen=True)
class Silence:
    """No new line for some time although nothing died, for `launch`."""

    seconds: float
    pid: int
    gpu_percent: int | None = None
    compilers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """A cause with its evidence.

    `verdict` says whether anything failed at all; `known` is False where no rule decided.
    """

    verdict: str
    cause: str
    phase: str
    advice: str
    rank: str | None = None
    rule: str = ""
    source: str = ""
    case: int | None = None
    known: bool = True
    lines: tuple[Line, ...] = ()

    @property
    def is_failure(self) -> bool:
        """Whether the server failed, as against healthy, starting or stopped."""
        return self.verdict in (FAILED, UNHEALTHY)

    @property
    def evidence(self) -> list[str]:
        """The lines that decided, in the log's order."""
        return [line.shown[:_EVIDENCE_CAP] for line in self.lines]

    def as_dict(self) -> dict[str, object]:
        """The contract of `diagnose --json`, and more."""
        return {
            "cause": self.cause,
            "phase": self.phase,
            "rank": self.rank,
            "evidence": self.evidence,
            "advice": self.advice,
            "verdict": self.verdict,
            "rule": self.rule,
            "known": self.known,
            "source": self.source,
            "line_numbers": [line.number for line in self.lines],
        }


def common_values(log: Transcript, prefix: str | None, rank: str | None, phase: str) -> dict[str, str]:
    """What every text may use: facts of the log and of the rank, and numbers derived from them."""
    state = log.states.get(prefix)
    values = dict(log.facts) | (state.facts if state else {}) | log.health_text()
    values["phase"] = log.book.title(phase)
    values["who"], values["whom"] = (f"Rank {rank}", f"rank {rank}") if rank else ("The server", "the server")
    return values


def derived(values: dict[str, str]) -> dict[str, str]:
    """The values with what follows from them: the weights' share of the GPU, and a lower --mem-fraction-static."""
    free, weights = _number(values.get("free_before_weights")), _number(values.get("weights_gb"))
    if free and weights:
        values["fraction_of_weights"] = f"{weights / free:.2f}"
    fraction, total = _number(values.get("mem_fraction")), _number(values.get("total")) or free
    wanted = re.fullmatch(r"([\d.]+) ([KMG])iB", values.get("wanted", ""))
    if fraction and total and wanted:
        gib = float(wanted[1]) * {"K": 2**-20, "M": 2**-10, "G": 1.0}[wanted[2]]
        lower = fraction - (gib + 1.0) / total  # what was missing, and 1 GiB to spare
        if lower > 0:
            values["lower_fraction"] = f"{int(lower * 100) / 100:.2f}"
    return values


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
