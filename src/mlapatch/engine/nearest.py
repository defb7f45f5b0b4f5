"""The nearest candidate to an anchor that was not found, for the reason that a verdict carries."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator

from mlapatch.engine.holes import HEADER, with_stand_ins
from mlapatch.engine.python import parse_ast

_NAME = re.compile(r"[A-Za-z_]\w*")
_MOST_NAMES, _LONGEST = 16, 80  # of a pattern; each is compared with every name in the scope


def nearest(source: bytes, scope: str, pattern: str) -> str:
    """`line N: code` of what looks most like the pattern, in its scope or else anywhere; '' if nothing does."""
    try:
        module = parse_ast(source)
    except (SyntaxError, ValueError):
        return ""
    named = list(_named(module, ""))
    inside: ast.AST | None = module if scope == "module" else dict(named).get(scope)
    if inside is None:
        return _nearest_name(named, scope)
    best = _best(inside, pattern, 0.7)
    if best:
        return best
    elsewhere = _best(module, pattern, 0.85)
    return f"{elsewhere} (outside {scope})" if elsewhere else ""


def _named(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{prefix}{child.name}"
            yield name, child
            yield from _named(child, f"{name}.")


def _nearest_name(named: list[tuple[str, ast.AST]], scope: str) -> str:
    close = difflib.get_close_matches(scope[:_LONGEST], [name for name, _ in named], n=1, cutoff=0.5)
    if not close:
        return ""
    node = next(node for name, node in named if name == close[0])
    return f"line {getattr(node, 'lineno', 0)}: {close[0]}"


def _best(inside: ast.AST, pattern: str, cutoff: float) -> str:
    """The node of the pattern's kind that has most of its names, or names much like them; short ones first."""
    source, holes = with_stand_ins(pattern)
    names = [name[:_LONGEST] for name in dict.fromkeys(_NAME.findall(source)) if name not in holes][:_MOST_NAMES]
    kinds = _kinds(source)
    likeness: dict[tuple[str, str], float] = {}
    header = HEADER.fullmatch(pattern.strip())
    names = [header[2]] if header else names
    best, line, text = 0.0, 0, ""
    for node in ast.walk(inside):
        if not names or not isinstance(node, kinds):
            continue
        code = ast.unparse(node).split("\n", 1)[0][:300]
        there = {str(getattr(node, "name", ""))} if header else set(_NAME.findall(code))
        share = sum(max((_alike(name, other, likeness) for other in there), default=0.0) for name in names) / len(names)
        score = share - len(code) / 10_000
        if share >= cutoff and score > best:
            best, line, text = score, getattr(node, "lineno", 0), code
    return f"line {line}: {text[:160]}" if text else ""


def _alike(name: str, other: str, known: dict[tuple[str, str], float]) -> float:
    if (name, other) not in known:
        known[name, other] = difflib.SequenceMatcher(None, name, other, autojunk=False).ratio()
    return known[name, other]


def _kinds(wanted: str) -> tuple[type[ast.AST], ...]:
    """What can be a candidate: the same kind of thing as the pattern."""
    if wanted.startswith(("class ", "def ")):
        return (ast.ClassDef, ast.FunctionDef)
    try:
        first = parse_ast(wanted).body[0]
    except (SyntaxError, ValueError, IndexError):
        return (ast.Call, ast.Assign, ast.Attribute, ast.AnnAssign, ast.Return)
    return (type(first.value),) if isinstance(first, ast.Expr) else (type(first),)
