"""Names that code reads and nothing binds: what an edit would leave behind where upstream renamed a local."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator

_ALWAYS = frozenset(dir(builtins)) | {"__file__", "__name__", "__annotations__", "__conditional_annotations__"}


def unbound(source: bytes, among: frozenset[str] | None = None) -> frozenset[str]:
    """The names (of `among`, if given) that some scope looks up in the module and neither it nor builtins has.

    A name that the code first asks for by `"name" in globals()` does not count. Raises SyntaxError.
    """
    top = symtable.symtable(source, "<source>", "exec")  # type: ignore[arg-type]
    known = _ALWAYS | {
        s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()
    }
    wanted = (frozenset(_identifiers(top)) if among is None else among) - known
    missing = frozenset(_looked_up(top, wanted))
    if missing:
        missing -= _declared_global(top)
    return missing - frozenset(_asked_for(source)) if missing and b"globals()" in source else missing


def _identifiers(table: symtable.SymbolTable) -> Iterator[str]:
    yield from table.get_identifiers()
    for child in table.get_children():
        yield from _identifiers(child)


def _looked_up(table: symtable.SymbolTable, wanted: frozenset[str]) -> Iterator[str]:
    for name in wanted.intersection(table.get_identifiers()):
        symbol = table.lookup(name)
        if (symbol.is_global() or table.get_type() == "module") and symbol.is_referenced():
            yield name
    for child in table.get_children():
        yield from _looked_up(child, wanted)


def _declared_global(table: symtable.SymbolTable) -> frozenset[str]:
    """What functions bind in the module by `global name`."""
    found = {s.get_name() for s in table.get_symbols() if s.is_declared_global() and s.is_assigned()}
    return frozenset(found).union(*(_declared_global(child) for child in table.get_children()))


def _asked_for(source: bytes) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant):
            name, right = node.left.value, [ast.unparse(comparator) for comparator in node.comparators]
            if isinstance(name, str) and right == ["globals()"]:
                yield name
