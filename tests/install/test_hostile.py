"""Installs that are not as pip's manual has them; each was a defect that a campaign found."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlapatch.engine import tree
from mlapatch.install.target import find_target
from mlapatch.install.wheelfile import parse_record
from mlapatch.verdict_cache import _engine_digest
from tests.cli.conftest import Site, mlapatch_, process, site
from tests.cli.test_finding import Venv
from tests.conftest import TreeFactory
from tests.corpus import BACKEND
from tests.install.test_write import as_nobody, here, open_to_all

__all__ = ["here", "mlapatch_", "site"]  # fixtures
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def test_the_record_of_an_install_lists_scripts_outside(here: Site) -> None:
    """pip and uv write `../../../bin/sglang` there: guard and launch must not take it for an attack."""
    record = here.folder / "sglang-0.5.9.dist-info" / "RECORD"
    scripts = "../../../bin/sglang,sha256=0nrH27pHZ5OUBCkxHnw_G2uEC2iERE2V5fTRtZoW4DY,223\n/usr/bin/x,sha256=AAAA,1\n"
    record.write_text(scripts + record.read_text())
    target = find_target(here.folder)
    assert f"sglang/{BACKEND.removeprefix('sglang/')}" in target.record
    assert not [path for path in target.record if path.startswith(("..", "/"))]
    shutil.rmtree(here.folder / "sglang-0.5.9.dist-info" / "licenses")
    for verb in (("guard", "check"), ("status",)):
        done = here(verb[0], *verb[1:])
        assert "outside its own folder" not in done.err, done
    with pytest.raises(Exception, match="outside its own folder"):
        parse_record(scripts.encode())


@pytest.mark.parametrize("damage", [b'"never closed', b"a,sha256=\xff,1\n", b"a,sha256=!,1\n", b"x" * 200_000])
def test_a_damaged_record_is_as_good_as_none(here: Site, damage: bytes) -> None:
    record = here.folder / "sglang-0.5.9.dist-info" / "RECORD"
    record.write_bytes(record.read_bytes() + damage)
    assert here.verdicts()["gather-cast"] == "applicable"
    here("guard", "check")


@pytest.mark.parametrize("version", ["0.5.23", "0.4.6"])
@pytest.mark.parametrize("record", ["of another", "empty", "none"])
def test_metadata_of_another_release_is_named_and_not_believed(here: Site, version: str, record: str) -> None:
    stale = here.folder / f"sglang-{version}.dist-info"
    shutil.copytree(here.folder / "sglang-0.5.9.dist-info", stale)
    if record == "none":
        (stale / "RECORD").unlink()
    elif record == "empty":
        (stale / "RECORD").write_bytes(b"")
    status = here.ok("status", "--json")
    found = status.json["sglang"]
    assert (found["version"], found["install"]) == ("0.5.9", "wheel")
    assert f"{stale} is left of another install" in status.err


def test_metadata_that_the_package_contradicts(here: Site) -> None:
    (here.folder / "sglang" / "_version.py").write_text("__version__ = '0.5.8'\n")
    assert "the package says that it is SGLang 0.5.8" in here.ok("status").err


def test_an_interpreter_that_prints_when_it_starts(install_tree: TreeFactory, tmp_path: Path) -> None:
    venv = Venv(tmp_path / "venv", install_tree("0.5.9"))
    (venv.site / "noise.pth").write_text("import sys; print('hello'); print('{')\n")
    done = process("status", "--json", "--python", venv.python)
    assert (done.code, done.json["sglang"]["version"]) == (0, "0.5.9")


def test_compiled_files_under_a_prefix_by_every_name(
    here: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/opt/venv -> /opt/venv-2`: the interpreter files what it compiles under the name that it was started by."""
    (tmp_path / "current").symlink_to(here.folder)
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "far" / "away" / "linked").symlink_to(tmp_path / "current")
    prefix = tmp_path / "prefix"
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(prefix))
    for name in (here.folder, tmp_path / "current", tmp_path / "far" / "away" / "linked"):
        for kept in (BACKEND, BACKEND.replace("flashinfer_mla", "other")):
            file = prefix / (name / kept).relative_to("/").with_suffix(".cpython-312.pyc")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"compiled")
    elsewhere = prefix / "nowhere" / Path(BACKEND).with_suffix(".cpython-312.pyc")
    elsewhere.parent.mkdir(parents=True)
    elsewhere.write_bytes(b"of another install")
    here.ok("apply", "gather-cast")
    left = sorted(path for path in prefix.rglob("*.pyc") if "flashinfer_mla" in path.name)
    assert left == [elsewhere]
    assert len(list(prefix.rglob("other_backend*.pyc"))) == 3


def test_links_to_nothing(here: Site, tmp_path: Path) -> None:
    """uv's symlink mode after `uv cache clean`."""
    init = here.folder / "sglang" / "__init__.py"
    init.unlink()
    init.symlink_to(tmp_path / "gone" / "__init__.py")
    path = os.pathsep.join([str(here.folder), str(Path(__file__).parents[2] / "src")])
    done = process("status", env={"PYTHONPATH": path}, cwd=tmp_path)
    assert done.code == 5
    assert "error: the files of sglang are links to nothing" in done.err
    assert f"found: a link to {tmp_path / 'gone' / '__init__.py'}" in done.err
    assert "next: install sglang anew" in done.err


SHAPES: dict[str, Callable[[Path], None]] = {
    "a folder": lambda path: path.mkdir(),
    "a device or pipe": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("/nowhere/at/all.py"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_target_that_is_no_file(here: Site, shape: str) -> None:
    here.backend.unlink()
    SHAPES[shape](here.backend)
    for verb in ("status", "apply gather-cast", "revert"):
        done = here(*verb.split())
        assert done.code == 5, done
        for words in ("error: a target file cannot be read", f"where: {here.backend}", f"found: {shape}", "next: "):
            assert words in done.err


def test_the_guard_waits_for_no_pipe(here: Site) -> None:
    neighbour = here.folder / "sglang" / "srt" / "server_args.py"
    neighbour.unlink()
    os.mkfifo(neighbour)
    done = here("guard", "check")
    assert (done.code, "error: a file cannot be read" in done.err, str(neighbour) in done.err) == (5, True, True), done


@ROOT_ONLY
@pytest.mark.parametrize("relative", ["sglang", str(Path(BACKEND).parent)])
def test_a_folder_that_may_not_be_entered(here: Site, relative: str) -> None:
    open_to_all(here.folder)
    (here.folder / relative).chmod(0o700)
    done = as_nobody(here.folder, "status")
    assert (done.code, "Permission denied" in done.err, "next: " in done.err) == (5, True, True), done


DEEP = {
    "parentheses": "(" * 3000 + ")" * 3000,
    "terms": "0" + " + 0" * 20_000,
    "conditions": "0" + " or 0" * 20_000,
    "signs": "-" * 5000 + "0",
    "calls": "f" + "()" * 3000,
    "attributes": "a" + ".b" * 3000,
    "lambdas": "lambda: " * 3000 + "0",
}


@pytest.mark.parametrize("name", DEEP)
def test_code_that_is_too_deep_ends_no_process(name: str) -> None:
    """libcst's parser overflows the stack on some, which ends the interpreter, and takes minutes for others."""
    with pytest.raises(tree.Unreadable, match=r"nested|parentheses"):
        tree.parse(f"x = {DEEP[name]}\n".encode())


def test_a_file_that_is_too_large() -> None:
    with pytest.raises(tree.Unreadable, match="is not looked into"):
        tree.parse(b"# long\n" * 700_000)


def test_strings_side_by_side(here: Site) -> None:
    """Flat for Python, nested for libcst: no verb may end in a RecursionError, with or without a patch in the file."""
    before, long = here.bytes, b"x = " + b"'' " * 3000 + b"\n"
    here.backend.write_bytes(before + long)
    assert here("apply", "gather-cast").code == 3
    here.backend.write_bytes(before)
    here.ok("apply", "gather-cast")
    patched = here.bytes
    here.backend.write_bytes(patched + long)
    here.ok("status")
    assert here("revert").code in (0, 3, 4)
    here.backend.write_bytes(patched)
    here.ok("revert")
    assert here.bytes == before


def test_blanks_at_the_end_are_named(here: Site) -> None:
    """libcst drops blank lines and comments before a last line of blanks."""
    here.backend.write_bytes(here.bytes + b"\n\n   \n")
    done = here("apply", "gather-cast")
    assert (done.code, ": the parser would change line endings" in done.err) == (3, True), done
    assert here("check", "gather-cast").code == 1


def test_what_real_code_does_is_not_too_deep(unpacked: TreeFactory) -> None:
    files = sorted((unpacked("0.5.9") / "sglang" / "srt").glob("*.py"), key=lambda path: path.stat().st_size)
    for path in files[-3:]:
        tree.parse(path.read_bytes())


def test_a_verdict_of_another_python_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlapatch.verdict_cache._digest", "")
    mine = _engine_digest()
    monkeypatch.setattr("mlapatch.verdict_cache._digest", "")
    monkeypatch.setattr(sys, "version_info", (3, 99))
    assert _engine_digest() != mine


def test_a_refusal_says_what_the_file_needs(here: Site) -> None:
    here.backend.write_bytes(here.bytes + b'print "hello"\n')
    done = here("apply", "gather-cast")
    assert done.code == 3
    for words in (
        "Missing parentheses in call to 'print'",
        "  where: srt/",
        "  expected: Python",
        "  found: line ",
        "next: put",
    ):
        assert words in done.err, done.err
