"""Names that code reads and nothing binds: what an edit would leave behind where upstream renamed a local."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator
from functools import lru_cache

_ALWAYS = frozenset(dir(builtins)) | {"__file__", "__name__", "__annotations__", "__conditional_annotations__"}


@lru_cache(maxsize=4)
def unbound(source: bytes) -> frozenset[str]:
    """The names that some scope looks up in the module and that neither the module nor builtins has.

    A name that the code first asks for by `"name" in globals()` does not count. Raises SyntaxError.
    """
    top = symtable.symtable(source, "<source>", "exec")  # type: ignore[arg-type]
    known = _ALWAYS | {
        s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()
    }
    missing = frozenset(_looked_up(top, known | _declared_global(top)))
    return missing - frozenset(_asked_for(source)) if missing and b"globals()" in source else missing


def _looked_up(table: symtable.SymbolTable, known: frozenset[str]) -> Iterator[str]:
    for symbol in table.get_symbols():
        in_module = symbol.is_global() or table.get_type() == "module"
        if in_module and symbol.is_referenced() and symbol.get_name() not in known:
            yield symbol.get_name()
    for child in table.get_children():
        yield from _looked_up(child, known)


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
