"""docs/verbs: the generated parts are today's, the prose has its sections, and what it says of codes and keys is so."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from mlapatch.exits import Exit
from tests.cli.conftest import Command, Done, SiteFactory
from tests.cli.test_messages import PACKAGE, ROOT, verbs
from tests.conftest import TreeFactory
from tests.measure.sample_runs import fill

FOLDER = ROOT / "docs" / "verbs"
MODULES = {"list": "listing", "guard record": "guard", "guard check": "guard"}


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("verb_pages", ROOT / "tools" / "verb_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(verb: str) -> str:
    return (FOLDER / f"{verb.replace(' ', '-')}.md").read_text("utf-8")


def section(verb: str, title: str) -> str:
    found = re.search(rf"^## {title}\n\n(.*?)(?=^## |\Z)", page(verb), re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


def documented(verb: str) -> set[str]:
    """The keys at the head of each line of the JSON section."""
    heads = re.findall(r"^- ((?:`\w+`(?:, )?)+):", section(verb, "JSON"), re.MULTILINE)
    return {key for head in heads for key in re.findall(r"`(\w+)`", head)}


def codes(verb: str) -> set[int]:
    heads = re.findall(r"^- (\d+(?:, \d+)*): ", section(verb, "Exit codes"), re.MULTILINE)
    return {int(code) for head in heads for code in head.split(", ")}


def test_the_generated_parts_are_todays() -> None:
    assert tool().main(["--check"]) == 0, "python tools/verb_pages.py"


def test_an_old_page_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    its = tool()
    monkeypatch.setattr(its, "FOLDER", tmp_path / "verbs")
    monkeypatch.setattr(its, "ROOT", tmp_path)
    assert its.main([]) == 0
    assert its.main(["--check"]) == 0
    page = tmp_path / "verbs" / "status.md"
    page.write_text(page.read_text().replace("--require NAME", "--wanted NAME"))
    assert its.main(["--check"]) == 1
    its.main([])
    (tmp_path / "verbs" / "gone-verb.md").write_text("x")
    assert its.main(["--check"]) == 1


@pytest.mark.parametrize("verb", verbs())
def test_a_page_is_whole(verb: str) -> None:
    titles = re.findall(r"^## (.+)$", page(verb), re.MULTILINE)
    has_json = any("--json" in param.opts for param in verbs()[verb].params)
    wanted = [title for title in tool().SECTIONS if title != "JSON" or has_json]
    assert titles == wanted
    assert all(section(verb, title).strip() for title in titles)
    for name in re.findall(r"\]\(([\w./-]+)\)", page(verb)):
        assert (FOLDER / name).resolve().is_file(), name
    assert f"mlapatch {verb}" in section(verb, "Examples")


@pytest.mark.parametrize("verb", verbs())
def test_the_exit_codes_are_those_of_the_code(verb: str) -> None:
    """Every code that the verb's own module can end with is on its page."""
    tree = ast.parse((PACKAGE / "commands" / f"{MODULES.get(verb, verb)}.py").read_bytes())
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Exit"
    }
    mine = codes(verb)
    assert {int(Exit[name]) for name in names if name != "OK"} <= mine | {2}
    assert 0 in mine
    assert mine <= {int(code) for code in Exit}


@pytest.mark.parametrize("verb", ["list", "status", "apply", "revert", "diff", "guard record", "guard check", "doctor"])
def test_the_keys_are_those_of_the_json(
    site: SiteFactory, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = site("0.5.9")
    here.ok("apply", "active-cast")
    if verb == "guard check":
        here.run("guard", "record", "--sglang", here.folder)
    target = () if verb == "list" else ("--sglang", here.folder)
    digest = here.ok("status", "--json").json["digest"]
    more: dict[str, tuple[str, ...]] = {
        "status": ("--require", "active-cast", "--expect", digest),
        "apply": ("profile-decode",),
        "diff": ("active-cast",),
    }
    done = here.run(*verb.split(), *more.get(verb, ()), "--json", *target)
    assert done.code == 0, done
    assert set(done.json) == documented(verb)


def keys(done: Done) -> set[str]:
    assert done.code == 0, done
    return set(done.json)


def test_the_keys_of_verbs_that_need_no_sglang(mlapatch_: Command, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("[2026-11-29 10:00:00 TP0] Load weight begin. avail mem=94 GB\n")
    assert keys(mlapatch_("diagnose", log, "--json")) == documented("diagnose") - {"ranks_problem"}
    about = ("backends", "--release", "0.5.9", "--gpu", "h200", "--json")
    assert keys(mlapatch_(*about)) == documented("backends")
    assert keys(mlapatch_("estimate", "--preset", "glm-5", "--json")) == documented("estimate")
    assert keys(mlapatch_("stop", "--logs", tmp_path, "--json")) == documented("stop")
    assert keys(mlapatch_("logs", "--list", "--logs", tmp_path, "--json")) <= documented("logs")


def test_the_keys_of_check(mlapatch_: Command, install_tree: TreeFactory) -> None:
    done = mlapatch_("check", "active-cast", "--sglang", install_tree("0.5.9"), "--json")
    assert keys(done) == documented("check") - {"missing", "verified"}


def test_the_keys_of_kept_runs(mlapatch_: Command, tmp_path: Path) -> None:
    db = tmp_path / "runs.db"
    fill(db, tmp_path)
    assert keys(mlapatch_("runs", "--db", db, "--json")) == documented("runs") - {
        "added",
        "deleted",
        "exported",
        "file",
    }
    export = mlapatch_("runs", "--export", tmp_path / "all.jsonl", "--db", db, "--json")
    assert keys(export) <= documented("runs")
    assert keys(mlapatch_("compare", "stock", "patched", "--db", db, "--json")) == documented("compare")
    page = mlapatch_("report", "stock", "patched", "-o", tmp_path / "report.html", "--db", db, "--json")
    assert keys(page) == documented("report")


def test_the_readmes_table_of_exit_codes_is_the_enum() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert [int(code) for code, _ in rows] == [int(code) for code in Exit]
    for code, text in rows:
        sentence = next(one.sentence for one in Exit if one == int(code))
        words = re.findall(r"[a-z]+", sentence.lower())
        assert words[0] in text.lower(), f"{code}: {text}"
