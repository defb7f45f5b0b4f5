"""Verdicts: what a patch is to a file. Every verdict comes from the bytes; marker comments decide nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar

import libcst as cst
from packaging.version import Version

from mlapatch.engine import tree
from mlapatch.engine.edit import Misfit, Patched, apply_edits, check_count, count_matches
from mlapatch.engine.judgement import Judgement, Verdict
from mlapatch.engine.names import unbound
from mlapatch.engine.nearest import nearest
from mlapatch.engine.patch import Edit, Patch
from mlapatch.engine.python import check_compiles, parse_ast


@dataclass(frozen=True)
class Fits:
    """The patched bytes: parsed again, compiled, every postcondition checked."""

    source: bytes


Applied: TypeAlias = Fits | Judgement
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _bounded(
    how: Callable[Concatenate[bytes, Patch, _P], _T],
) -> Callable[Concatenate[bytes, Patch, _P], _T | Judgement]:
    """What is nested too deeply for a walk over it is no bug: it is not read."""

    @wraps(how)
    def bounded(source: bytes, patch: Patch, /, *args: _P.args, **kwargs: _P.kwargs) -> _T | Judgement:
        try:
            return how(source, patch, *args, **kwargs)
        except RecursionError:
            return _unreadable(patch, tree.Unreadable("code is nested too deeply to be taken apart"))

    return bounded


@_bounded
def judge(source: bytes, patch: Patch, version: Version | None, *, prove: bool = True) -> Judgement:
    """What this patch is to this file, by structure alone: applied, applicable, superseded, drifted, ambiguous,
    edited or unsupported (by version). `lost`, `conflicts` and the machine's limits need more than one file.
    Without `prove` the edits and postconditions are tried, but the outcome is not printed and compiled.
    """
    try:
        module = tree.parse(source)
        blank_end = source.rstrip(b"\r\n").endswith((b" ", b"\t"))
        if blank_end or b"\r" in source or b"\f" in source:  # else known to be exact; `apply` looks at every file
            tree.check_exact(module, source)
    except tree.Unreadable as error:
        return _unreadable(patch, error)
    presence = _presence(module, patch, version)
    if presence is not None:
        return presence
    edited = _edited(source, module, patch, version)
    if isinstance(edited, Judgement):
        return edited
    if prove and (trouble := _not_code(source, tree.printed(edited.module), patch)):
        return trouble
    outcome = _postconditions(edited.module, patch, version, quick=True)
    if outcome is not None:
        return outcome
    return Judgement(patch.name, Verdict.APPLICABLE, "every edit fits", next=f"mlapatch apply {patch.name}")


@lru_cache(maxsize=32)
@_bounded
def presence(source: bytes, patch: Patch, version: Version | None) -> Judgement | None:
    """Applied or edited, or None where nothing of the patch is in the file; drifted where that cannot be told."""
    try:
        return _presence(tree.parse(source), patch, version)
    except tree.Unreadable as error:
        return _unreadable(patch, error)


@lru_cache(maxsize=8)  # a command proves its result before it takes the lock, and again with the lock
@_bounded
def apply(source: bytes, patch: Patch, version: Version | None) -> Applied:
    """The file with the patch, proven before it is returned, or the judgement that says why not."""
    try:
        module = tree.parse(source)
        tree.check_exact(module, source)
    except tree.Unreadable as error:
        return _unreadable(patch, error)
    outcome = _edited(source, module, patch, version)
    return _proven(source, outcome, patch, version) if isinstance(outcome, Patched) else outcome


def _unreadable(patch: Patch, error: tree.Unreadable) -> Judgement:
    return Judgement(
        patch.name,
        Verdict.DRIFTED,
        f"{patch.target}: {error}",
        scope=patch.target,
        expected="Python source that can be taken apart and put together again",
        found=str(error),
        next="put the file right or back (git checkout, or install this SGLang anew), then run the same command again",
    )


def _edited(source: bytes, module: cst.Module, patch: Patch, version: Version | None) -> Patched | Judgement:
    if not patch.supports(version):
        why = patch.sglang_reason or f"it supports SGLang {patch.sglang}"
        return Judgement(
            patch.name, Verdict.UNSUPPORTED, f"SGLang {version}: {why}", expected=patch.sglang, found=str(version)
        )
    edited = apply_edits(module, patch, version)
    return _misfit(module, source, patch, edited, version) if isinstance(edited, Misfit) else edited


def _proven(source: bytes, edited: Patched, patch: Patch, version: Version | None) -> Applied:
    """What is about to be written, taken from its bytes: they compile, and what they parse to has everything."""
    result = edited.module.bytes
    if trouble := _not_code(source, result, patch):
        return trouble
    try:
        again = tree.parse(result)
    except tree.Unreadable as error:
        return Judgement(patch.name, Verdict.DRIFTED, f"the patched {patch.target} would not parse: {error}")
    if again.encoding != edited.module.encoding:  # an inserted first line can say another one
        why = f"the patched {patch.target} would be {again.encoding}, not {edited.module.encoding}"
        return Judgement(patch.name, Verdict.DRIFTED, why)
    return _postconditions(again, patch, version) or Fits(result)


def _not_code(source: bytes, result: bytes, patch: Patch) -> Judgement | None:
    """Why the edited file is no code that runs: it does not compile, or uses names that nothing binds."""
    try:
        check_compiles(result, patch.target)
        new = unbound(result, _names(patch))  # upstream renamed a local or parameter that the patch names
        new = new and new - unbound(source, new)
    except (SyntaxError, ValueError) as error:
        return Judgement(patch.name, Verdict.DRIFTED, f"the patched {patch.target} would not compile: {error}")
    if not new:
        return None
    names = ", ".join(sorted(new))
    return Judgement(
        patch.name, Verdict.DRIFTED, f"{patch.target}: the edits use {names}, which nothing binds there", found=names
    )


def _names(patch: Patch) -> frozenset[str]:
    """Every name that the edits can bring; what holes stand for stays in its own scope."""
    texts = (text for edit in patch.edits for text in (edit.code, edit.replace))
    return frozenset(name for text in texts for name in re.findall(r"[^\W\d]\w*", text))


def _postconditions(
    module: cst.Module, patch: Patch, version: Version | None, *, quick: bool = False
) -> Judgement | None:
    """None where every postcondition holds after the edits; `quick` believes that what was inserted is there."""
    presence = _presence(module, patch, version, quick=quick)
    if presence is not None and presence.verdict is Verdict.APPLIED:
        return None
    why = presence.reason if presence else "none of its postconditions hold"
    return Judgement(patch.name, Verdict.DRIFTED, f"after the edits {why}")


def _presence(module: cst.Module, patch: Patch, version: Version | None, *, quick: bool = False) -> Judgement | None:
    """Applied, edited, or None where nothing of the patch is in the file."""
    traces = 0
    trouble: list[tuple[str, str]] = []
    for post in patch.posts:
        if post.absent:
            if count_matches(module, post.scope, post.absent):
                trouble.append((post.scope, f"'{post.absent}' is still there"))
            continue
        pattern = post.present or post.kept
        misfit = check_count(module, post.scope, pattern, post.count, version)
        traces += bool(post.present and count_matches(module, post.scope, post.present))
        if misfit:
            trouble.append((post.scope, f"'{pattern}' matches {misfit.found} times, not {_times(misfit)}"))
    if not traces:
        return None
    found = ((edit.scope, _insertion_trouble(module, edit, quick=quick)) for edit in patch.edits)
    trouble = [*((scope, what) for scope, what in found if what), *trouble]
    if not trouble:
        return Judgement(patch.name, Verdict.APPLIED, "all postconditions hold", traces=traces)
    scope, what = trouble[0]
    more = f" (and {len(trouble) - 1} more)" if len(trouble) > 1 else ""
    return Judgement(
        patch.name,
        Verdict.EDITED,
        f"code inside the patch's own edits was changed: in {scope}, {what}{more}",
        scope=scope,
        found=what,
        next=f"take your change out of the patch's lines (mlapatch revert {patch.name} shows it), then run it again",
        traces=traces,
        troubles=len(trouble),
    )


@lru_cache(maxsize=256)
def definitions(edit: Edit) -> tuple[tuple[str, str], ...]:
    """The functions and classes that an insertion brings: name, and the AST as text (formatting does not count)."""
    return tuple((name, dump) for name, dump, _ in _inserted(edit) if name)


@lru_cache(maxsize=256)
def _inserted(edit: Edit) -> tuple[tuple[str, str, str], ...]:
    """The statements that an insertion brings: name if it defines one, AST as text, first line of code.

    What stands beside a statement inside a function is left to the postconditions: it may stand at any depth.
    """
    if not edit.code or not (edit.at or edit.anchor.startswith(("class ", "def "))):
        return ()
    return tuple((_defined(item), ast.dump(item), _first_line(item)) for item in parse_ast(edit.code).body)


def _defined(item: ast.stmt) -> str:
    return item.name if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else ""


def _first_line(item: ast.stmt) -> str:
    return ast.unparse(item).partition("\n")[0][:80]


def _insertion_trouble(module: cst.Module, edit: Edit, *, quick: bool) -> str:
    """What is wrong with the statements that an insertion brings, '' where all are there (`quick`: names only)."""
    wanted = _inserted(edit)
    if not wanted:
        return ""
    paths = tree.find_scope(module, edit.scope)
    if len(paths) != 1:
        return "the scope is missing" if not paths else "the scope is defined twice"
    here = tree.statements(paths[0][-1])
    plain: set[str] | None = None
    for name, dump, line in wanted:
        if name:
            named = [s for s in here if isinstance(s, tree.Definition) and s.name.value == name]
            if not named:
                return f"{name} is missing"
            if len(named) > 1:
                return f"{name} is defined {len(named)} times"
            if not quick and _all_dumped(module, named[0]) != [dump]:
                return f"{name} is not what the patch inserts"
        if name or quick:
            continue
        if plain is None:
            plain = {one for s in here if not isinstance(s, tree.Definition) for one in _all_dumped(module, s)}
        if dump not in plain:
            return f"'{line}' is missing"
    return ""


def _all_dumped(module: cst.Module, statement: cst.BaseStatement) -> list[str]:
    """The AST of each statement on a line, as text; libcst prints it without the indentation around it."""
    return [ast.dump(item) for item in parse_ast(module.code_for_node(statement)).body]


def _times(misfit: Misfit) -> str:
    return " or ".join(str(n) for n in misfit.expected)


def _misfit(module: cst.Module, source: bytes, patch: Patch, misfit: Misfit, version: Version | None) -> Judgement:
    if not misfit.ambiguous and _is_superseded(module, patch):
        return Judgement(
            patch.name,
            Verdict.SUPERSEDED,
            f"upstream has its own fix in {patch.superseded[0].scope}; the patch is not needed"
            + (f" ({patch.remove_when})" if patch.remove_when else ""),
        )
    verdict = Verdict.AMBIGUOUS if misfit.ambiguous else Verdict.DRIFTED
    near = nearest(source, misfit.scope, misfit.pattern)
    expected = f"{_times(misfit)} x {misfit.pattern}" if misfit.pattern else f"the scope {misfit.scope}"
    found = misfit.what or str(misfit.found)
    at = f" of SGLang {version}" if version else ""
    return Judgement(
        patch.name,
        verdict,
        f"{patch.target}{at}, {misfit.scope}: expected {expected}, found {found}"
        + (f"; nearest candidate: {near}" if near else ""),
        scope=misfit.scope,
        expected=expected,
        found=found,
        nearest=near,
        next=f"mlapatch check {patch.name} --all-releases, or report this with the reason above",
    )


def _is_superseded(module: cst.Module, patch: Patch) -> bool:
    """Positive evidence of an upstream fix, and nothing left to patch."""
    if not patch.superseded:
        return False
    for fix in patch.superseded:
        if not any(count_matches(module, fix.scope, pattern) for pattern in fix.present):
            return False
        if any(count_matches(module, fix.scope, pattern) for pattern in fix.absent):
            return False
    left = [] if any(fix.absent for fix in patch.superseded) else [post for post in patch.posts if post.absent]
    gone = [count_matches(module, post.scope, post.absent) for post in left]
    return all(count == 0 for count in gone)
