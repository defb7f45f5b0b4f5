"""The shape of the code: imports go one way, modules stay small, `status` pays for nothing that it does not use."""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TreeFactory
from tests.corpus import CONTENTS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "mlapatch"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))

#: A part may import parts of a lower rank, and itself.
RANK = {
    "": 0, "errors": 0, "exits": 0, "outcome": 0, "progress": 0, "jsontext": 0, "disk": 0, "model_config": 0,
    "engine": 1, "install": 1, "serve": 1, "measure": 1, "verify": 1,
    "catalogue": 2, "misfits": 2, "verdict_cache": 2, "assess": 3, "rebase": 4, "selection": 4, "nodes": 5,
    "local_edits": 5, "guard": 6,
    "compat": 4, "compat_report": 5, "commands": 7, "cli": 8, "__main__": 9,
}  # fmt: skip
#: `compat_verify` is the half of the verb `check` that runs `verify`.
SAME = {"compat_verify": "commands"}
#: Names that say nothing about what is inside.
FORBIDDEN = {"utils", "util", "helpers", "helper", "manager", "managers", "common", "misc", "base", "core"}
LIMIT = 355


def part_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE).with_suffix("").parts
    part = "" if inside == ("__init__",) else inside[0]
    return SAME.get(part, part)


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions, by its whole name."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            below = node.module == "mlapatch"
            yield from (f"{node.module}.{alias.name}" if below else node.module for alias in node.names)


def part_imported(name: str) -> str | None:
    first, *rest = name.split(".")
    if first != "mlapatch":
        return None
    inside = PACKAGE.joinpath(*rest[:1])
    part = rest[0] if rest and (inside.is_dir() or inside.with_suffix(".py").is_file()) else ""
    return SAME.get(part, part)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module(path: Path) -> None:
    part = part_of(path)
    assert part in RANK, f"{part} has no place in the layers yet: give it one"
    for name in imported(path):
        other = part_imported(name)
        if other is not None and other != part:
            assert RANK[other] < RANK[part] or RANK[other] == 0, f"{part} imports {name}"
    assert path.stem not in FORBIDDEN
    assert path.read_bytes().count(b"\n") <= LIMIT
    if part == "engine":
        assert not set(imported(path)) & {"os", "pathlib", "subprocess", "sys", "io", "shutil", "tempfile", "socket"}
        calls = [
            n.func.id
            for n in ast.walk(ast.parse(path.read_bytes()))
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        ]
        assert not set(calls) & {"print", "open", "exit", "input", "exec", "eval", "__import__"}
    if part not in ("cli", "__main__"):
        assert "typer" not in {name.split(".")[0] for name in imported(path)}
        assert path.stem == "progress" or "rich" not in {name.split(".")[0] for name in imported(path)}
    if part != "install":
        assert "git" not in set(imported(path)), "all git is behind one package"
    if path.parent.name == "harness":
        return  # runs in a process of its own, with torch
    assert not {"torch", "sglang", "flashinfer"} & {name.split(".")[0] for name in imported(path)}


def test_nothing_uses_a_shell() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call):
                shell = [word for word in node.keywords if word.arg == "shell"]
                assert not shell, f"{path}:{node.lineno}"
                assert ast.unparse(node.func) not in {"os.system", "os.popen"}, f"{path}:{node.lineno}"


LOADED = """
import json, sys
sys.argv = ["mlapatch", "status", "--json", "--sglang", sys.argv[1]]
from mlapatch.cli import main
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
print(json.dumps(sorted(sys.modules)))
"""


def loaded(site: Path, cache: Path) -> set[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "MLAPATCH_CACHE": str(cache)}
    command = [sys.executable, "-c", LOADED, str(site)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_a_warm_status_imports_nothing_that_it_does_not_use(install_tree: TreeFactory, tmp_path: Path) -> None:
    site = install_tree("0.5.23")
    cold = loaded(site, tmp_path)
    assert "libcst" in cold, "the check below checks something"
    warm = loaded(site, tmp_path)
    heavy = {
        "libcst",
        "git",
        "torch",
        "sglang",
        "httpx",
        "rich.syntax",
        "merge3",
        "psutil",
        "orjson",
        "asyncio",
        "numpy",
    }
    assert not heavy & warm
    assert not heavy - {"libcst"} & cold


def test_sglangs_text_is_not_committed() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if tracked.returncode:
        pytest.skip("not a checkout")
    known = {content["sha256"] for content in CONTENTS}
    for name in filter(None, tracked.stdout.decode().split("\0")):
        path = ROOT / name
        if name.startswith("bench/results/") and name.endswith(".json.gz"):  # numbers and kernels' names
            assert isinstance(json.loads(gzip.decompress(path.read_bytes())), dict), name
        else:
            assert path.suffix not in {".whl", ".gz", ".zip"}, name
        if path.is_file() and path.stat().st_size < 1 << 20:
            data = path.read_bytes()
            assert hashlib.sha256(data).hexdigest() not in known, name
            assert not (
                path.suffix == ".py" and b"class FlashInferMLAIndicesUpdaterDecode" in data and len(data) > 20_000
            )


def test_every_patch_has_a_readme_and_snippets_that_parse() -> None:
    folders = [path.parent for path in (ROOT / "patches").glob("*/patch.toml")]
    assert len(folders) >= 4
    for folder in folders:
        for snippet in folder.glob("*.py"):
            ast.parse(snippet.read_bytes())
