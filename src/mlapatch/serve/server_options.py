"""The server's own command line, as far as a launcher must know it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

_ALIASES = {
    "model": "model-path",
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
    "pipeline-parallel-size": "pp-size",
    "nsa-prefill-backend": "dsa-prefill-backend",
    "nsa-decode-backend": "dsa-decode-backend",
}
_GRAPHS_OFF = ("disable-cuda-graph", "cuda-graph-backend-decode")


@dataclass(frozen=True)
class ServerOptions:
    """Options by their SGLang name without dashes; flags have the value ''."""

    given: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, command: Sequence[str]) -> ServerOptions:
        """Read `--name value`, `--name=value` and flags; the last one wins, as in argparse."""
        return cls(dict(_pairs(command)))

    def text(self, name: str, default: str = "") -> str:
        """An option's value."""
        return self.given.get(name, default)

    def number(self, name: str, default: int | None = None) -> int | None:
        """An option's whole number; the default where it is absent or no number."""
        try:
            return int(self.given[name])
        except (KeyError, ValueError):
            return default

    @property
    def host(self) -> str:
        """An address at which a server that binds to `--host` can be reached from here."""
        host = self.text("host", "127.0.0.1")
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104

    @property
    def port(self) -> int | None:
        """The HTTP port, where the command line says one."""
        return self.number("port")

    @property
    def facts(self) -> dict[str, str]:
        """What a diagnosis may use where the log does not say it (a high --log-level hides the server's arguments)."""
        backend = self.text("attention-backend")
        return {"attention_backend": backend} if backend else {}

    @property
    def attention_backends(self) -> tuple[str, str]:
        """The attention backends of prefill and decode, '' where the release chooses."""
        both = self.text("attention-backend")
        return self.text("prefill-attention-backend", both), self.text("decode-attention-backend", both)

    @property
    def dsa_backends(self) -> tuple[str, str]:
        """The prefill and decode NSA/DSA backends, '' where not given."""
        return self.text("dsa-prefill-backend"), self.text("dsa-decode-backend")

    @property
    def graphs_disabled(self) -> str:
        """The option that switches CUDA graphs off for decode, '' where none does."""
        for name in _GRAPHS_OFF:
            if name in self.given and self.given[name] in ("", "disabled"):
                return f"--{name}"
        return ""


def _pairs(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    words = list(command)
    for at, word in enumerate(words):
        if not word.startswith("--") or word == "--":
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            following = words[at + 1] if at + 1 < len(words) else "--"
            value = "" if following.startswith("--") else following
        yield _ALIASES.get(name, name), value


def dsa_prefix(release: str, package: Path | None = None) -> str:
    """`nsa` or `dsa`: how a release spells its flags, `--dsa-prefill-backend` and the like.

    Read from the package's own arguments (both names stand there where one is deprecated: the field has the new one);
    without a package by release: renamed in 0.5.13.
    """
    if package is not None:
        files = [package / "srt/server_args.py", *sorted((package / "srt/arg_groups").glob("**/*.py"))]
        for spelling in ("dsa", "nsa"):
            if any(f"{spelling}_prefill_backend" in _text(file) for file in files):
                return spelling
    try:
        return "nsa" if Version(release) < Version("0.5.13.dev0") else "dsa"
    except InvalidVersion:
        return "dsa"


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return ""
