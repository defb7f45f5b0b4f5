"""One install of SGLang, driven through the real command line, and the proof of what it left alone."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tests.cli.conftest import Done, process
from tests.corpus import BACKEND, Corpus
from tests.install.local_index import find_uv
from tests.reliability.figures import Figure, Setting

VERSION = "0.5.9"
FLASHINFER_BACKEND = BACKEND.removeprefix("sglang/")
Trial: TypeAlias = tuple[str, Callable[[], None]]
"""A name and what must not raise."""


class NotHere(Exception):
    """A kind that this machine cannot try, and why."""


@dataclass(frozen=True)
class Kind:
    """A row of the table. `quick`: the test suite tries it, too."""

    label: str
    trials: Callable[[Bench], Iterable[Trial]]
    quick: bool = False


@dataclass(frozen=True)
class Bench:
    """Where one kind is tried: a folder of its own, the wheel, and the programs that install it."""

    corpus: Corpus
    folder: Path
    thorough: bool
    patches: tuple[str, ...] = ("gather-cast",)

    @property
    def uv(self) -> str:
        found = find_uv()
        if found is None:
            raise NotHere("uv is not installed")
        return found

    @property
    def wheel(self) -> Path:
        """The release's whole wheel, as the index has it."""
        self.corpus.wheel_dir(VERSION)
        found = sorted((self.corpus.root / "wheels").glob(f"*/sglang-{VERSION}-*.whl"))
        if found:
            return found[0]
        kept = self.folder / f"sglang-{VERSION}-py3-none-any.whl"  # unpacked long ago, and the wheel was not kept
        shutil.make_archive(str(kept.with_suffix("")), "zip", self.corpus.wheel_dir(VERSION))
        return kept.with_suffix(".zip").rename(kept)

    def small(self, name: str) -> Path:
        """A site-packages with a few of SGLang's real files and its whole dist-info."""
        return self.corpus.install_tree(VERSION, self.folder / name)

    def environment(self, name: str) -> Path:
        """A new virtual environment of this interpreter."""
        command([sys.executable, "-m", "venv", "--without-pip", self.folder / name])
        return self.folder / name


def campaign_of(kinds: Iterable[Kind], part: str, setting: Setting) -> Iterator[Figure]:
    """Try each kind (without `thorough` the quick ones); what the machine cannot try is said and leaves no row."""
    for number, kind in enumerate(kinds):
        if not (setting.thorough or kind.quick):
            continue
        folder = setting.work / f"{part}-{number}"
        folder.mkdir()
        tried, failures = 0, []
        try:
            for name, trial in kind.trials(Bench(setting.corpus, folder, setting.thorough)):
                tried += 1
                try:
                    trial()
                except (AssertionError, OSError, subprocess.SubprocessError, ValueError) as error:
                    failures.append(f"{name}: {type(error).__name__}: {str(error)[:600]}")
        except NotHere as reason:
            print(f"not tried: {kind.label}: {reason}", file=sys.stderr)
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            tried += 1
            failures.append(f"could not be set up: {str(error)[:600]}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if tried:
            yield Figure(part, kind.label, tried, tried - len(failures), tuple(failures[:10]))


def command(arguments: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a program of somebody else's; its words where it fails."""
    done = subprocess.run(
        [str(a) for a in arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{' '.join(map(str, arguments))[:200]}: {done.stderr[-500:]}"
    return done.stdout


def fingerprint(folders: Iterable[Path]) -> dict[str, tuple[str, int, int, int]]:
    """Every file below (links are not followed): content, time, inode and mode. mlapatch's own state does not count."""
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
            if path.is_symlink():
                found[str(path)] = (str(path.readlink()), 0, path.lstat().st_ino, 0)
            elif path.is_file() and ".mlapatch" not in path.parts:
                about = path.stat()
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                found[str(path)] = (content, about.st_mtime_ns, about.st_ino, about.st_mode)
    return found


def without_bytecode(found: dict[str, tuple[str, int, int, int]]) -> dict[str, tuple[str, int, int, int]]:
    """What an import does not add to."""
    return {path: about for path, about in found.items() if "__pycache__" not in path}


@dataclass(frozen=True)
class Install:
    """One SGLang: how mlapatch is aimed at it, who imports it, and the places that share its bytes.

    `package` is the folder as an interpreter sees it. `state` is what `status` must say of the file before.
    """

    package: Path
    aim: tuple[str | Path, ...]
    kind: str
    python: Path | None = None
    shared: tuple[Path, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    state: str = "pristine"
    cwd: Path | None = None
    run_by: str = sys.executable

    @property
    def file(self) -> Path:
        return self.package / FLASHINFER_BACKEND

    def __call__(self, verb: str, *arguments: str | Path) -> Done:
        return process(verb, *arguments, *self.aim, env=dict(self.env), cwd=self.cwd, python=self.run_by)

    def ok(self, verb: str, *arguments: str | Path) -> Done:
        done = self(verb, *arguments)
        assert done.code == 0, f"{verb} {arguments}: exit {done.code}: {done.err[-600:]}"
        return done

    def refuses(self, *arguments: str, code: int, words: Iterable[str]) -> None:
        """A refusal that says what, where, expected or found, and the next command; no byte and no file is changed."""
        before = fingerprint([self.package])
        done = self(*arguments)
        assert done.code == code, f"{arguments}: exit {done.code}, not {code}: {done.err[-600:]}"
        for word in ("error: ", "  where: ", "  found: ", "  next: ", *words):
            assert word in done.err, f"{arguments}: {word!r} is not in {done.err[-900:]!r}"
        assert fingerprint([self.package]) == before, f"{arguments} changed something"
        assert not list(self.package.parent.rglob("*.mlapatch-tmp")), "a temporary file stays"

    def facts(self, name: str) -> tuple[str, str, str]:
        """Kind of install, state of the file and verdict, as `status` says."""
        said = self.ok("status", "--json").json
        state = next(t["state"] for t in said["targets"] if t["path"] == FLASHINFER_BACKEND)
        verdict = next(p["verdict"] for p in said["patches"] if p["name"] == name)
        return said["sglang"]["install"], state, verdict

    def story(self, name: str, *, guard: Path | None = None) -> None:
        """status, apply, status, the interpreter's own import, the guard, revert: and everything is as it was."""
        before, shared = self.file.read_bytes(), fingerprint(self.shared)
        around = without_bytecode(fingerprint([self.package]))
        mode = self.file.stat().st_mode
        found = self.facts(name)
        assert found == (self.kind, self.state, "applicable"), f"status before: {found}"
        if guard:
            self.ok("guard", "record", "--file", guard)
        self.ok("apply", name)
        patched = self.file.read_bytes()
        assert patched != before, "apply changed nothing"
        assert not self.file.is_symlink(), "written through a link"
        state = "patched" if self.state == "pristine" else self.state
        found = self.facts(name)
        assert found == (self.kind, state, "applied"), f"status after apply: {found}"
        if self.python:
            self.proves_that_it_runs(name, patched)
        if guard:
            self.ok("guard", "check", "--file", guard)
        self.ok("revert")
        assert self.file.read_bytes() == before, "revert left other bytes"
        assert self.file.stat().st_mode == mode, "the mode is another"
        mine = str(self.file)
        after = without_bytecode(fingerprint([self.package]))
        others = {path for path in {*around, *after} - {mine} if around.get(path) != after.get(path)}
        assert not others, f"other files changed: {sorted(others)[:3]}"
        touched = {path for path, about in fingerprint(self.shared).items() if shared.get(path) != about}
        gone = shared.keys() - fingerprint(self.shared).keys()
        assert not touched | gone, f"shared bytes changed: {sorted(touched | gone)[:3]}"
        if self.python:
            assert imported(self.python, self.env, self.cwd) == "", "the patched code still runs after revert"

    def proves_that_it_runs(self, name: str, patched: bytes) -> None:
        said = imported(self.python or Path(sys.executable), self.env, self.cwd)
        digest = hashlib.sha256(patched).hexdigest()
        assert f"mlapatch: {name} active in" in said, f"the import ran other code: {said[-300:]!r}"
        assert f"sha256={digest}" in said, f"the import ran another file: {said[-300:]!r}"


_IMPORT = r"""
import importlib.machinery, importlib.util, logging, sys, types

class Anything(type):
    # What a server has and this environment lacks: any attribute, item, call, decorator or base class.
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})
    def __call__(cls, *args, **kwargs):
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else Anything("made", (), {})
    def __getitem__(cls, item):
        return cls
    __or__ = __ror__ = lambda cls, other: cls

class Module(types.ModuleType):
    __path__, __version__ = [], "3.5.0"
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

class Elsewhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("sglang", "torch", "triton", "flashinfer"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Module(spec.name)
    def exec_module(self, module):
        pass

logging.basicConfig(level=logging.INFO, stream=sys.stdout)
package = importlib.util.find_spec("sglang").submodule_search_locations[0]
name = "sglang.srt.layers.attention.flashinfer_mla_backend"
spec = importlib.util.spec_from_file_location(name, package + "/srt/layers/attention/flashinfer_mla_backend.py")
sys.meta_path.insert(0, Elsewhere())
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
assert module.FlashInferMLAAttnBackend.forward_decode
"""


def imported(python: Path, env: Mapping[str, str], cwd: Path | None = None) -> str:
    """What the backend's module logs of itself when an interpreter imports it, by the machinery that finds a .pyc."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), "-c", _IMPORT],
        capture_output=True,
        text=True,
        env={**environment, **env},
        cwd=cwd,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, f"the import fails: {done.stderr[-400:]}"
    return "".join(line for line in done.stdout.splitlines(keepends=True) if "mlapatch: " in line)


def compile_unchecked(python: Path, package: Path, env: Mapping[str, str] | None = None) -> None:
    """Compiled files that never look at their source again, as some images are built with."""
    mode = ("--invalidation-mode", "unchecked-hash")
    folder = package / "srt" / "layers" / "attention"
    command([python, "-m", "compileall", "-q", "-f", *mode, folder], env=env)
