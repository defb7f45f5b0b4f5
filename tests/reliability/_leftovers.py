"""More than one SGLang, or less: leftovers, archives, stale metadata. What is used is what a server imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from tests.reliability._installing import VERSION, Bench, Install, Kind, Trial, fingerprint

SRC = Path(__file__).parents[2] / "src"


def _on_path(*folders: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), str(SRC)])}


def _run(env: dict[str, str], cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlapatch", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        cwd=cwd,
        check=False,
        timeout=120,
    )


def _uses(env: dict[str, str], cwd: Path, used: Path, others: tuple[Path, ...], said: tuple[str, ...] = ()) -> None:
    """status names the SGLang that is used, apply patches it and leaves the others as they are."""
    before, mine = fingerprint(others), fingerprint([used])
    for arguments in (("status",), ("apply", "gather-cast"), ("status", "--require", "gather-cast"), ("revert",)):
        done = _run(env, cwd, *arguments)
        assert done.returncode == 0, f"{arguments}: {done.stderr[-500:]}"
        for words in said:
            assert words in done.stderr, f"{arguments}: {words!r} is not in {done.stderr[-800:]!r}"
        if arguments == ("status",):
            assert f"in {used}\n" in done.stdout, done.stdout
        if arguments[0] == "apply":
            assert f"applied to {used}/" in done.stdout, done.stdout
    assert fingerprint(others) == before, "another SGLang was changed"
    after = fingerprint([used])
    assert {path: about[0] for path, about in after.items()} == {path: about[0] for path, about in mine.items()}


def two(bench: Bench) -> Iterator[Trial]:
    first, second = bench.small("first"), bench.small("second")
    env = {**_on_path(first, second), "PYTHONSAFEPATH": "1"}
    warning = f"another SGLang could be imported from {second / 'sglang'}; a server uses {first / 'sglang'}"
    yield "two on the path", partial(_uses, env, bench.folder, first / "sglang", (second,), (warning,))
    link = bench.folder / "link"
    link.symlink_to(first)
    env = {**_on_path(link, first, second), "PYTHONSAFEPATH": "1"}
    yield "the same by two names", partial(_uses, env, bench.folder, first / "sglang", (second,), (warning,))


def namespace(bench: Bench) -> Iterator[Trial]:
    """An `sglang/` without `__init__.py`, as an uninstall leaves it around files that it did not make."""
    site, left = bench.small("site"), bench.folder / "left"
    (left / "sglang" / "srt" / "__pycache__").mkdir(parents=True)
    (left / "sglang" / "srt" / "orphan.py").write_text("ORPHAN = 1\n")
    env = _on_path(left, site)
    yield "a leftover before the install", partial(_uses, env, bench.folder, site / "sglang", (left,))
    _break_install(site)

    def nothing_else() -> None:
        done = _run(_on_path(left, site), bench.folder, "apply", "gather-cast")
        assert done.returncode == 5, done
        assert "leftover folder without __init__.py" in done.stderr, done.stderr
        assert str(left / "sglang") in done.stderr, done.stderr
        assert "next: " in done.stderr, done.stderr

    yield "only leftovers", nothing_else


def _break_install(site: Path) -> None:
    moved = site.with_name("whole")
    shutil.copytree(site, moved)
    (site / "sglang" / "__init__.py").unlink()


def archive(bench: Bench) -> Iterator[Trial]:
    site = bench.small("site")
    packed = Path(shutil.make_archive(str(bench.folder / "sglang"), "zip", site))
    env = _on_path(site, packed)
    yield "an archive after the install", partial(_uses, env, bench.folder, site / "sglang", (packed,))
    broken = bench.folder / "broken.zip"
    broken.write_bytes(packed.read_bytes()[:1000])
    env = _on_path(broken, site)
    yield "a broken archive before the install", partial(_uses, env, bench.folder, site / "sglang", (broken,))

    def first() -> None:
        before = fingerprint([site, packed])
        done = _run(_on_path(packed, site), bench.folder, "apply", "gather-cast")
        assert done.returncode == 5, done
        for words in ("sglang is not a folder on disk", str(packed), "next: "):
            assert words in done.stderr, done.stderr
        assert fingerprint([site, packed]) == before

    yield "an archive before the install", first


def _stale(site: Path, version: str, *, record: bool, lists: bool) -> Path:
    """The metadata of another release, as an interrupted upgrade or a copied tree leaves it."""
    real, stale = site / f"sglang-{VERSION}.dist-info", site / f"sglang-{version}.dist-info"
    shutil.copytree(real, stale)
    text = (stale / "RECORD").read_text().replace("sha256=", "sha256=AAAA").replace(real.name, stale.name)
    (stale / "RECORD").write_text(text if lists else "")
    if not record:
        (stale / "RECORD").unlink()
    return stale


def metadata(bench: Bench) -> Iterator[Trial]:
    for version in ("0.5.23", "0.4.6"):
        for record, lists in ((True, True), (True, False), (False, False)):
            name = f"{version}, {'RECORD' if record else 'no RECORD'}{'' if lists or not record else ' of nothing'}"
            site = bench.small(name.replace(" ", "-"))
            stale = _stale(site, version, record=record, lists=lists)
            here = Install(site / "sglang", ("--sglang", site), "wheel")

            def told(here: Install, stale: Path) -> None:
                if "0.5.23" in stale.name:
                    here.story("gather-cast")
                done = here.ok("status", "--json")
                assert done.json["sglang"]["version"] == VERSION, done.json["sglang"]
                assert f"{stale} is left of another install" in done.err, done.err

            yield name, partial(told, here, stale)
    site = bench.small("renamed")
    (site / f"sglang-{VERSION}.dist-info").rename(site / f"~glang-{VERSION}.dist-info")
    here = Install(site / "sglang", ("--sglang", site), "folder")
    yield "pip's own leftover ~glang", partial(here.story, "gather-cast")

    def gone() -> None:
        site = bench.small("gone")
        shutil.rmtree(site / "sglang")
        done = _run({}, bench.folder, "apply", "gather-cast", "--sglang", str(site))
        assert (done.returncode, "error: no SGLang found" in done.stderr, "next: " in done.stderr) == (5, True, True)

    yield "metadata without a package", gone


def noise(bench: Bench) -> Iterator[Trial]:
    """An environment whose start prints: sitecustomize and .pth files do."""
    environment = bench.environment("venv")
    site = next(environment.glob("lib/python3*/site-packages"))
    bench.corpus.install_tree(VERSION, site)
    (site / "noise.pth").write_text("import sys; print('hello', file=sys.stdout); print('{', file=sys.stderr)\n")
    python = environment / "bin" / "python"
    here = Install(site / "sglang", ("--python", python), "wheel")
    yield "a .pth that prints", partial(here.story, "gather-cast")


KINDS: Iterable[Kind] = (
    Kind("two SGLangs on the path: the one in use is named and patched, the other untouched", two),
    Kind("a namespace leftover before an install, and alone", namespace),
    Kind("sglang.zip before, after, and broken", archive),
    Kind("stale metadata of another release, or none: the package's own version counts", metadata),
    Kind("an interpreter whose start prints", noise),
)
