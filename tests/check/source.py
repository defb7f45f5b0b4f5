"""Edit a source file by positions that Python's own `ast` gives: independent of the engine that is under test."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BACKEND = "FlashInferMLAAttnBackend"
DECODE = f"{BACKEND}.forward_decode"
EXTEND = f"{BACKEND}.forward_extend"
DECODE_PLAN = "FlashInferMLAIndicesUpdaterDecode.call_begin_forward"
PREFILL_PLAN = "FlashInferMLAIndicesUpdaterPrefill.call_begin_forward"
SCOPES = (DECODE, EXTEND, DECODE_PLAN, PREFILL_PLAN)


class NotHere(Exception):
    """This file has nothing that the perturbation could change."""


@dataclass(frozen=True)
class Source:
    """Python text with its tree."""

    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self.text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def at(self, line: int, column: int) -> int:
        """Offset of an ast position (columns count UTF-8 bytes)."""
        start = self._starts[line - 1]
        whole = self.text[start : self._starts[line]]
        return start + len(whole.encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Offsets of a node, the decorators of a definition included."""
        if not isinstance(node, (ast.expr, ast.stmt, ast.arg, ast.keyword)):
            raise TypeError(node)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        decorators = getattr(node, "decorator_list", [])
        line, column = (decorators[0].lineno, node.col_offset) if decorators else (node.lineno, node.col_offset)
        return self.at(line, column), self.at(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def indent(self, node: ast.stmt) -> str:
        return " " * node.col_offset

    def after(self, line: int) -> int:
        """Offset of what follows a line."""
        return self._starts[line]

    def lines(self, first: int, last: int) -> str:
        """Whole lines, from 1, the last included."""
        return self.text[self._starts[first - 1] : self._starts[last]]

    def scope(self, dotted: str) -> ast.FunctionDef | ast.ClassDef:
        body: list[ast.stmt] = self.tree.body
        found: ast.FunctionDef | ast.ClassDef | None = None
        for name in dotted.split("."):
            found = next((n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == name), None)
            if found is None:
                raise NotHere(dotted)
            body = found.body
        assert found is not None
        return found

    def within(self, dotted: str, want: Callable[[ast.AST], bool]) -> list[ast.AST]:
        """The nodes of a scope that `want` accepts, in source order."""
        found = [node for node in ast.walk(self.scope(dotted)) if want(node)]
        if not found:
            raise NotHere(dotted)
        return sorted(found, key=lambda node: self.span(node))

    def statement_of(self, dotted: str, inner: ast.AST) -> ast.stmt:
        """The simple statement of a scope that holds a node."""
        best: ast.stmt | None = None
        for node in ast.walk(self.scope(dotted)):
            if isinstance(node, ast.stmt) and any(child is inner for child in ast.walk(node)):
                best = node if best is None or self.span(node)[0] >= self.span(best)[0] else best
        assert best is not None
        return best

    def spliced(self, changes: Iterable[tuple[int, int, str]]) -> str:
        """The text with ranges replaced."""
        text, last = self.text, len(self.text)
        for start, end, new in sorted(changes, reverse=True):
            assert end <= last, "overlapping changes"
            text, last = text[:start] + new + text[end:], start
        return text


def is_cast(node: ast.AST) -> bool:
    """`X.get_key_buffer(...).to(...)`, the whole-pool cast."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "to"
        and isinstance(node.func.value, ast.Call)
        and isinstance(node.func.value.func, ast.Attribute)
        and node.func.value.func.attr == "get_key_buffer"
    )


def is_call_of(*attributes: str) -> Callable[[ast.AST], bool]:
    """Calls `x.attribute(...)`."""
    return lambda node: (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in attributes
    )


@lru_cache(maxsize=8)  # one file before, and what each patch makes of it
def parsed(source: bytes) -> ast.Module:
    """The tree, to be read only."""
    return ast.parse(source)


def same_code(one: bytes, other: bytes) -> bool:
    """Whether two files are the same but for formatting and comments."""
    return ast.dump(parsed(one)) == ast.dump(parsed(other))


def outside(source: bytes, scopes: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Everything of a file that is not in the given scopes: (name, code) of methods and top-level statements."""
    inside = set(scopes)
    return ((name, code) for scope, name, code in _parts(source) if scope not in inside)


@lru_cache(maxsize=8)
def _parts(source: bytes) -> tuple[tuple[str, str, str], ...]:
    """(scope, name, code) of methods and top-level statements; what can be no scope has the scope ''."""
    found = []
    for statement in parsed(source).body:
        if isinstance(statement, ast.ClassDef):
            for member in statement.body:
                name = f"{statement.name}.{getattr(member, 'name', type(member).__name__)}"
                found.append((name, name, ast.dump(member)))
            head = (statement.name, [ast.dump(n) for n in (*statement.bases, *statement.decorator_list)])
            found.append(("", f"class {statement.name}", repr(head)))
        else:
            scope = statement.name if isinstance(statement, ast.FunctionDef) else ""
            name = getattr(statement, "name", type(statement).__name__)
            found.append((scope, name, ast.dump(statement)))
    return tuple(found)


@lru_cache(maxsize=8)
def unbound_names(source: bytes) -> frozenset[str]:
    """Names that some code of the file loads and that nothing in the file binds: NameErrors waiting to happen."""
    import builtins
    import symtable

    missing: set[str] = set()

    def visit(table: symtable.SymbolTable, known: set[str]) -> None:
        for symbol in table.get_symbols():
            is_global = symbol.is_global() or table.get_type() == "module"
            if is_global and symbol.is_referenced() and symbol.get_name() not in known:
                missing.add(symbol.get_name())
        for child in table.get_children():
            visit(child, known)

    top = symtable.symtable(source.decode("utf-8-sig"), "file", "exec")
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    visit(top, bound | set(dir(builtins)) | {"__file__", "__name__", "__annotations__", "__conditional_annotations__"})
    return frozenset(missing - set(_guarded(parsed(source))))


def _guarded(tree: ast.Module) -> Iterator[str]:
    """The names that the code asks for by `"name" in globals()` first."""
    compares = [n for n in ast.walk(tree) if isinstance(n, ast.Compare) and ast.unparse(n).endswith(" in globals()")]
    for node in compares:
        if isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            yield node.left.value
