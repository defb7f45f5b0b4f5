"""A parsed source file: find a scope by its dotted name, look inside it only, put a changed scope back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias, cast

import libcst as cst

from mlapatch.engine.pattern import FORMATTING, Bindings, Pattern, PatternError
from mlapatch.engine.python import check_readable

Definition: TypeAlias = cst.ClassDef | cst.FunctionDef
Scope: TypeAlias = cst.Module | Definition


class Unreadable(ValueError):
    """The file is not Python that can be taken apart and put together to the same bytes."""


@dataclass(frozen=True)
class Found:
    """One match: the node, and what the holes bind."""

    node: cst.CSTNode
    bindings: Bindings


@lru_cache(maxsize=8)
def parse(source: bytes) -> cst.Module:
    """Parse a file of any coding, BOM and line ending; raises Unreadable.

    Python's own parser goes first: it says what is wrong in words, and libcst's would end the process on some nestings.
    """
    try:
        check_readable(source)
        return cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise Unreadable(f"line {error.raw_line}: not Python: {error.message.splitlines()[0]}") from None
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise Unreadable(f"the file cannot be decoded: {error}") from None
    except ValueError as error:
        raise Unreadable(str(error)) from None


def check_exact(module: cst.Module, source: bytes) -> None:
    """Raise Unreadable where taking the file apart and putting it together again would change a byte."""
    if (again := module.bytes) != source:
        pairs = zip(again.splitlines(keepends=True), source.splitlines(keepends=True), strict=False)
        line = next((n for n, (one, other) in enumerate(pairs, 1) if one != other), 1)
        raise Unreadable(f"line {line}: the parser would change line endings, form feeds or blanks at the file's end")


@lru_cache(maxsize=2048)
def _code(part: cst.BaseStatement | cst.EmptyLine, indent: str, newline: str) -> str:
    """One top-level part as text; nodes are immutable and told by identity, so variants of a file share most of it."""
    return cst.Module([], default_indent=indent, default_newline=newline).code_for_node(part)


def printed(module: cst.Module) -> bytes:
    """`module.bytes`, where what another variant of the file has printed before is not printed again."""
    parts = (*module.header, *module.body, *module.footer)
    text = "".join(_code(part, module.default_indent, module.default_newline) for part in parts)
    if not module.has_trailing_newline or not text:
        return module.bytes
    return text.encode(module.encoding)


def statements(scope: Scope) -> Sequence[cst.BaseStatement]:
    """The statements of a scope's own body."""
    if isinstance(scope, cst.Module):
        return scope.body
    body = scope.body
    return body.body if isinstance(body, cst.IndentedBlock) else ()


def find_scope(module: cst.Module, dotted: str) -> list[tuple[Scope, ...]]:
    """Every path of scopes from the module to `dotted`; more than one when a name is defined twice."""
    paths: list[tuple[Scope, ...]] = [(module,)]
    if dotted == "module":
        return paths
    for name in dotted.split("."):
        paths = [
            (*path, statement)
            for path in paths
            for statement in statements(path[-1])
            if isinstance(statement, (cst.ClassDef, cst.FunctionDef)) and statement.name.value == name
        ]
    return paths


def put_back(path: tuple[Scope, ...], changed: Scope) -> cst.Module:
    """The module with the last scope of `path` replaced by `changed`."""
    for parent, child in zip(path[-2::-1], path[:0:-1], strict=True):
        body = [changed if statement is child else statement for statement in statements(parent)]
        changed = with_statements(parent, cast("list[cst.BaseStatement]", body))
    return cast("cst.Module", changed)


def with_statements(scope: Scope, body: Sequence[cst.BaseStatement]) -> Scope:
    """The scope with another body."""
    if isinstance(scope, cst.Module):
        return scope.with_changes(body=body)
    return scope.with_changes(body=scope.body.with_changes(body=body))


_FIELDS: dict[type, tuple[str, ...]] = {}


def _fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """The fields of a node type that can hold code (formatting is never searched)."""
    if kind not in _FIELDS:
        names = (item.name for item in fields(kind))
        _FIELDS[kind] = tuple(n for n in names if n not in FORMATTING and not n.startswith("whitespace"))
    return _FIELDS[kind]


def below(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The children of a node that hold code, in source order."""
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, (list, tuple)):
            for child in value:
                if isinstance(child, cst.CSTNode):
                    yield child


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Every node of code below, in source order, the node itself first."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(list(below(current))))


@lru_cache(maxsize=64)
def _by_type(scope: Definition) -> dict[type, list[cst.CSTNode]]:
    """The nodes of one scope by type; nodes are immutable and compared by identity, so this never goes stale."""
    found: dict[type, list[cst.CSTNode]] = {}
    for node in walk(scope):
        if node is not scope:
            found.setdefault(type(node), []).append(node)
    return found


def matches(scope: Scope, pattern: Pattern) -> list[Found]:
    """Every place in a scope that the pattern matches; in a module, only among its own top-level statements."""
    if isinstance(scope, cst.Module):
        nodes: Iterable[cst.CSTNode] = _top_level(scope)
    else:
        nodes = _by_type(scope).get(pattern.root, ())
    bound = ((node, pattern.match(node)) for node in nodes)
    return [Found(node, bindings) for node, bindings in bound if bindings is not None]


def _top_level(module: cst.Module) -> Iterator[cst.CSTNode]:
    for statement in module.body:
        yield statement
        if isinstance(statement, cst.SimpleStatementLine):
            for small in statement.body:
                yield small
                if isinstance(small, cst.Expr):
                    yield small.value


def overlap(nodes: Sequence[cst.CSTNode]) -> bool:
    """Whether one of the nodes lies inside another."""
    wanted = {id(node) for node in nodes}
    return len(nodes) > 1 and any(id(inner) in wanted for node in nodes for inner in walk(node) if inner is not node)


def _parents(scope: Scope, wanted: set[int]) -> dict[int, cst.CSTNode]:
    """The parent of every wanted node and of each of its ancestors up to the scope, by `id` of the child."""
    parents: dict[int, cst.CSTNode] = {}
    missing = set(wanted)
    path: list[cst.CSTNode] = []
    stack: list[tuple[cst.CSTNode, int]] = [(scope, 0)]
    while stack and missing:
        node, depth = stack.pop()
        del path[depth:]
        path.append(node)
        if id(node) in missing:
            missing.discard(id(node))
            parents.update((id(child), parent) for parent, child in pairwise(path))
        stack.extend((child, depth + 1) for child in reversed(list(below(node))))
    return parents


def _rebuilt(node: cst.CSTNode, touched: Mapping[int, object], new: Mapping[int, Sequence[cst.CSTNode]]) -> cst.CSTNode:
    """The node with descendants replaced by what `new` has for their `id`; only their ancestors are made anew."""
    changes: dict[str, object] = {}
    for name in _fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            if id(value) in touched:
                (changes[name],) = new.get(id(value)) or [_rebuilt(value, touched, new)]
        elif isinstance(value, (list, tuple)) and any(id(child) in touched for child in value):
            changes[name] = [
                item
                for child in value
                for item in (
                    new.get(id(child)) or ([_rebuilt(child, touched, new)] if id(child) in touched else [child])
                )
            ]
    return node.with_changes(**changes)


def swap(scope: Scope, new: Mapping[int, cst.CSTNode]) -> Scope:
    """The scope with the nodes whose `id` is a key replaced."""
    touched = _parents(scope, set(new))
    return cast("Scope", _rebuilt(scope, touched, {key: [node] for key, node in new.items()}))


def insert_beside(scope: Scope, places: dict[int, list[cst.BaseStatement]], *, after: bool) -> Scope:
    """The scope with statements inserted beside the statements whose node's `id` is a key; raises PatternError."""
    parents = _parents(scope, set(places))
    beside: dict[int, tuple[cst.BaseStatement, list[cst.BaseStatement]]] = {}
    for key, statements_of_one in places.items():
        statement = _statement_of(key, parents, scope)
        beside.setdefault(id(statement), (statement, []))[1].extend(statements_of_one)
    new = {key: [old, *added] if after else [*added, old] for key, (old, added) in beside.items()}
    return cast("Scope", _rebuilt(scope, parents, new))


def _statement_of(key: int, parents: Mapping[int, cst.CSTNode], scope: Scope) -> cst.BaseStatement:
    """The statement on a line of its own that a node stands in, or that it is."""
    node = next(child for child in below(parents[key]) if id(child) == key)
    first = True
    while node is not scope:
        if isinstance(node, cst.SimpleStatementLine) or (first and isinstance(node, cst.BaseCompoundStatement)):
            return node
        if isinstance(node, (cst.BaseCompoundStatement, cst.SimpleStatementSuite)):
            break
        node, first = parents[id(node)], False
    raise PatternError("the anchor does not stand in a statement that has a line of its own")
