"""What will be started: a script with its settings, or a command of the user's own, and what it tells SGLang."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlapatch.errors import MlapatchError, NoSglangError
from mlapatch.exits import Exit
from mlapatch.serve import redact
from mlapatch.serve.command import Command, is_python, venv_python
from mlapatch.serve.gpu_state import GpuState
from mlapatch.serve.preflight import PatchFacts
from mlapatch.serve.ranks import Layout
from mlapatch.serve.server_options import ServerOptions

DRY_RUN = "MLAPATCH_DRY_RUN"
"""A script that knows this variable prints its command, one argument a line, and starts nothing."""


_WRONG_USAGE = 2  # as bash, argparse and typer end


@dataclass(frozen=True)
class Plan:
    """What will be run, and what is known of it."""

    command: list[str]
    environment: dict[str, str]
    options: ServerOptions
    facts: PatchFacts | None
    said: Command

    @property
    def applied(self) -> list[str]:
        """The patches in the SGLang that it runs, by name."""
        return sorted({name for file in self.facts.files for name in file.patches}) if self.facts else []

    @property
    def name(self) -> str:
        """For a server that was not given one."""
        return "+".join(self.applied) or ("stock" if self.facts else "server")


Facts = Callable[[str | None], PatchFacts]
"""What is known of the SGLang that an interpreter (None: the default one) would import."""


def of_command(
    command: Sequence[str], *, facts: Facts, chosen: bool, sglang: bool = False, required: bool = False
) -> Plan:
    """A command of the user's own.

    Its SGLang is looked at where the user chose one, or else where the command names its Python and that has one.
    `sglang`: the user chose it by its path. `required`: patches are, so that an SGLang there must be.
    """
    if not command:
        raise MlapatchError(Exit.USAGE, "launch --command needs a command", next="mlapatch launch --command -- CMD...")
    words, environment = list(command), dict(os.environ)
    said = Command.of(words, environment)
    known: PatchFacts | None = None
    if not chosen and is_python(words[0]):
        try:
            known = facts(words[0])
        except MlapatchError as error:
            if required or error.exit is not Exit.ENVIRONMENT:
                raise
            why = f" ({error.found})" if error.found else ""
            refusal, none = f"{error.what}{why}" if said.program else "", isinstance(error, NoSglangError)
            said = replace(said, refusal=refusal, hint=error.next, none=none)
    elif chosen or required:
        known = facts(None)
    if known is not None and sglang:
        _import_from(known, environment)
    return Plan(words, environment, ServerOptions.of(words), known, said)


def of_script(path: Path, arguments: Sequence[str], *, facts: Facts, sglang: bool = False) -> Plan:
    """A start script; PYTHON names the interpreter that has SGLang, as run_tp8_cds16.sh reads it."""
    environment = dict(os.environ)
    if not path.is_file():
        raise MlapatchError(Exit.USAGE, "there is no such script", where=str(path), next="mlapatch launch SCRIPT")
    known = facts(None if sglang else environment.get("PYTHON"))
    if sglang:
        _import_from(known, environment)
    elif known.python:
        environment.setdefault("PYTHON", known.python)
    words = ["bash", str(path), *arguments]
    shown = _ask_script(path, words, environment)
    options = ServerOptions.of(shown if shown is not None else words)
    said = replace(Command.of(words, environment), whole=shown is not None)
    return Plan(words, environment, options, known, said)


def _import_from(known: PatchFacts, environment: dict[str, str]) -> None:
    """Make the server import the SGLang that was chosen by its path: through its own venv, or PYTHONPATH."""
    if known.package is None:
        return
    site = known.package.parent
    if own := venv_python(site):
        environment.setdefault("PYTHON", str(own))
    else:
        environment.setdefault("PYTHON", known.python or "python3")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), environment.get("PYTHONPATH"))))


def _ask_script(path: Path, words: list[str], environment: Mapping[str, str]) -> list[str] | None:
    """The server command that a script would run, where the script can say so."""
    try:
        if DRY_RUN not in path.read_text("utf-8", "replace"):
            return None
    except OSError as error:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "the script cannot be read",
            where=str(path),
            found=str(error.strerror),
            next="mlapatch launch SCRIPT with one that this user may read",
        ) from None
    done = subprocess.run(words, env={**environment, DRY_RUN: "1"}, capture_output=True, text=True, check=False)
    if done.returncode == _WRONG_USAGE and any(option in done.stderr for option in _options_in(words)):
        raise MlapatchError(
            Exit.USAGE,
            "the script refuses an argument",
            where=str(path),
            found=done.stderr.strip(),
            next="correct what stands after --: mlapatch launch [SCRIPT] -- ARGS",
        )
    if done.returncode != 0:
        raise MlapatchError(
            Exit.ENVIRONMENT,
            "the script refuses its settings",
            where=str(path),
            found=done.stderr.strip(),
            next=f"set what it asks for; {path} explains its settings at its head",
        )
    return done.stdout.splitlines()


def _options_in(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]


def set_up(plan: Plan, gpus: Sequence[GpuState] | None, name: str) -> dict[str, Any]:
    """What a kept launch was done with: the command as the run record has it, and what it says. No secrets."""
    given, layout = plan.options.given, Layout.of(plan.options)
    hidden = {option: redact.HIDDEN for option in given if redact.is_secret_name(option)}
    values = (*redact.secrets(plan.command, plan.environment), *(given[option] for option in hidden if given[option]))
    server: dict[str, Any] = {"tp": layout.tp}
    server |= {"model": redact.text(plan.options.text("model-path"), values)} if "model-path" in given else {}
    server |= {"gpu": ", ".join(sorted({gpu.name for gpu in gpus})), "gpus": len(gpus)} if gpus else {}
    server |= {"node": layout.where} if layout.where else {}
    setup: dict[str, Any] = {"name": name, "command": redact.command(plan.command, plan.environment), "server": server}
    setup["options"] = {option: redact.text(value, values) or True for option, value in given.items()} | hidden
    facts = plan.facts
    if facts is None:
        return setup | {"patches": {"unknown": "the command does not say which SGLang it runs"}}
    files = {file.path.name: file.sha256 for file in facts.files}
    setup |= {"sglang": facts.sglang, "flashinfer": facts.flashinfer}
    return setup | {"patches": {"applied": plan.applied or ["none"], "digests": dict(facts.digests), "files": files}}
