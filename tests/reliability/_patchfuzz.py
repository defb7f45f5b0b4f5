"""The real patch folders, mutated: whatever comes of one, it is a refusal or a patch that stays inside its scopes."""

from __future__ import annotations

import ast
import difflib
import random
import shutil
import sys
from pathlib import Path

from packaging.version import Version

from mlapatch.catalogue import bundled_folder, load_catalogue
from mlapatch.engine.patch import Patch
from mlapatch.engine.verdict import Fits, apply, judge
from tests.reliability._attempts import Oracle, Tally, run
from tests.reliability._mutate import as_toml, misshapen, mutated
from tests.reliability._place import VERSION, Place

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def fuzz_patches(place: Place, rng: random.Random, *, thorough: bool) -> Tally:
    """Mutants of the five patches' tables and snippets, each through load, judge and apply on real files."""
    tally = Tally("inputs", "mutants of the real patch.toml and snippets: load, judge, apply")
    bundled = bundled_folder("patches")
    names = sorted(path.parent.name for path in bundled.glob("*/patch.toml"))
    tables = {name: (bundled / name / "patch.toml").read_bytes() for name in names}
    for number in range(300 if thorough else 8):
        name = rng.choice(names)
        folder = place.work / "mutants" / name
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(bundled / name, folder)
        shutil.copytree(bundled / "common", folder.parent / "common")
        _mutate(folder, name, tables, rng)
        oracle = Oracle((folder.parent,), place.writable)
        fits = tally.attempt(f"mutant {number} of {name}", lambda f=folder: _judged(place, f), oracle)  # type: ignore[misc]
        if fits and rng.random() < 0.1:
            place.restore()
            tally.attempt(f"mutant {number} of {name} on disk", lambda f=folder, n=name: _on_disk(place, f, n), oracle)  # type: ignore[misc]
    return tally


def _mutate(folder: Path, name: str, tables: dict[str, bytes], rng: random.Random) -> None:
    snippets = [*folder.glob("*.py"), *(folder.parent / "common").glob("*.py")]
    kind = rng.randrange(10)
    if kind < 2 and snippets:
        snippet = rng.choice(snippets)
        snippet.write_bytes(mutated(snippet.read_bytes(), rng, tuple(tables.values())))
    elif kind < 6:
        (folder / "patch.toml").write_text(
            as_toml(misshapen(tomllib.loads(tables[name].decode()), rng)), errors="replace"
        )
    else:
        (folder / "patch.toml").write_bytes(mutated(tables[name], rng, tuple(tables.values())))


def _judged(place: Place, folder: Path) -> bool:
    patch = load_catalogue([folder.parent]).patches[folder.name]
    source = place.originals.get(f"sglang/{patch.target}")
    if source is None:
        return False
    verdict = judge(source, patch, Version(VERSION))
    outcome = apply(source, patch, Version(VERSION))
    if not isinstance(outcome, Fits):
        assert str(verdict.verdict) != "applicable", f"judged applicable, and then {outcome.reason}"
        assert len(outcome.reason) < 4000
        return False
    assert str(verdict.verdict) == "applicable", f"applied although judged {verdict.verdict}: {verdict.reason}"
    compile(outcome.source, patch.target, "exec", dont_inherit=True)
    assert str(judge(outcome.source, patch, Version(VERSION)).verdict) == "applied"
    stray = outside_scopes(source, outcome.source, patch)
    assert not stray, f"changed outside its scopes: {stray[:3]}"
    return True


def outside_scopes(source: bytes, result: bytes, patch: Patch) -> list[str]:
    """Lines of the original that are gone, or places where lines came, that no edit's scope covers."""
    old, new = source.splitlines(), result.splitlines()
    head = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    middle = old[head : len(old) - tail], new[head : len(new) - tail]
    spans = {edit.scope: _span(source, edit.scope) for edit in patch.edits}
    stray = []
    for kind, start, end, _, _ in difflib.SequenceMatcher(None, *middle, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        first, last = head + start + 1, head + end
        inserted = kind == "insert"
        covered = any(a <= first and last <= b for scope, (a, b) in spans.items() if scope != "module" or inserted)
        covered = covered or ("module" in spans and any(edit.scope == "module" and edit.find for edit in patch.edits))
        if not covered:
            stray.append(f"{kind} at line {first}: {middle[0][start:end][:2]}")
    return stray


def _span(source: bytes, scope: str) -> tuple[int, int]:
    """First and last line of a scope; one more at its end, where an insertion stands."""
    if scope == "module":
        return 0, sys.maxsize
    node: ast.AST = ast.parse(source)
    for name in scope.split("."):
        below = [n for n in getattr(node, "body", []) if getattr(n, "name", "") == name]
        if not below:
            return 0, -1
        node = below[0]
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    return min([node.lineno, *(d.lineno for d in node.decorator_list)]), (node.end_lineno or 0) + 1


def _on_disk(place: Place, folder: Path, name: str) -> None:
    options = ("--sglang", place.site, "--patches", folder.parent)
    frozen = place.contents()
    done = run("apply", name, "--sm", "90", "--force", *options)
    if done.code == 0:
        assert run("revert", *options).code == 0
    assert place.contents() == frozen, "not as before"
