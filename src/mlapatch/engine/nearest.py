"""The nearest candidate to an anchor that was not found, for the reason that a verdict carries."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator

from mlapatch.engine.holes import HOLE
from mlapatch.engine.python import parse_ast


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
    wanted = HOLE.sub("_", pattern)
    best = _best(inside, wanted, 0.55)
    if best:
        return best
    elsewhere = _best(module, wanted, 0.75)
    return f"{elsewhere} (outside {scope})" if elsewhere else ""


def _named(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{prefix}{child.name}"
            yield name, child
            yield from _named(child, f"{name}.")


def _nearest_name(named: list[tuple[str, ast.AST]], scope: str) -> str:
    close = difflib.get_close_matches(scope, [name for name, _ in named], n=1, cutoff=0.5)
    if not close:
        return ""
    node = next(node for name, node in named if name == close[0])
    return f"line {getattr(node, 'lineno', 0)}: {close[0]}"


def _best(inside: ast.AST, wanted: str, cutoff: float) -> str:
    if wanted.startswith(("class ", "def ")):
        kinds: tuple[type[ast.AST], ...] = (ast.ClassDef, ast.FunctionDef)
    else:
        kinds = (ast.Call, ast.Assign, ast.Attribute, ast.AnnAssign, ast.Return)
    best, line, text = cutoff, 0, ""
    matcher = difflib.SequenceMatcher(None, "", wanted, autojunk=False)
    for node in ast.walk(inside):
        if not isinstance(node, kinds):
            continue
        code = ast.unparse(node).split("\n", 1)[0][:300]
        matcher.set_seq1(code)
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and matcher.ratio() > best:
            best, line, text = matcher.ratio(), getattr(node, "lineno", 0), code
    return f"line {line}: {text[:160]}" if text else ""
