"""`backends`: which attention backends can run a model on a GPU, with the rule that says so."""

from __future__ import annotations

from pathlib import Path

from packaging.version import InvalidVersion, Version

from mlapatch import model_config
from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.outcome import Block, Outcome, Pairs, Table, Text, Warn
from mlapatch.serve.backends import (
    CASTS,
    IN_KERNEL,
    NO,
    PACKED,
    Answer,
    answers,
    pinned_flashinfer,
    question,
    table_for,
)
from mlapatch.serve.server_options import dsa_prefix

#: At 512, 8,192 and 65,536 tokens, as bench/results has them (a test holds these to the run of README's table).
TPOT_MS = {"triton": (5.93, 7.71, 12.28), "active-cast": (5.37, 6.32, 11.26), "stock": (71.24, 71.94, 74.52)}


def backends(
    *,
    preset: str | None = None,
    model: Path | None = None,
    tp: int = 8,
    gpu: str | None = None,
    sm: int | None = None,
    release: str | None = None,
    flashinfer: str | None = None,
    kv_cache_dtype: str = "fp8_e4m3",
    sglang: Path | None = None,
    python: str | None = None,
) -> Outcome:
    """Judge every MLA backend; without `release` the installed SGLang's, without a GPU option this machine's."""
    if tp < 1:
        raise MlapatchError(Exit.USAGE, "--tp must be at least 1", found=str(tp), next="mlapatch backends --tp 8")
    version, fi, package = _versions(release, flashinfer, sglang, python)
    capability = _capability(gpu, sm)
    table, note = table_for(version)
    asked = question(
        model_config.read(model)[0] if model else model_config.preset(preset or "glm-5"),
        tp=tp,
        sm=capability,
        release=table,
        flashinfer=fi or pinned_flashinfer(version),
        wants=pinned_flashinfer(version),
        kv=kv_cache_dtype,
        prefix=dsa_prefix(str(version), package),
    )
    found = answers(asked)
    advice = _advice(found, asked.fp8, asked.dsa)
    head = [
        ("model", f"{asked.arch}, nope {asked.nope}, {asked.heads} heads a rank at tensor parallel {tp}"),
        ("GPU", f"SM{capability}"),
        ("sglang", str(version)),
        ("flashinfer", f"{asked.flashinfer}{'' if fi else ' (pinned by that release)'}"),
        ("KV", kv_cache_dtype),
    ]
    rows = [(a.backend, a.can, a.fp8, a.why, a.source) for a in found]
    blocks: list[Block] = [Warn(note)] if note else []
    blocks += [Pairs(head), Table(("backend", "can", "FP8 KV", "rule", "source"), rows), Text(advice)]
    data: dict[str, object] = {
        "model": {"arch": asked.arch, "nope": asked.nope, "heads_per_rank": asked.heads, "dsa": asked.dsa},
        "sm": capability,
        "release": str(version),
        "rules_of": table,
        "flashinfer": str(asked.flashinfer),
        "kv_cache_dtype": kv_cache_dtype,
        "backends": [answer.as_dict() for answer in found],
        "patch_needed": not any(a.fp8 in (IN_KERNEL, PACKED) and a.can != NO for a in found) if asked.fp8 else False,
        "advice": list(advice),
    }
    return Outcome(data=data, blocks=blocks)


def _advice(found: list[Answer], fp8: bool, dsa: bool) -> list[str]:
    """Plainly: is a patch needed, and what does doing without one cost."""
    if not fp8:
        return ["No patch is needed: the KV pool is not FP8, so nothing is cast. It holds half as many tokens."]
    able = {a.backend: a for a in found if a.can != NO}
    ways = [name for name, a in able.items() if a.fp8 in (IN_KERNEL, PACKED)]
    lines = []
    if ways:
        lines.append(f"No patch is needed with --attention-backend {' or '.join(ways)}: it reads FP8 in its kernel.")
    if "triton" in ways:
        triton, patched, stock = (" / ".join(f"{ms:.2f}" for ms in TPOT_MS[way]) for way in TPOT_MS)
        lines.append(
            f"What triton costs: on one H200 (SGLang 0.5.15.post1, GLM-5 shape) {triton} ms a token at 512 / 8,192 / "
            f"65,536 tokens, where flashinfer with active-cast took {patched} and stock flashinfer {stock}."
        )
    if "flashmla" in ways:
        lines.append("What flashmla costs: about 0.4 ms a step for its unfused FP8 write (sgl-project/sglang#35291).")
    if any(a.fp8 == PACKED for a in able.values()):
        lines.append("The DSA backend attends sparsely, as the model was trained to; the dense ones read every token.")
    if "flashinfer" in able and able["flashinfer"].fp8 == CASTS:
        lines.append("With --attention-backend flashinfer a patch is needed: mlapatch apply auto.")
    if dsa and any(name not in ("nsa", "dsa") for name in able):
        lines.append(
            "On this DSA model a dense backend also needs both DSA backends trtllm (scripts/run_tp8_cds16.sh)."
        )
    return lines or ["No backend of this release can run this model on this GPU with this KV dtype."]


def _versions(
    release: str | None, flashinfer: str | None, sglang: Path | None, python: str | None
) -> tuple[Version, Version | None, Path | None]:
    """The release, its flashinfer where one is beside it or given, and the package where it is installed."""
    given = _version(flashinfer, "--flashinfer") if flashinfer else None
    if release:
        return _version(release, "--release"), given, None
    from mlapatch.install.facts import flashinfer_of
    from mlapatch.install.target import find_target

    target = find_target(sglang, python)
    if target.version is None:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "the version of this SGLang is unknown",
            where=str(target.package),
            next="--release 0.5.23",
        )
    beside = flashinfer_of(target)
    return target.version, given or (beside.version if beside else None), target.package


def _version(text: str, option: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise MlapatchError(
            Exit.USAGE, f"{option} is no version", found=text, next="mlapatch backends --release 0.5.23"
        ) from None


def _capability(gpu: str | None, sm: int | None) -> int:
    from mlapatch.measure.gpus import stand_in

    if given := stand_in(gpu, sm):
        return given[0]
    from mlapatch.install.facts import detected_sms

    found = detected_sms()
    if not found:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "no GPU was found here",
            next="mlapatch backends --gpu rtx-pro-6000, or --sm 120, stands in for one",
        )
    return found[0]
