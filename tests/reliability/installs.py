"""Real installs: uv in each link mode, pip, editable, checkouts, other owners, odd places, and unreadable targets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from tests.cli.test_install_kinds import git
from tests.corpus import BACKEND
from tests.reliability._installing import (
    VERSION,
    Bench,
    Install,
    Kind,
    NotHere,
    Trial,
    campaign_of,
    command,
    compile_unchecked,
    fingerprint,
    imported,
)
from tests.reliability._leftovers import KINDS as LEFTOVERS
from tests.reliability._permissions import KINDS as PERMISSIONS
from tests.reliability._targets import KINDS as TARGETS
from tests.reliability.figures import Figure, Setting

PATCHES = ("gather-cast", "active-cast", "fused-decode")
_NO_SETTINGS = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}


def campaign(setting: Setting) -> Iterator[Figure]:
    """Every kind of install that is known to be out there."""
    yield from campaign_of((*KINDS, *PERMISSIONS, *LEFTOVERS, *TARGETS), "installs", setting)


def _site(environment: Path) -> Path:
    return next(environment.glob("lib/python3*/site-packages"))


def uv_modes(mode: str, bench: Bench) -> Iterator[Trial]:
    """Two environments share uv's cache: what is patched in one must reach neither the other nor the cache."""
    env = {"UV_CACHE_DIR": str(bench.folder / "cache"), "UV_LINK_MODE": mode, "UV_NO_CONFIG": "1"}
    installs = []
    for name in ("one", "two"):
        environment = bench.folder / name
        command([bench.uv, "venv", "--quiet", "--python", sys.executable, environment], env=env)
        install = [bench.uv, "pip", "install", "--quiet", "--no-deps", "--no-index", "--python"]
        command([*install, environment / "bin" / "python", bench.wheel], env=env)
        installs.append(environment)
    one, two = installs
    links = (_site(one) / BACKEND).is_symlink(), (_site(one) / BACKEND).stat().st_nlink > 1
    for patch, mine, other in zip(PATCHES, (one, two, one), (two, one, two), strict=True):
        shared = (_site(other) / "sglang", bench.folder / "cache")
        python = mine / "bin" / "python"
        here = Install(_site(mine) / "sglang", ("--python", python), "wheel", python, shared)
        yield f"{mode} {patch}", partial(here.story, patch, guard=bench.folder / f"{patch}.toml")
    # A clone is a file of its own, or, on a disk without reflinks, what uv falls back to: the page says which it was.
    expected = {"hardlink": (False, True), "symlink": (True, False), "copy": (False, False)}.get(mode, links)

    def linked() -> None:
        assert links == expected, f"uv made (symlink, hard link) {links}"

    yield f"{mode} is what was tried", linked


def pip(bench: Bench) -> Iterator[Trial]:
    environment = bench.environment("pip")
    python = environment / "bin" / "python"
    command([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", bench.wheel])
    here = Install(_site(environment) / "sglang", ("--python", python), "wheel", python)
    for patch in PATCHES:
        guard = bench.folder / f"{patch}.toml"
        yield patch, partial(here.story, patch, guard=guard)


def _checkout(bench: Bench, name: str = "a checkout") -> Path:
    """A repository of SGLang as upstream lays it out, small, that pip can install."""
    root = bench.folder / name
    (root / "python").mkdir(parents=True)
    shutil.move(bench.small(f"{name}-wheel") / "sglang", root / "python" / "sglang")
    (root / "python" / "sglang" / "version.py").write_text(f'__version__ = "{VERSION}"\n')
    (root / "python" / "sglang" / "_version.py").unlink(missing_ok=True)
    (root / "python" / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "sglang"\nversion = "{VERSION}"\n[tool.setuptools.packages.find]\ninclude = ["sglang*"]\n'
    )
    (root / ".gitignore").write_text("*.egg-info/\n__pycache__/\nbuild/\n")
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message=0.5.9")
    return root


def _dirty(root: Path) -> None:
    """Local edits that nobody committed: in the target, in another file, and a new file."""
    target = root / "python" / BACKEND
    target.write_bytes(target.read_bytes().replace(b"import torch\n", b"import torch  # ours\n", 1))
    arguments = root / "python" / "sglang" / "srt" / "server_args.py"
    arguments.write_bytes(arguments.read_bytes() + b"\n# ours, too\n")
    (root / "python" / "sglang" / "srt" / "local_kernel.py").write_text("OURS = 1\n")


def _keeps_git(here: Install, root: Path, patch: str, guard: Path | None = None) -> None:
    before = git(root, "status", "--porcelain"), git(root, "diff")
    here.story(patch, guard=guard)
    assert (git(root, "status", "--porcelain"), git(root, "diff")) == before, "git sees another tree"


def editable(tool: str, dirty: bool, bench: Bench) -> Iterator[Trial]:
    root = _checkout(bench)
    if dirty:
        _dirty(root)
    environment = bench.environment("venv")
    python = environment / "bin" / "python"
    install: list[str | Path]
    if tool == "uv":
        install = [bench.uv, "pip", "install", "--quiet", "--python", python]
    else:
        install = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
    command([*install, "--no-deps", "--editable", root / "python"])
    state = "edited" if dirty else "pristine"
    package = root / "python" / "sglang"
    here = Install(package, ("--python", python), "editable", python, state=state, env=_NO_SETTINGS)
    for patch in PATCHES[: 2 if dirty else 1]:
        yield patch, partial(_keeps_git, here, root, patch, bench.folder / f"{patch}.toml")


def trees(bench: Bench) -> Iterator[Trial]:
    """A checkout, a worktree and a submodule of it, each with uncommitted edits; the others must not see a patch."""
    root = _checkout(bench)
    git(root, "worktree", "add", "--quiet", str(bench.folder / "tree"), "-b", "side")
    outer = bench.folder / "outer"
    outer.mkdir()
    git(outer, "init", "--quiet")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(root), "third party/sglang")
    places = {"checkout": root, "worktree": bench.folder / "tree", "submodule": outer / "third party" / "sglang"}
    for name, place in places.items():
        _dirty(place)
        others = tuple(other / "python" for other in places.values() if other != place)
        aim = ("--sglang", place)
        here = Install(place / "python" / "sglang", aim, "checkout", shared=others, state="edited", env=_NO_SETTINGS)
        yield name, partial(_keeps_git, here, place, "gather-cast", bench.folder / f"{name}.toml")


def unchecked(prefix: bool, bench: Bench) -> Iterator[Trial]:
    """Compiled files that never look at their source: the patched code must run all the same, and after revert not."""
    environment = bench.environment("venv")
    bench.corpus.install_tree(VERSION, _site(environment))
    if prefix:  # and the environment is known by a link, as `/opt/venv -> /opt/venv-2`
        link = bench.folder / "current"
        link.symlink_to(environment)
        environment = link
    site, python = _site(environment), environment / "bin" / "python"
    env = {"PYTHONPYCACHEPREFIX": str(bench.folder / "a prefix")} if prefix else {}
    here = Install(site / "sglang", ("--python", python), "wheel", python, env=env)

    def stale() -> None:
        compile_unchecked(python, here.package, env)
        before = here.file.read_bytes()
        here.file.write_bytes(before.replace(b"import torch\n", b"raise SystemExit('not compiled')\n", 1))
        assert imported(python, env) == "", "the compiled file was not what ran: this kind shows nothing"
        here.file.write_bytes(before)

    yield "an edit by hand does not run", stale
    for patch in PATCHES[: 2 if bench.thorough else 1]:
        compile_unchecked(python, here.package, env)
        yield patch, partial(here.story, patch)

    def applied_then_compiled() -> None:
        here.ok("apply", "gather-cast")
        compile_unchecked(python, here.package, env)
        assert imported(python, env)
        here.ok("revert")
        assert imported(python, env) == "", "the patched code still runs after revert"

    if bench.thorough:
        yield "compiled between apply and revert", applied_then_compiled


NAMES = (
    "with spaces ",
    "quotes'\"`",
    "line\nbreak",
    "ünï-çödé-日本-🙂",
    "$(touch gone);rm -rf x&",
    "[*]?{a,b}",
    "%20%2e",
    "-rf",
    "a" * 200,
    "tab\tand\x1b[31mcolour",
    os.fsdecode(b"latin-\xe9"),
)


def names(bench: Bench) -> Iterator[Trial]:
    chosen = NAMES if bench.thorough else NAMES[-1:]
    for number, name in enumerate(chosen):
        place = bench.folder / str(number) / name
        place.parent.mkdir()
        bench.corpus.install_tree(VERSION, place)
        aims: dict[str, tuple[str | Path, ...]] = {"path": ("--sglang", place), "cwd": ("--sglang", ".")}
        for how, aim in list(aims.items())[: 2 if bench.thorough and number % 3 == 0 else 1]:
            here = Install(place / "sglang", aim, "wheel", cwd=place)
            yield f"{name!r} by {how}", partial(here.story, "gather-cast")
    for number, name in enumerate(chosen[:6] if bench.thorough else ()):
        if len(name) > 100 or "\n" in name or "\udce9" in name:
            continue  # pyvenv.cfg cannot hold it, or a script's first line: Python's own limits
        environment = bench.environment(f"venv {number} {name}")
        bench.corpus.install_tree(VERSION, _site(environment))
        python = environment / "bin" / "python"
        here = Install(_site(environment) / "sglang", ("--python", python), "wheel", python)
        yield f"a virtual environment in {name!r}", partial(here.story, "gather-cast")


def cases(bench: Bench) -> Iterator[Trial]:
    """Neighbours whose names differ by case only, with compiled files of their own."""
    site = bench.small("site")
    folder = (site / BACKEND).parent
    twins = [folder / "Flashinfer_MLA_Backend.py", folder / "FLASHINFER_MLA_BACKEND.PY", site / "SGLang" / "a.py"]
    twins += [folder / "__pycache__" / "Flashinfer_MLA_Backend.cpython-311.pyc"]
    for twin in twins:
        twin.parent.mkdir(exist_ok=True)
        twin.write_text("TWIN = 1\n")
    if len(list(folder.glob("*lashinfer_*"))) < 2 or (site / "sglang" / "a.py").exists():
        raise NotHere("this file system does not tell upper from lower case")
    here = Install(site / "sglang", ("--sglang", site), "wheel", shared=tuple(twins))
    yield "neighbours by case", partial(here.story, "gather-cast")


def twins(bench: Bench) -> Iterator[Trial]:
    """The whole tree hard-linked, as `cp -al`, ostree and deduplicated stores do; and every file a symlink."""
    for name in ("hard links", "symlinks"):
        store, site = bench.small(f"{name} store"), bench.folder / name
        if name == "symlinks":
            for path in sorted(store.rglob("*")):
                link = site / path.relative_to(store)
                link.parent.mkdir(parents=True, exist_ok=True)
                if path.is_file():
                    link.symlink_to(path)
        else:
            shutil.copytree(store, site, copy_function=os.link)
        here = Install(site / "sglang", ("--sglang", site), "wheel", shared=(store,))
        for patch in PATCHES[: 2 if bench.thorough else 1]:
            yield f"{name} {patch}", partial(here.story, patch)


def cleaned_cache(bench: Bench) -> Iterator[Trial]:
    """uv's symlink mode after `uv cache clean`: every file is a link to nothing."""
    store, site = bench.small("store"), bench.folder / "site"
    for path in sorted(p for p in store.rglob("*") if p.is_file()):
        link = site / path.relative_to(store)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)

    def told(*relative: str) -> None:
        for path in relative:
            (store / path).unlink()
        before = fingerprint([site])
        path = os.pathsep.join([str(site), str(Path(__file__).parents[2] / "src")])
        done = subprocess.run(
            [sys.executable, "-m", "mlapatch", "apply", "gather-cast"],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            cwd=bench.folder,
            check=False,
        )
        assert done.returncode == 5, done
        assert "links to nothing" in done.stderr or "a link to nothing" in done.stderr, done.stderr
        assert "  next: " in done.stderr, done.stderr
        assert fingerprint([site]) == before

    yield "one file", partial(told, BACKEND)
    yield "every file", partial(told, "sglang/__init__.py")


KINDS: Iterable[Kind] = (
    *(
        Kind(f"uv pip install, link mode {mode}: two environments, one cache", partial(uv_modes, mode))
        for mode in ("hardlink", "symlink", "clone", "copy")
    ),
    Kind("pip install of the whole wheel, guard recorded and checked", pip),
    Kind("pip install --editable of a clean checkout", partial(editable, "pip", False)),
    Kind("pip install --editable of a checkout with uncommitted edits", partial(editable, "pip", True)),
    Kind("uv pip install --editable of a checkout with uncommitted edits", partial(editable, "uv", True)),
    Kind("checkout, worktree and submodule, each with uncommitted edits", trees),
    Kind("unchecked-hash .pyc: the patched code runs, and after revert the original", partial(unchecked, False), True),
    Kind("the same under PYTHONPYCACHEPREFIX, in an environment that is known by a link", partial(unchecked, True)),
    Kind("paths with spaces, quotes, newlines, shell text, other alphabets, no UTF-8", names, True),
    Kind("neighbours that differ by case only", cases),
    Kind("a store of hard links, a store of symlinks", twins),
    Kind("links to nothing, as after `uv cache clean`", cleaned_cache),
)
