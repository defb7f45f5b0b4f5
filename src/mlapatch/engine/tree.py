"""A parsed source file: find a scope by its dotted name, look inside it only, put a changed scope back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TypeAlias, cast

import libcst as cst

from mlapatch.engine.pattern import FORMATTING, Bindings, Pattern, PatternError

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
    """Parse a file of any coding, BOM and line ending; raises Unreadable, also where a byte would change."""
    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise Unreadable(f"line {error.raw_line}: not Python: {error.message.splitlines()[0]}") from None
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise Unreadable(f"the file cannot be decoded: {error}") from None
    if module.bytes != source:
        raise Unreadable("the file has line endings or form feeds that the parser would change")
    return module


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


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Every node of code below, in source order, the node itself first."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        below: list[cst.CSTNode] = []
        for name in _fields(type(current)):
            value = getattr(current, name)
            if isinstance(value, cst.CSTNode):
                below.append(value)
            elif isinstance(value, (list, tuple)):
                below.extend(child for child in value if isinstance(child, cst.CSTNode))
        stack.extend(reversed(below))


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


class _Swap(cst.CSTTransformer):
    """Replace nodes by identity."""

    def __init__(self, new: dict[int, Callable[[cst.CSTNode], cst.CSTNode]]) -> None:
        super().__init__()
        self.new = new

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode:
        make = self.new.get(id(original_node))
        return make(updated_node) if make else updated_node


def swap(scope: Scope, new: dict[int, Callable[[cst.CSTNode], cst.CSTNode]]) -> Scope:
    """The scope with the nodes whose `id` is a key replaced."""
    return cast("Scope", scope.visit(_Swap(new)))


class _Insert(cst.CSTTransformer):
    """Insert statements before or after the statement that holds a given node."""

    def __init__(self, places: dict[int, list[cst.BaseStatement]], *, after: bool) -> None:
        super().__init__()
        self.places = places
        self.after = after
        self.placed = 0

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.FlattenSentinel[cst.BaseStatement]:
        new = self._held(original_node)
        if not new:
            return updated_node
        statement = cast("cst.BaseStatement", updated_node)
        return cst.FlattenSentinel([statement, *new] if self.after else [*new, statement])

    def _held(self, node: cst.CSTNode) -> list[cst.BaseStatement]:
        inside: Iterable[cst.CSTNode] = ()
        if isinstance(node, cst.BaseCompoundStatement):
            inside = (node,)  # by its own header only: `class X` and `def x`
        elif isinstance(node, cst.SimpleStatementLine):
            inside = walk(node)
        found = [self.places[id(one)] for one in inside if id(one) in self.places]
        self.placed += len(found)
        return [statement for new in found for statement in new]


def insert_beside(scope: Scope, places: dict[int, list[cst.BaseStatement]], *, after: bool) -> Scope:
    """The scope with statements inserted beside the statements whose node's `id` is a key; raises PatternError."""
    insert = _Insert(places, after=after)
    if isinstance(scope, cst.Module):
        body: list[cst.BaseStatement] = []
        for statement in scope.body:  # anchors in a module are at its top level: nothing inside is visited
            new = insert.on_leave(statement, statement)
            body += new if isinstance(new, cst.FlattenSentinel) else [cast("cst.BaseStatement", new)]
        changed = with_statements(scope, body)
    else:
        changed = cast("Scope", scope.visit(insert))
    if insert.placed != len(places):
        raise PatternError("the anchor does not stand in a statement that has a line of its own")
    return changed
