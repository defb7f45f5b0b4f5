"""Folders of patches: unknown names, and folders that say no patch. All exit 2; nothing in them ever runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Command, SiteFactory

GOOD = """
name = "{name}"
summary = "A patch"
target = "srt/layers/attention/flashinfer_mla_backend.py"
[[edit]]
scope = "module"
before = "class FlashInferMLAAttnBackend"
insert = "snippet.py"
[[post]]
scope = "module"
present = "added = {{value}}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def make(toml: str | bytes | None = None, snippet: str = "added = 1\n", name: str = "mine") -> Path:
        home = tmp_path / "catalogue" / name
        home.mkdir(parents=True)
        text = GOOD.format(name=name) if toml is None else toml
        (home / "patch.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
        (home / "snippet.py").write_text(snippet)
        return home.parent

    return make


TYPED = {
    "ACTIVE-CAST": "active-cast",
    "gather_cast": "gather-cast",
    "active": "active-cast",
    "fp8plan": "fp8-plan",
    "profil-decode": "profile-decode",
}


def test_names_that_are_joined_by_commas(mlapatch_: Command) -> None:
    done = mlapatch_("apply", "active-cast,profile-decode")
    assert done.code == 2
    assert "there is no patch 'active-cast,profile-decode'; names are separated by spaces" in done.err
    assert "  next: the same command with active-cast profile-decode" in done.err


@pytest.mark.parametrize(("typed", "near"), TYPED.items())
@pytest.mark.parametrize("verb", [("apply",), ("diff",), ("revert",), ("status", "--require")])
def test_an_unknown_name_names_the_nearest(site: SiteFactory, verb: tuple[str, ...], typed: str, near: str) -> None:
    here = site("0.5.9")
    frozen = here.snapshot()
    done = here(*verb, typed)
    assert done.code == 2
    assert f"there is no patch '{typed}'; did you mean '{near}'?" in done.err
    assert "next: mlapatch list" in done.err
    assert here.snapshot() == frozen


def test_a_good_folder(site: SiteFactory, folder: Callable[..., Path]) -> None:
    here = site("0.5.9")
    before, catalogue = here.bytes, folder()
    here.ok("apply", "mine", "--patches", catalogue)
    assert b"\nadded = 1\n" in here.bytes
    assert here.verdicts("--patches", catalogue / "mine")["mine"] == "applied", "one patch's own folder works too"
    here.ok("revert", "--patches", catalogue)
    assert here.bytes == before


def changed(old: str, new: str) -> str:
    text = GOOD.format(name="mine")
    assert old in text
    return text.replace(old, new)


BAD: dict[str, tuple[str | bytes, str]] = {
    "not TOML": ("name = ", "Invalid value"),
    "not UTF-8": (b"name = '\xff'", "utf-8"),
    "another name": (changed('"mine"', '"other"'), "the name 'other' is not the folder's, 'mine'"),
    "a name with capitals": (changed('"mine"', '"Mine"'), "must be lower-case letters, digits and dashes"),
    "an unknown key": (changed("summary", "sumary"), "unknown key 'sumary'; known keys are"),
    "an unknown key in an edit": (changed("before", "befor"), "unknown key 'befor'"),
    "a missing key": (changed('summary = "A patch"', ""), "the key 'summary' is missing"),
    "a date": (changed('"A patch"', "2026-01-01"), "'summary' must be str, found date"),
    "a target outside": (changed("srt/layers/attention", "../../bin"), "must be a .py path inside the sglang package"),
    "an absolute target": (changed("srt/layers/attention", "/etc"), "must be a .py path inside the sglang package"),
    "a hidden target": (changed("srt/layers", "srt/.git"), "must be a .py path inside the sglang package"),
    "a target that is no Python": (changed("_backend.py", "_backend.so"), "must be a .py path inside"),
    "a snippet outside": (changed("snippet.py", "../../../etc/passwd.py"), "must be FILE.py or common/FILE.py"),
    "an absolute snippet": (changed("snippet.py", "/etc/hosts.py"), "must be FILE.py or common/FILE.py"),
    "a snippet of another patch": (changed("snippet.py", "gather-cast/gather_cast.py"), "must be FILE.py or common/"),
    "a snippet that is not there": (changed("snippet.py", "absent.py"), "absent.py is not a file"),
    "a snippet that is a number": (changed('insert = "snippet.py"', "insert = 5"), "'insert' must be list"),
    "edits that are no tables": ('name = "mine"\nsummary = ""\ntarget = "a.py"\nedit = [1]\npost = [1]', "a table is"),
    "no edits": ('name = "mine"\nsummary = ""\ntarget = "a.py"\nedit = []\npost = []', "at least one [[edit]]"),
    "two anchors": (changed("before =", 'after = "x"\nbefore ='), "exactly one of find, before, after, at"),
    "code and insert": (changed("insert =", 'code = "x"\ninsert ='), "an insertion needs either 'insert'"),
    "a scope that is none": (changed('"module"\nbefore', '"A b"\nbefore'), "scope 'A b' is not 'module' or a dotted"),
    "a pattern that is not Python": (changed("added = {value}", "added = ("), "is not Python"),
    "a pattern of two statements": (changed("added = {value}", "a; b"), "must be one expression, one simple statement"),
    "a pattern that is a block": (changed("added = {value}", "if a: b"), "must be one expression, one simple"),
    "a hole twice": (changed("added = {value}", "{a} + {a}"), "a hole is named twice"),
    "a star hole outside a call": (changed("added = {value}", "[{a...}]"), "stands for arguments of a call"),
    "a hole in a string": (changed("added = {value}", "f('{a}')"), "the hole 'a' has no place there"),
    "an anchor too deep": (changed("added = {value}", "(" * 450 + ")" * 450), "is not Python"),
    "a count that is none": (changed('insert = "snippet.py"', 'insert = "snippet.py"\ncount = -1'), "from 0 to 1000"),
    "a range that is none": (changed("target", 'sglang = "about 0.5"\ntarget'), "is not a version specifier"),
    "a replaced statement": (
        changed('before = "class FlashInferMLAAttnBackend"\ninsert = "snippet.py"', 'find = "a = 1"\nreplace = "b"'),
        "'find' must be an expression",
    ),
    "a replacement that is none": (
        changed('before = "class FlashInferMLAAttnBackend"\ninsert = "snippet.py"', 'find = "a"\nreplace = "b = 1"'),
        "the replacement must be one expression",
    ),
    "an unbound hole": (
        changed('before = "class FlashInferMLAAttnBackend"\ninsert = "snippet.py"', 'find = "a({x})"\nreplace = "{y}"'),
        "{y} is used, and the pattern does not bind it",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_says_what_is_wrong(mlapatch_: Command, folder: Callable[..., Path], case: str) -> None:
    toml, message = BAD[case]
    catalogue = folder(toml)
    done = mlapatch_("list", "--patches", catalogue)
    assert done.code == 2, done
    assert done.err.startswith("error: a patch cannot be read\n")
    assert message in done.err
    assert f"  where: {catalogue / 'mine' / 'patch.toml'}\n" in done.err
    assert "  next: mend the file" in done.err


@pytest.mark.parametrize("verb", ["status", "apply", "diff", "revert"])
def test_every_verb_refuses_a_bad_folder(site: SiteFactory, folder: Callable[..., Path], verb: str) -> None:
    catalogue = folder(snippet="def broken(:\n")
    here = site("0.5.9")
    frozen = here.snapshot()
    done = here(verb, *(["mine"] if verb in ("apply", "diff") else []), "--patches", catalogue)
    assert done.code == 2
    assert "edit 1: the inserted code is not Python: line 1" in done.err
    assert here.snapshot() == frozen


def test_a_snippet_may_not_end_in_a_comment(mlapatch_: Command, folder: Callable[..., Path]) -> None:
    done = mlapatch_("list", "--patches", folder(snippet="added = 1\n# and more\n"))
    assert (done.code, "may not end in a comment" in done.err) == (2, True)


def test_nothing_in_a_folder_is_executed(site: SiteFactory, folder: Callable[..., Path], tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    catalogue = folder(snippet=f"open({str(ran)!r}, 'w').close()\nadded = 1\n")
    for name in ("conftest.py", "__init__.py", "setup.py", "patch.py"):
        (catalogue / "mine" / name).write_text(f"open({str(ran)!r}, 'w').close()\n")
    here = site("0.5.9")
    for verb in (("list",), ("status",), ("diff", "mine"), ("apply", "mine"), ("status",), ("revert",)):
        done = here.run(*verb, *([] if verb == ("list",) else ["--sglang", here.folder]), "--patches", catalogue)
        assert done.code == 0, done
    assert not ran.exists()
    assert not list(catalogue.rglob("__pycache__"))


def test_links_that_leave_the_catalogue_are_refused(
    mlapatch_: Command, folder: Callable[..., Path], tmp_path: Path
) -> None:
    secret = tmp_path / "secret.py"
    secret.write_text("token = 1\n")
    catalogue = folder()
    snippet = catalogue / "mine" / "snippet.py"
    snippet.unlink()
    snippet.symlink_to(secret)
    done = mlapatch_("list", "--patches", catalogue)
    assert (done.code, "is a link that leaves the catalogue" in done.err) == (2, True)
    snippet.unlink()
    os.mkfifo(snippet)  # reading one would wait for ever
    done = mlapatch_("list", "--patches", catalogue)
    assert (done.code, "is not a file" in done.err) == (2, True)


def test_a_snippet_of_any_size_is_not_read(mlapatch_: Command, folder: Callable[..., Path]) -> None:
    done = mlapatch_("list", "--patches", folder(snippet="#" * (1 << 16) + "\nadded = 1\n"))
    assert (done.code, "is larger than 65536 bytes" in done.err) == (2, True)


def test_folders_without_patches(mlapatch_: Command, tmp_path: Path) -> None:
    for path, message in ((tmp_path / "absent", "does not exist"), (tmp_path, "the folder holds no patch")):
        done = mlapatch_("list", "--patches", path)
        assert (done.code, message in done.err) == (2, True), done
        assert str(path) in done.err


def test_json_errors_are_json(mlapatch_: Command, tmp_path: Path) -> None:
    done = mlapatch_("list", "--json", "--patches", tmp_path / "absent")
    assert done.code == 2
    assert done.json["exit"] == 2
    assert done.json["error"]["what"] == "the patches folder does not exist"
