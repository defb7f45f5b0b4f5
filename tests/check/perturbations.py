"""Variants of SGLang's backend file, each with the verdicts that are right for it.

`FITS`: the patch must apply, and applying must commute with the change (`apply(change(f))` is `change(apply(f))`).
`MAY`: applying is right if it commutes; refusing is right too (a local that a snippet names was renamed, for example).
`DRIFTED`, `AMBIGUOUS`, `NOT_ONE`: nothing may be written; the verdict says what is wrong.
"""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.check.source import (
    BACKEND,
    DECODE,
    DECODE_PLAN,
    EXTEND,
    PREFILL_PLAN,
    SCOPES,
    NotHere,
    Source,
    is_call_of,
    is_cast,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FITS = frozenset({"applicable"})
MAY = frozenset({"applicable", "drifted"})
DRIFTED = frozenset({"drifted"})
AMBIGUOUS = frozenset({"ambiguous"})
NOT_ONE = frozenset({"ambiguous", "drifted"})


@dataclass(frozen=True)
class Perturbation:
    """A change, the verdicts that are right after it, and the anchors that it breaks (scope, a part of the pattern).

    `commutes`: where the patch applies, applying and changing must give the same code in either order. A patch that
    has no edit at any of `breaks` is not concerned: for it the change must fit like an unrelated one.
    """

    name: str
    change: Callable[[Source], str]
    allowed: frozenset[str]
    commutes: bool = True
    breaks: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.name


def rename(scopes: Sequence[str], old: Sequence[str], new: str) -> Callable[[Source], str]:
    """Rename a local or parameter (the first of `old` that is there) everywhere in each scope."""

    def change(source: Source) -> str:
        edits: list[tuple[int, int, str]] = []
        for scope in scopes:
            nodes = [n for n in ast.walk(source.scope(scope)) if isinstance(n, (ast.Name, ast.arg))]
            used = {n.id if isinstance(n, ast.Name) else n.arg for n in nodes}
            name = next((n for n in old if n in used), None)
            if name is None:
                continue
            for node in nodes:
                if isinstance(node, ast.Name) and node.id == name:
                    edits.append((*source.span(node), new))
                elif isinstance(node, ast.arg) and node.arg == name:
                    start = source.span(node)[0]
                    edits.append((start, start + len(name), new))
        if not edits:
            raise NotHere(str(old))
        return source.spliced(edits)

    return change


def one_argument_a_line(source: Source, scopes: Sequence[str] = SCOPES) -> str:
    edits = []
    for scope in scopes:
        for call in source.within(scope, lambda n: isinstance(n, ast.Call) and bool(n.args)):
            assert isinstance(call, ast.Call)
            for argument in (*call.args, *(k for k in call.keywords if k.arg)):
                if not isinstance(argument, (ast.GeneratorExp, ast.Starred)):
                    start = source.span(argument)[0]
                    edits.append((start, start, "\n" + " " * 20))
    return source.spliced(dict.fromkeys(edits))


def unparsed(source: Source, scopes: Sequence[str] = SCOPES) -> str:
    """Every simple statement of the scopes as `ast.unparse` writes it: one line, no comments inside."""
    edits = []
    for scope in scopes:
        for node in source.within(scope, lambda n: isinstance(n, (ast.Assign, ast.Expr, ast.Return))):
            edits.append((*source.span(node), ast.unparse(node)))
    return source.spliced(edits)


def commented(source: Source, scopes: Sequence[str] = SCOPES) -> str:
    edits = []
    for scope in scopes:
        for node in source.within(scope, lambda n: isinstance(n, (ast.Assign, ast.Expr))):
            assert isinstance(node, ast.stmt)
            start, end = source.span(node)
            edits.append((start, start, f"# k_buffer = pool.get_key_buffer(0).to(q.dtype)\n\n{source.indent(node)}"))
            edits.append((end, end, "  # mlapatch: active-cast gather-cast fp8-plan begin end"))
    return source.spliced(edits)


def parenthesised(source: Source) -> str:
    edits = []
    for scope in (DECODE, EXTEND):
        for node in source.within(scope, is_cast):
            edits.append((*source.span(node), f"(\n  # the pool\n{source.of(node)}\n)"))
    return source.spliced(edits)


def methods_reversed(source: Source) -> str:
    edits = []
    for name in (BACKEND, *{scope.split(".")[0] for scope in SCOPES} - {BACKEND}):
        members = [m for m in source.scope(name).body if isinstance(m, ast.FunctionDef) and not m.decorator_list]
        for member, other in zip(members, reversed(members), strict=True):
            edits.append((*source.span(member), source.of(other)))
    return source.spliced(edits)


def updaters_swapped(source: Source) -> str:
    one, other = (source.scope(scope.split(".")[0]) for scope in (DECODE_PLAN, PREFILL_PLAN))
    return source.spliced([(*source.span(one), source.of(other)), (*source.span(other), source.of(one))])


def plan_branches_swapped(source: Source) -> str:
    for node in source.within(DECODE_PLAN, lambda n: isinstance(n, ast.If) and bool(n.orelse)):
        assert isinstance(node, ast.If)
        if ast.unparse(node.test) == "not init_metadata_replay":
            test = ast.unparse(node.test).removeprefix("not ")
            first = source.lines(node.body[0].lineno, node.body[-1].end_lineno or 0)
            second = source.lines(node.orelse[0].lineno, node.orelse[-1].end_lineno or 0)
            start, end = source.at(node.lineno, 0), source.after(node.end_lineno or 0)
            pad = source.indent(node)
            return source.spliced([(start, end, f"{pad}if {test}:\n{second}{pad}else:\n{first}")])
    raise NotHere


def appended(text: str) -> Callable[[Source], str]:
    return lambda source: source.text + "\n\n" + textwrap.dedent(text)


def copy_of(scope: str, name: str, into: str = "") -> Callable[[Source], str]:
    """The same lines once more, as another method: of the same class, of the class `into`, or of the module."""

    def change(source: Source) -> str:
        method = source.scope(scope)
        copied = source.lines(method.lineno, method.end_lineno or 0)
        head, _, rest = copied.partition("(")
        copied = head.rpartition(" ")[0] + f" {name}(" + rest
        if into == "module":
            return source.text + "\n\n" + textwrap.dedent(copied)
        if into and "." not in into:
            return source.text + f"\n\nclass {into}:\n{copied}"
        end = source.after(source.scope(scope.split(".")[0]).end_lineno or 0)
        return source.spliced([(end, end, "\n" + copied)])

    return change


def before_statement(scope: str, want: Callable[[ast.AST], bool], text: str) -> Callable[[Source], str]:
    """Insert a line before the statement that holds the first match; `{it}` is that statement."""

    def change(source: Source) -> str:
        statement = source.statement_of(scope, source.within(scope, want)[0])
        pad = source.indent(statement)
        new = textwrap.indent(text.replace("{it}", " ".join(ast.unparse(statement).split())), pad)
        start = source.at(statement.lineno, 0)
        return source.spliced([(start, start, new + "\n")])

    return change


def on_cast(scopes: Sequence[str], edit: Callable[[ast.Call, Source], str]) -> Callable[[Source], str]:
    """Rewrite the whole-pool casts of some scopes."""

    def change(source: Source) -> str:
        edits = []
        for scope in scopes:
            for node in source.within(scope, is_cast):
                assert isinstance(node, ast.Call)
                edits.append((*source.span(node), edit(node, source)))
        return source.spliced(edits)

    return change


def inner(call: ast.Call, source: Source) -> str:
    """`X.get_key_buffer(Y)` of a cast."""
    assert isinstance(call.func, ast.Attribute)
    return source.of(call.func.value)


def with_argument(scope: str, attributes: Sequence[str], argument: str) -> Callable[[Source], str]:
    """One more argument at the end of the calls of a scope."""

    def change(source: Source) -> str:
        edits = []
        for node in source.within(scope, is_call_of(*attributes)):
            assert isinstance(node, ast.Call)
            if node.keywords and "=" not in argument:
                raise NotHere("a positional argument cannot follow a keyword")
            end = source.span(node)[1] - 1
            comma = "" if source.text[:end].rstrip().endswith(",") else ", "
            edits.append((end, end, f"{comma}{argument}"))
        return source.spliced(edits)

    return change


def replaced(old: str, new: str, *, times: int = 1) -> Callable[[Source], str]:
    def change(source: Source) -> str:
        if source.text.count(old) < times:
            raise NotHere(old)
        return source.text.replace(old, new)

    return change


def under_with(scope: str) -> Callable[[Source], str]:
    def change(source: Source) -> str:
        method = source.scope(scope)
        start = source.at(method.body[0].lineno, 0)
        end = source.after(method.end_lineno or 0)
        body = textwrap.indent(source.text[start:end], "    ")
        return source.spliced([(start, end, f"{source.indent(method.body[0])}with torch.no_grad():\n{body}")])

    return change


def decorated(source: Source) -> str:
    edits = []
    for scope in (DECODE, EXTEND):
        method = source.scope(scope)
        start = source.at(method.lineno, 0)
        edits.append((start, start, f"{source.indent(method)}@torch.no_grad()\n"))
    return source.spliced(edits)


def parameter_added(source: Source) -> str:
    edits = []
    for scope in (DECODE, EXTEND):
        method = source.scope(scope)
        assert isinstance(method, ast.FunctionDef)
        end = source.span(method.args.defaults[-1])[1]
        edits.append((end, end, ", sinks: Optional[torch.Tensor] = None"))
    return source.spliced(edits)


def split_cast(source: Source) -> str:
    statement = source.statement_of(DECODE, source.within(DECODE, is_cast)[0])
    assert isinstance(statement, ast.Assign)
    call = statement.value
    assert isinstance(call, ast.Call)
    target, pad = ast.unparse(statement.targets[0]), source.indent(statement)
    new = f"raw = {inner(call, source)}\n{pad}{target} = raw.to({ast.unparse(call.args[0])})"
    return source.spliced([(*source.span(statement), new)])
