"""Apply a patch's edits to one parsed file: a closed union of results; nothing is raised for expected trouble."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, cast

import libcst as cst
from packaging.version import Version

from mlapatch.engine import tree
from mlapatch.engine.layout import laid_out_as
from mlapatch.engine.patch import Count, Edit, Patch
from mlapatch.engine.pattern import (
    Bindings,
    PatternError,
    compile_pattern,
    enclosed,
    fill_expression,
    fill_statements,
)


@dataclass(frozen=True)
class Patched:
    """The file after the edits."""

    module: cst.Module


@dataclass(frozen=True)
class Misfit:
    """Why an edit or condition does not fit: matches found and expected, and in which scope."""

    scope: str
    pattern: str
    expected: tuple[int, ...]
    found: int
    what: str = ""  # other trouble than a count, in words

    @property
    def ambiguous(self) -> bool:
        """More matches than expected, rather than fewer."""
        return not self.what and self.found > max(self.expected, default=0)


Edited: TypeAlias = Patched | Misfit


def apply_edits(module: cst.Module, patch: Patch, version: Version | None) -> Edited:
    """Every edit of the patch in turn; the first that does not fit ends it.

    Edits that find the same text are counted together by the author: each one sees what the former ones left.
    """
    for edit in patch.edits:
        result = apply_edit(module, edit, version)
        if isinstance(result, Misfit):
            return result
        module = result.module
    return Patched(module)


def apply_edit(module: cst.Module, edit: Edit, version: Version | None) -> Edited:
    """One edit. The scope is found first, and nothing outside it is visited."""
    expected = edit.count.expected(version)
    paths = tree.find_scope(module, edit.scope)
    if len(paths) != 1:
        if not paths and 0 in expected:
            return Patched(module)
        return Misfit(edit.scope, edit.anchor, (1,), len(paths), "" if paths else "the scope is missing")
    path = paths[0]
    try:
        changed = _changed(path[-1], edit, expected, module.config_for_parsing)
    except PatternError as error:
        return Misfit(edit.scope, edit.anchor, expected, 0, str(error))
    return changed if isinstance(changed, Misfit) else Patched(tree.put_back(path, changed))


def _changed(
    scope: tree.Scope, edit: Edit, expected: tuple[int, ...], config: cst.PartialParserConfig
) -> tree.Scope | Misfit:
    if edit.at:
        return _at_end(scope, edit, config)
    pattern = compile_pattern(edit.anchor)
    found = tree.matches(scope, pattern)
    if len(found) not in expected:
        return Misfit(edit.scope, edit.anchor, expected, len(found))
    if edit.find:
        if tree.overlap([one.node for one in found]):
            raise PatternError("one match lies inside another")
        return tree.swap(scope, {id(one.node): _replacement(one, edit, config) for one in found})
    places = {id(one.node): _inserted(scope, edit, one.bindings, config) for one in found}
    return tree.insert_beside(scope, places, after=bool(edit.after))


def _replacement(one: tree.Found, edit: Edit, config: cst.PartialParserConfig) -> cst.CSTNode:
    old = one.node
    if not isinstance(old, cst.BaseExpression):
        raise PatternError("only an expression can be replaced")
    new = fill_expression(_newlines(edit.replace, config), one.bindings, config)
    if isinstance(old, cst.Call) and isinstance(new, cst.Call) and "\n" not in edit.replace:
        new = laid_out_as(new, old)
    if old.lpar and not new.lpar:
        new = new.with_changes(lpar=old.lpar, rpar=old.rpar)  # with the comments and line breaks in them
    return enclosed(new)


def _inserted(
    scope: tree.Scope, edit: Edit, bindings: Bindings, config: cst.PartialParserConfig
) -> list[cst.BaseStatement]:
    """The statements to insert; between the definitions of a module they stand after two empty lines."""
    body, comments = fill_statements(_newlines(edit.code.strip("\n") + "\n", config), bindings, config)
    if comments:
        raise PatternError("a snippet may not end in a comment; move it above a statement")
    if isinstance(scope, cst.Module) and edit.at != "start":
        first = cast("cst.SimpleStatementLine", body[0])
        empty = [cst.EmptyLine(indent=False), cst.EmptyLine(indent=False)]
        body[0] = first.with_changes(leading_lines=[*empty, *first.leading_lines])
    return body


def _at_end(scope: tree.Scope, edit: Edit, config: cst.PartialParserConfig) -> tree.Scope:
    if not isinstance(scope, cst.Module) and not isinstance(scope.body, cst.IndentedBlock):
        raise PatternError("the body is on the line of the header; nothing can be inserted there")
    body = _inserted(scope, edit, {}, config)
    old = list(tree.statements(scope))
    if edit.at == "end":
        new = [*old, *body]
        if isinstance(scope, cst.Module) and not scope.has_trailing_newline:
            # The original bytes come back from the state, so the missing newline is not lost.
            scope = scope.with_changes(has_trailing_newline=True)
        return tree.with_statements(scope, new)
    skip = 1 if old and _is_docstring(old[0]) else 0
    while isinstance(scope, cst.Module) and skip < len(old) and _is_future_import(old[skip]):
        skip += 1
    return tree.with_statements(scope, [*old[:skip], *body, *old[skip:]])


def _is_docstring(statement: cst.BaseStatement) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    first = statement.body[0]
    return isinstance(first, cst.Expr) and isinstance(first.value, (cst.SimpleString, cst.ConcatenatedString))


def _is_future_import(statement: cst.BaseStatement) -> bool:
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    first = statement.body[0]
    return (
        isinstance(first, cst.ImportFrom) and isinstance(first.module, cst.Name) and first.module.value == "__future__"
    )


def _newlines(text: str, config: cst.PartialParserConfig) -> str:
    """Snippets carry `\\n`; the file's own line ending goes into multi-line strings too."""
    newline = cast("str", config.default_newline)
    return text if newline == "\n" else text.replace("\n", newline)


def count_matches(module: cst.Module, scope: str, pattern: str) -> int | None:
    """How often a pattern matches in a scope; None where the scope is missing or defined twice."""
    paths = tree.find_scope(module, scope)
    return len(tree.matches(paths[0][-1], compile_pattern(pattern))) if len(paths) == 1 else None


def check_count(module: cst.Module, scope: str, pattern: str, count: Count, version: Version | None) -> Misfit | None:
    """A misfit where a pattern does not match exactly as often as it should."""
    expected = count.expected(version)
    found = count_matches(module, scope, pattern)
    if found is None:
        return None if 0 in expected else Misfit(scope, pattern, expected, 0, "the scope is missing or defined twice")
    return None if found in expected else Misfit(scope, pattern, expected, found)
