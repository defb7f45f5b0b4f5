"""Whether patterns, replacements and inserted code are Python with holes, checked as a patch is loaded.

By Python's own parser: quick, unharmed by hostile nesting, and without libcst, which a warm `status` must not pay for.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache

from mlapatch.engine.holes import HEADER, MANY, ONE, with_stand_ins
from mlapatch.engine.python import parse_ast

MOST_DEEP = 64
MOST_MANY = 3


class PatchFormError(ValueError):
    """`patch.toml` does not say a patch: the message names the key, what was expected and what was found."""


def check_pattern(text: str, where: str, *, expression: bool = False) -> frozenset[str]:
    """The stand-ins that a pattern binds; it must be one expression, or else one simple statement or a header."""
    if HEADER.fullmatch(text.strip()) and not expression:
        return frozenset()
    source, names = with_stand_ins(text.strip())
    plain = [name.removeprefix(ONE).removeprefix(MANY) for name in names]
    if len(set(plain)) != len(plain):
        raise PatchFormError(f"{where}: a hole is named twice in {text!r}")
    if sum(name.startswith(MANY) for name in names) > MOST_MANY:  # each one multiplies the ways to match
        raise PatchFormError(f"{where}: at most {MOST_MANY} holes of the form '{{x...}}' in {text!r:.60}")
    body = _parsed(source, f"{where}: {text!r}").body
    if len(body) != 1 or hasattr(body[0], "body") or isinstance(body[0], _BLOCKS):
        raise PatchFormError(f"{where}: {text!r} must be one expression, one simple statement, 'class X' or 'def x'")
    if expression and not isinstance(body[0], ast.Expr):
        raise PatchFormError(f"{where}: 'find' must be an expression, found {text!r}")
    _check_places(body, names, f"{where}: {text!r}")
    return frozenset(names)


def check_replacement(text: str, bound: frozenset[str], where: str) -> None:
    """A replacement is one expression, and uses what the pattern binds."""
    source, names = with_stand_ins(text.strip())
    body = _parsed(source, f"{where}: the replacement").body
    if len(body) != 1 or not isinstance(body[0], ast.Expr):
        raise PatchFormError(f"{where}: the replacement must be one expression")
    _check_bound(names, bound, where)
    _check_places(body, names, f"{where}: the replacement")


def check_code(code: str, bound: frozenset[str], where: str) -> None:
    """Inserted code is Python; where the anchor has holes, they may be used in it."""
    source, names = with_stand_ins(code) if bound else (code, [])
    body = _parsed(source, f"{where}: the inserted code").body
    if not body:
        raise PatchFormError(f"{where}: the inserted code has no statement")
    if len(_LINE_END.split(source.rstrip())) > (body[-1].end_lineno or 0):
        raise PatchFormError(f"{where}: the inserted code may not end in a comment; move it above a statement")
    _check_bound(names, bound, where)
    _check_places(body, names, f"{where}: the inserted code")


_LINE_END = re.compile(r"\r\n|\r|\n")  # as Python counts lines; a form feed ends none
_BLOCKS: tuple[type[ast.stmt], ...] = (ast.Match,)  # the others have a body


@lru_cache(maxsize=2048)  # patches share patterns and snippets
def _tree(source: str) -> ast.Module:
    tree = parse_ast(source)
    below: list[ast.AST] = [tree]
    for _ in range(MOST_DEEP):
        below = [child for node in below for child in ast.iter_child_nodes(node)]
        if not below:
            return tree
    raise RecursionError("nested too deeply")  # for libcst, which walks it recursively


def _parsed(source: str, where: str) -> ast.Module:
    try:
        return _tree(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise PatchFormError(f"{where} is not Python: {line}{message or 'nested too deeply'}") from None


def _check_bound(names: list[str], bound: frozenset[str], where: str) -> None:
    for name in names:
        if name not in bound:
            shown = f"{name.removeprefix(MANY)}..." if name.startswith(MANY) else name.removeprefix(ONE)
            raise PatchFormError(f"{where}: {{{shown}}} is used, and the pattern does not bind it")


def _check_places(body: list[ast.stmt], names: list[str], where: str) -> None:
    """`{x...}` stands among the arguments of a call, and holes never stand inside a string."""
    if not names:
        return
    seen: set[str] = set()
    nodes = [node for statement in body for node in ast.walk(statement)]
    for node in nodes:
        if isinstance(node, ast.Call):
            seen |= {a.value.id for a in node.args if isinstance(a, ast.Starred) and isinstance(a.value, ast.Name)}
        elif isinstance(node, ast.Name) and node.id.startswith(ONE):
            seen.add(node.id)
    lost = [name for name in names if name not in seen]
    if lost:
        shown = lost[0].removeprefix(ONE).removeprefix(MANY)
        kind = "'{x...}' stands for arguments of a call" if lost[0].startswith(MANY) else "'{x}' for one expression"
        raise PatchFormError(f"{where}: the hole '{shown}' has no place there; {kind}")
