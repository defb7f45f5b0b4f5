"""A log without a failure of its own: what it shows instead, or what the process table adds."""

from __future__ import annotations

from mlapatch.serve.log_stream import Line
from mlapatch.serve.rules import Template, fill
from mlapatch.serve.transcript import READY, WARM_UP, Transcript
from mlapatch.serve.verdicts import (
    EMPTY,
    FAILED,
    HAZARD,
    READY_VERDICT,
    RUNNING,
    STOPPED,
    UNHEALTHY,
    Diagnosis,
    Ending,
    Silence,
    common_values,
)


def ended(log: Transcript, ending: Ending) -> Diagnosis:
    """A process is gone and its log says nothing: how it ended, in the words of the rules for exit codes."""
    code = ending.code
    hints = {-9: "rank-killed", -11: "rank-segfault", -6: "rank-aborted"}
    rule = next((r for r in log.book.rules if code in hints and r.id == hints[code]), None)
    how = "ended" if code is None else f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    phase = log.phase(ending.rank) if ending.rank in log.states else log.server_phase()
    last = (log.last_line(ending.rank) if ending.rank else None) or log.last_line()
    values = common_values(log, ending.rank, ending.rank, phase) | {
        "process": ending.process,
        "ending": how,
        "hint": rule.advice if rule else "mlapatch does not guess.",
    }
    values |= {"last_line": last.shown} if last else {}
    template = log.book.specials["exited"]
    return Diagnosis(
        FAILED,
        fill(template.cause, values),
        phase,
        fill(template.advice, values),
        ending.rank,
        rule.id if rule else "exited",
        rule.source if rule else template.source,
        rule.case if rule else None,
        known=rule is not None,
        lines=(last,) if last else (),
    )


def silent(log: Transcript, silence: Silence) -> Diagnosis:
    """Nothing died and nothing moves: what that means in this phase."""
    phase = log.server_phase()
    compiler = log.book.specials["silent-compiler"] if silence.compilers else None
    template = compiler or log.book.silences[phase]
    last = log.last_line()
    values = common_values(log, None, None, phase) | {"seconds": f"{silence.seconds:.0f}", "pid": str(silence.pid)}
    values["compilers"] = ", ".join(silence.compilers)
    if silence.gpu_percent is not None:
        values["gpu"] = str(silence.gpu_percent)
    return Diagnosis(
        FAILED,
        fill(template.cause, values),
        phase,
        fill(template.advice, values),
        None,
        "silent-compiler" if compiler else f"silent-{phase}",
        template.source,
        template.case,
        lines=(last,) if last else (),
    )


def alive(log: Transcript) -> Diagnosis:
    """No failure: say what the log shows instead."""
    phase = log.server_phase()
    last = log.last_line()
    values = common_values(log, None, None, phase)
    values |= {"last_line": last.shown} if last else {}
    lines: list[Line] = [line for line in (log.states[None].phase_line, last) if line]
    name, verdict, case = "running", RUNNING, None
    if log.stopped is not None:
        name, verdict, lines = "stopped", STOPPED, [log.stopped]
    elif log.health_failed is not None and log.health_503:
        name, verdict, lines = "health-503", UNHEALTHY, [log.health_failed, *lines]
        scheduler = log.last_scheduler_line()
        values |= {"last_line": scheduler.shown} if scheduler else {}
    elif pool := _wrong_pool(log):
        name, verdict = pool, HAZARD
    elif phase == READY:
        name, verdict = "ready", READY_VERDICT
    elif phase == WARM_UP:
        name = "warming-up"
    elif not log.sglang_lines and log.states[None].phase is None and not log.ranks:
        name, verdict = "empty", EMPTY
    else:
        silence = log.book.silences[phase]
        values |= {"silent_advice": fill(silence.advice, {"pid": "PID"}), "suspicion": silence.suspicion}
        case = silence.case
    template: Template = log.book.specials[name]
    return Diagnosis(
        verdict,
        fill(template.cause, values),
        phase,
        fill(template.advice, values),
        None,
        name,
        template.source,
        template.case or case,
        lines=tuple(sorted(set(lines), key=lambda line: line.number)),
    )


def _wrong_pool(log: Transcript) -> str | None:
    """A dense backend on a DSA model's FP8 pool is right only where both DSA backends are trtllm."""
    facts = log.facts
    if facts.get("attention_backend") in (None, "nsa", "dsa") or facts.get("dsa_kv") != "fp8_e4m3":
        return None
    raw = [facts.get("dsa_prefill"), facts.get("dsa_decode")].count("trtllm")
    return ("packed-pool", "half-raw-pool", None)[raw]
