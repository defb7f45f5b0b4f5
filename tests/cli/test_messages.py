"""The messages as a set: each refusal has a next command, the commands exist, one word is used for one thing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import mlapatch
import mlapatch.cli
from mlapatch.serve.rules import load
from tests.cli.conftest import _registered

PACKAGE = Path(mlapatch.__file__).parent
ROOT = PACKAGE.parents[1]
MODULES = sorted(PACKAGE.rglob("*.py"))
#: What a refusal is made of, and the place of `next` among its positional arguments.
REFUSALS = {"MlapatchError": 5, "Finding": 4}
#: Left: words that mean the same as the ones on the right, which these messages use.
VOCABULARY = {
    r"can't|couldn't|won't|don't|isn't|doesn't": "cannot, does not",
    r"unable to|failed to|could not": "cannot",
    r"invalid|illegal": "what is expected, and what was found",
    r"please|sorry|oops": "nothing",
    r"directory|directories": "folder",
    r"uninstall(?:ed)? (?:the )?patch|unpatch(?:ing)?\b": "revert",
    r"virtualenv": "venv",
    r"sha-256|SHA256|checksum": "sha256",
}


def verbs() -> dict[str, Any]:
    """Every verb by its whole name, `guard record` too."""
    assert _registered()
    found: dict[str, Any] = {}
    root: Any = typer.main.get_command(mlapatch.cli.app)
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        if inner is None:
            found[name] = command
        else:
            found |= {f"{name} {its}": one for its, one in inner.items()}
    return found


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in REFUSALS:
                yield name, node


def texts(node: ast.AST) -> Iterator[str]:
    """The literal texts below a node, holes of f-strings as `{}`."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from texts(child)


def refuses(name: str, node: ast.Call) -> bool:
    """A preflight finding refuses where its state is FAIL."""
    return name != "Finding" or any(isinstance(word, ast.Name) and word.id == "FAIL" for word in node.args[1:2])


def next_of(name: str, node: ast.Call) -> ast.expr | None:
    place = REFUSALS[name]
    given = next((word.value for word in node.keywords if word.arg == "next"), None)
    return given or (node.args[place] if len(node.args) > place else None)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_refusal_has_a_next_command(path: Path) -> None:
    for name, node in calls(path):
        if refuses(name, node):
            following = next_of(name, node)
            assert following is not None, f"{path}:{node.lineno}: {name} without next"
            empty = isinstance(following, ast.Constant) and not following.value
            assert not empty, f"{path}:{node.lineno}: {name} with an empty next"


def test_the_test_above_sees_the_refusals() -> None:
    found = [name for path in MODULES for name, _ in calls(path)]
    assert found.count("MlapatchError") > 90
    assert found.count("Finding") > 20


def test_every_rule_of_the_diagnosis_has_advice() -> None:
    book = load()
    assert all(rule.advice.strip() for rule in book.rules)
    assert all(template.advice.strip() for template in [*book.specials.values(), *book.silences.values()])


def spoken() -> Iterator[tuple[Path, str]]:
    """Every literal text of the package, and every text that is read by people."""
    for path in MODULES:
        tree = ast.parse(path.read_bytes())
        for text in texts(tree):
            yield path, text
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), PACKAGE / "serve" / "rules.toml"]:
        yield path, path.read_text("utf-8")


COMMAND = re.compile(r"(?<![\w/.-])mlapatch ((?:guard )?[a-z]+)((?:(?!&&|\|\||mlapatch)[^\n`;,|)#])*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def test_every_command_that_is_named_exists() -> None:
    known = verbs()
    seen = 0
    for path, text in spoken():
        for verb, rest in COMMAND.findall(text):
            if verb in known:
                seen += 1
                options = {option for one in known[verb].params for option in (*one.opts, *one.secondary_opts)}
                mine = rest.split(" -- ")[0]
                assert set(OPTION.findall(mine)) <= {*options, "--help"}, f"{path}: mlapatch {verb}{rest}"
    assert seen > 150


def test_every_next_command_is_a_verb() -> None:
    known, seen = verbs(), 0
    for path in MODULES:
        for name, node in calls(path):
            following = next_of(name, node)
            for text in texts(following) if following is not None else ():
                for verb, _ in COMMAND.findall(text):
                    seen += 1
                    assert verb in known or verb == "that", f"{path}:{node.lineno}: mlapatch {verb}"
    assert seen > 50


@pytest.mark.parametrize("word", VOCABULARY)
def test_one_word_for_one_thing(word: str) -> None:
    wrong = re.compile(rf"\b(?:{word})\b", re.IGNORECASE if word.islower() else 0)
    for path in MODULES:
        for name, node in calls(path):
            for text in texts(node):
                assert not wrong.search(text), f"{path}:{node.lineno}: {name}: {text!r}: say {VOCABULARY[word]}"
    for verb, command in verbs().items():
        said = [command.help or "", *(str(getattr(one, "help", "") or "") for one in command.params)]
        for text in said:
            assert not wrong.search(text), f"{verb}: {text!r}: say {VOCABULARY[word]}"


@pytest.mark.parametrize("verb", verbs())
def test_help_has_an_example_of_this_verb(verb: str) -> None:
    said = verbs()[verb].help or ""
    example = re.search(r"Examples?: (.+)", said, re.DOTALL)
    assert example, f"{verb}: no example in --help"
    assert re.search(rf"mlapatch {verb}\b", example[1]), example[1]


@pytest.mark.parametrize("verb", verbs())
def test_every_option_says_what_it_does(verb: str) -> None:
    for one in verbs()[verb].params:
        assert getattr(one, "help", None) or one.name in ("name", "help"), f"{verb}: {one.name}"
