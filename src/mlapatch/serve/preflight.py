"""What is checked before a server is started. A check is a function of the context; the list can be added to."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from mlapatch.exits import Exit
from mlapatch.jsontext import parsed_object
from mlapatch.serve.command import Command
from mlapatch.serve.gpu_state import GpuState
from mlapatch.serve.libraries import Missing
from mlapatch.serve.ports import listener
from mlapatch.serve.ranks import Layout
from mlapatch.serve.server_options import ServerOptions

OK, WARN, FAIL, SKIP = "ok", "warn", "fail", "skip"
_MODEL = "--model-path (MODEL_PATH) names the folder that holds the model's config.json"
_REQUIRED = "--force does not go past --require"
IDLE_BYTES = 1 << 30
"""What a GPU may hold and still count as idle: contexts of a driver, a display, a persistence daemon."""


@dataclass(frozen=True)
class Finding:
    """One check's answer. `exit` counts where state is `fail`; 4 cannot be forced, 5 can.

    `firm`: why --force does not go past this one all the same.
    """

    check: str
    state: str
    text: str
    exit: Exit = Exit.ENVIRONMENT
    next: str = ""
    firm: str = ""

    @property
    def forceable(self) -> bool:
        """Whether --force goes past it."""
        return self.exit is not Exit.REFUSED and not self.firm

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        found: dict[str, object] = {"check": self.check, "state": self.state, "text": self.text}
        if self.next:
            found["next"] = self.next
        return found | ({"exit": int(self.exit)} if self.state == FAIL else {})


@dataclass(frozen=True)
class PatchedFile:
    """A file that patches change: its path, the sha256 of its bytes, and the patches applied to it."""

    path: Path
    sha256: str
    patches: tuple[str, ...]


@dataclass(frozen=True)
class PatchFacts:
    """What `status` knows, given by the commands layer: this package knows no patches.

    `digests` are those of the patches in `files`, by name; `verdicts` holds (verdict, reason) by patch; `guard` is
    `clean`, `violated`, `unrecorded` or `none` (not checked), `guard_text` says what it found.
    """

    sglang: str = ""
    package: Path | None = None
    python: str = ""
    flashinfer: str = ""
    library_problems: tuple[str, ...] = ()
    missing: tuple[Missing, ...] = ()
    files: tuple[PatchedFile, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    verdicts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    guard: str = "none"
    guard_text: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Context:
    """Everything that a check may look at."""

    options: ServerOptions
    environment: Mapping[str, str]
    patches: PatchFacts | None = None
    gpus: Sequence[GpuState] | None = None
    page_size: int | None = None
    command: Command = field(default_factory=Command)

    @property
    def unseen(self) -> str:
        """Why nothing is known of the SGLang that will run, and so neither of patches nor of the guard."""
        said = self.command
        if said.refusal:
            return f"NOT looked at: {said.name} is {said.program}; {said.refusal}"
        if said.name and not said.program:
            return f"NOT looked at: there is no program {said.name}"
        which = f"{said.name or 'the command'} does not say which Python it uses"
        return f"NOT looked at: {which}; --python EXE or --sglang PATH name an SGLang to look at"

    def config(self) -> dict[str, Any] | None:
        """The model's config.json, or None where it is not on this machine."""
        try:
            return parsed_object((Path(self.options.text("model-path")) / "config.json").read_bytes())
        except (OSError, ValueError):
            return None


Check: TypeAlias = Callable[[Context], Iterable[Finding]]


def run_checks(context: Context, checks: Sequence[Check]) -> list[Finding]:
    """All findings, in order. Each check has at least one: one that cannot look says so (`skip`) and why."""
    return [finding for check in checks for finding in check(context)]


def refusal(findings: Sequence[Finding], force: bool) -> Exit | None:
    """With which code a start is refused; None where it is not."""
    failed = [finding for finding in findings if finding.state == FAIL]
    if any(finding.exit is Exit.REFUSED for finding in failed):
        return Exit.REFUSED  # local edits are never forced past
    return Exit.ENVIRONMENT if any(not (force and finding.forceable) for finding in failed) else None


def refused_because(findings: Sequence[Finding]) -> str:
    """Why it is refused, and whether --force helps; what cannot be forced comes first."""
    failed = [finding for finding in findings if finding.state == FAIL]
    first = min(failed, key=lambda finding: (finding.exit is not Exit.REFUSED, finding.forceable))
    force = "--force starts it all the same" if first.forceable else first.firm
    return f"{first.check}: {first.text}{f'; {force}' if force else ''}"


# ------------------------------------------------------------------------------------------------------------- checks
def command(context: Context) -> Iterable[Finding]:
    """What is to be started is there: the start itself would find out, but a dry run would not."""
    said = context.command
    if not said.name:
        return [Finding("command", SKIP, "nothing is to be started")]
    if said.program:
        return [Finding("command", OK, f"{said.name} is {said.program}" if said.name != said.program else said.name)]
    why = "is there, but this user may not run it" if Path(said.name).exists() else "is no program here"
    where = "" if "/" in said.name else ", or that its folder is on PATH"
    hint, firm = f"check the path and that it is executable{where}", "--force cannot start it either"
    return [Finding("command", FAIL, f"{said.name} {why}", next=hint, firm=firm)]


def target(context: Context) -> Iterable[Finding]:
    """Which SGLang would be started, and whether another one could be.

    A Python that cannot be asked, or names files that are not here, may be a shim (docker exec) with an SGLang.
    """
    facts, said = context.patches, context.command
    if facts is None:
        if said.refusal and said.none and said.starts_sglang:
            return [Finding("sglang", FAIL, f"{said.name} is {said.program}; {said.refusal}", next=said.hint)]
        return [Finding("sglang", SKIP, context.unseen)]
    if said.starts_sglang and facts.package is not None and not said.is_in(facts.package):
        text = f"SGLang {facts.sglang} in {facts.package} has no module {said.module}"
        return [Finding("sglang", FAIL, text, next=f"{said.name} -m sglang.launch_server")]
    found = [Finding("sglang", OK, f"{facts.sglang or 'unknown version'} in {facts.package}")]
    return found + [Finding("sglang", WARN, note) for note in facts.notes]


def patches(context: Context) -> Iterable[Finding]:
    """Patches as declared: every required one applied, none lost or half there."""
    facts = context.patches
    if facts is None:
        return [Finding("patches", SKIP, context.unseen)]
    found = []
    for name in facts.required:
        verdict, reason = facts.verdicts.get(name, ("unknown", "no such patch"))
        if verdict != "applied":
            text = f"{name} is required and is {verdict}: {reason}"
            found.append(Finding("patches", FAIL, text, next=f"mlapatch apply {name}", firm=_REQUIRED))
    applied = sorted({name for file in facts.files for name in file.patches})
    for name, (verdict, reason) in facts.verdicts.items():
        wrong = verdict in ("lost", "edited") or (verdict == "unsupported" and name in applied)
        if wrong and name not in facts.required:
            found.append(Finding("patches", FAIL, f"{name} is {verdict}: {reason}", next="mlapatch status"))
    text = f"applied: {', '.join(applied)}" if applied else "none applied: this starts stock SGLang"
    return found or [Finding("patches", OK if applied else WARN, text)]


def guard(context: Context) -> Iterable[Finding]:
    """Earlier local edits untouched."""
    facts = context.patches
    if facts is None:
        return [Finding("guard", SKIP, context.unseen)]
    if facts.guard == "none":
        return [Finding("guard", SKIP, "this start does not ask it")]
    if facts.guard == "clean":
        return [Finding("guard", OK, facts.guard_text or "earlier local edits are untouched")]
    hint = "mlapatch guard record" if facts.guard == "unrecorded" else "mlapatch guard check"
    return [Finding("guard", FAIL, facts.guard_text or f"guard is {facts.guard}", Exit.REFUSED, next=hint)]


def model(context: Context) -> Iterable[Finding]:
    """The model's folder and config.json can be read (startup failure 2 costs minutes otherwise)."""
    path = context.options.text("model-path")
    if not path:
        return [Finding("model", WARN, "the command names no --model-path")]
    folder = Path(path)
    if not folder.exists():
        looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
        if looks_local:
            text = f"{path} does not exist on this machine"
            return [Finding("model", FAIL, text, next="check the path; in Docker, the -v mounts")]
        return [Finding("model", WARN, f"{path} is not here; SGLang will take it for a Hugging Face name")]
    config = folder / "config.json"
    try:
        parsed_object(config.read_bytes())
    except OSError as error:
        return [Finding("model", FAIL, f"{config} cannot be read: {error.strerror or error}", next=_MODEL)]
    except ValueError as error:
        return [Finding("model", FAIL, f"{config} is no JSON: {error}", next=_MODEL)]
    return [Finding("model", OK, str(folder))]


def port(context: Context) -> Iterable[Finding]:
    """The HTTP port is free: SGLang itself finds out only after loading everything (startup failure 30)."""
    number = context.options.port
    if number is None:
        return [Finding("port", SKIP, "the command names no --port")]
    host = context.options.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does: TIME_WAIT is no owner
        try:
            probe.bind((host, number))
        except OSError as error:
            text = f"port {number} on {host}: {error.strerror}{_owner(number)}"
            return [Finding("port", FAIL, text, next="end that process, or choose another: --port, PORT")]
    return [Finding("port", OK, f"{number} is free")]


def _owner(number: int) -> str:
    holder = listener(number)
    return f"; held by pid {holder.pid} ({holder.name})" if holder else ""


def gpus(context: Context) -> Iterable[Finding]:
    """Enough GPUs, each idle: no foreign process, memory near 0."""
    if context.gpus is None:
        return [Finding("gpus", WARN, "no NVIDIA driver answers (NVML): nothing is known about the GPUs")]
    layout = Layout.of(context.options)
    wanted = len(layout.names)
    found = []
    if len(context.gpus) < wanted:
        who = f"{layout.where}, tensor parallel {layout.tp}," if layout.where else f"tensor parallel {layout.tp}"
        text = f"{who} needs {wanted} GPUs; {len(context.gpus)} are visible"
        found.append(Finding("gpus", FAIL, text, next="lower TP_SIZE, or check CUDA_VISIBLE_DEVICES"))
    for gpu in context.gpus[:wanted]:
        if gpu.pids or gpu.used > IDLE_BYTES:
            who = f" by {', '.join(map(_process_name, gpu.pids))}" if gpu.pids else ""
            text = f"GPU {gpu.index} is in use{who}: {gpu.used / 2**30:.1f} of {gpu.total / 2**30:.0f} GiB"
            found.append(Finding("gpus", FAIL, text, next="end that process, or choose others: CUDA_VISIBLE_DEVICES"))
    if not found:
        names = sorted({f"{gpu.name} (SM{gpu.sm})" for gpu in context.gpus[:wanted]})
        found.append(Finding("gpus", OK, f"{wanted} x {', '.join(names)}, idle"))
    return found


def _process_name(pid: int) -> str:
    try:
        return f"pid {pid} ({psutil.Process(pid).name()})"
    except psutil.Error:
        return f"pid {pid}"


def tools(context: Context) -> Iterable[Finding]:
    """What flashinfer needs to compile its kernels, and what NCCL needs of a container."""
    path = context.environment.get("PATH")
    found = []
    if shutil.which("ninja", path=path) is None:
        text = "ninja is not on PATH: a kernel that is not in a cache cannot be compiled"
        found.append(Finding("tools", WARN, text, next="pip install ninja, with the venv's bin folder on PATH"))
    cuda_home = context.environment.get("CUDA_HOME") or context.environment.get("CUDA_PATH") or "/usr/local/cuda"
    if cuda_home.startswith(":"):
        found.append(
            Finding("tools", WARN, f"CUDA_HOME begins with a colon: {cuda_home}", next="unset it, or correct it")
        )
    if shutil.which("nvcc", path=path) is None and not (Path(cuda_home) / "bin" / "nvcc").exists():
        text = f"no nvcc on PATH or in {cuda_home}: flashinfer can run only kernels that are already compiled"
        found.append(Finding("tools", WARN, text, next="use a -devel image or set CUDA_HOME"))
    if len(Layout.of(context.options).names) > 1:
        try:
            shared = shutil.disk_usage("/dev/shm").total  # noqa: S108 - NCCL's own place
        except OSError:
            shared = None
        if shared is not None and shared < 1 << 30:
            text = f"/dev/shm has {shared / 2**20:.0f} MiB: NCCL may fail between the ranks"  # noqa: S108
            found.append(Finding("tools", WARN, text, next="docker run --ipc=host or --shm-size=16g"))
    return found or [Finding("tools", OK, "ninja and nvcc are here")]


CHECKS: tuple[Check, ...] = (command, target, patches, guard, model, port, gpus, tools)
