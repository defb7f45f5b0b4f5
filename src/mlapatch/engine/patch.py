"""A patch as data: what `patch.toml` and its snippets say, checked and frozen.

Nothing here reads a file. `load_patch` takes the parsed table and the text of every snippet that it names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from mlapatch.engine.form import PatchFormError, check_code, check_pattern, check_replacement

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
SCOPE = re.compile(r"module|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
TARGET = re.compile(r"(?:[A-Za-z0-9_][\w.-]{0,99}/){0,15}[A-Za-z0-9_][\w.-]{0,99}\.py")

MOST = 100
"""Edits, postconditions or other items of one list; the largest patch here has about a dozen."""
LONGEST = 1000
"""Characters of a pattern or another text that is no inserted code."""
MOST_CODE = 1 << 16
"""Characters that all edits insert together."""


@dataclass(frozen=True)
class Count:
    """The exact number of matches, by SGLang version where it differs."""

    by_version: tuple[tuple[str, int], ...]

    def expected(self, version: Version | None) -> tuple[int, ...]:
        """The allowed counts: one for a known version, any of the listed ones where the version is unknown."""
        if version is not None:
            for specifier, count in self.by_version:
                if SpecifierSet(specifier).contains(version, prereleases=True):
                    return (count,)
        return tuple(dict.fromkeys(count for _, count in self.by_version))


@dataclass(frozen=True)
class Edit:
    """One edit: in `scope`, replace what `find` matches, or insert `code` before or after an anchor or at an end."""

    scope: str
    count: Count
    find: str = ""
    replace: str = ""
    before: str = ""
    after: str = ""
    at: str = ""  # "start" or "end" of the scope's body
    code: str = ""  # the text that is inserted

    @property
    def anchor(self) -> str:
        """The pattern whose matches are counted ('' for `at`)."""
        return self.find or self.before or self.after


@dataclass(frozen=True)
class Post:
    """A postcondition: in `scope`, `present` matches exactly `count` times, `absent` does not match, or `kept`, which
    the edits rely on and which is no sign of the patch, still matches exactly `count` times.
    """

    scope: str
    count: Count
    present: str = ""
    absent: str = ""
    kept: str = ""


@dataclass(frozen=True)
class Superseded:
    """What an upstream fix looks like: in `scope`, one of `present` matches (never just an absence), and none of
    `absent`, which shows that the fix is not for everyone (the cast is still made on other GPUs, for example).
    """

    scope: str
    present: tuple[str, ...]
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Requires:
    """What must be true of the machine: flashinfer versions and GPU compute capabilities (e.g. 90)."""

    flashinfer: str = ""
    sm: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Patch:
    """A named patch of one file of SGLang."""

    name: str
    summary: str
    target: str
    sglang: str
    sglang_reason: str
    edits: tuple[Edit, ...]
    posts: tuple[Post, ...]
    superseded: tuple[Superseded, ...] = ()
    requires: Requires = field(default_factory=Requires)
    excludes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()
    remove_when: str = ""
    arithmetic: str = "stock"  # "stock": results are bit-identical to SGLang's; "own": judged against float64
    digest: str = ""
    raw: str = ""  # canonical JSON of everything above: what the digest covers, kept with the state for revert

    def supports(self, version: Version | None) -> bool:
        """Whether this SGLang version is in the supported range (an unknown version is left to the structure)."""
        return version is None or SpecifierSet(self.sglang).contains(version, prereleases=True)


def _need(table: Mapping[str, Any], key: str, kind: type, where: str, default: Any = None) -> Any:
    value = table.get(key, default)
    if value is None:
        raise PatchFormError(f"{where}: the key '{key}' is missing")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise PatchFormError(f"{where}: '{key}' must be {kind.__name__}, found {type(value).__name__} {value!r:.60}")
    if isinstance(value, str) and key != "code" and len(value) > LONGEST:
        raise PatchFormError(f"{where}: '{key}' has {len(value):,} characters, and {LONGEST:,} are allowed")
    if isinstance(value, list) and len(value) > MOST:
        raise PatchFormError(f"{where}: '{key}' has {len(value):,} items, and {MOST} are allowed")
    return value


def _strings(table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = _need(table, key, list, where, [])
    if not all(isinstance(item, str) for item in value):
        raise PatchFormError(f"{where}: '{key}' must be a list of strings, found {value!r:.60}")
    if (long := max(map(len, value), default=0)) > LONGEST:
        raise PatchFormError(f"{where}: '{key}' has a text of {long:,} characters, and {LONGEST:,} are allowed")
    return tuple(value)


def _known(table: Any, keys: Sequence[str], where: str) -> None:
    if not isinstance(table, Mapping):
        raise PatchFormError(f"{where}: a table is needed, found {table!r:.60}")
    unknown = sorted(set(table) - set(keys))
    if unknown:
        raise PatchFormError(f"{where}: unknown key {unknown[0]!r:.60}; known keys are {', '.join(sorted(keys))}")


def _specifier(text: str, where: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise PatchFormError(f"{where}: {text!r:.60} is not a version specifier such as '>=0.5.9'") from None
    return text


def _count(table: Mapping[str, Any], where: str) -> Count:
    value = table.get("count", 1)
    pairs = list(value.items()) if isinstance(value, Mapping) else [("", value)]
    if not 0 < len(pairs) <= MOST:
        raise PatchFormError(f"{where}: 'count' must have 1 to {MOST} entries, found {len(pairs):,}")
    for specifier, count in pairs:
        _specifier(specifier, where)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= 1000:
            raise PatchFormError(f"{where}: 'count' must be a whole number from 0 to 1000, found {count!r:.60}")
    return Count(tuple(pairs))


def _scope(table: Mapping[str, Any], where: str) -> str:
    scope = str(_need(table, "scope", str, where))
    if not SCOPE.fullmatch(scope):
        raise PatchFormError(f"{where}: scope {scope!r:.60} is not 'module' or a dotted name such as 'Class.method'")
    return scope


def _edit(table: Mapping[str, Any], snippets: Mapping[str, str], where: str) -> Edit:
    _known(table, ("scope", "find", "replace", "before", "after", "at", "insert", "code", "count"), where)
    places = [key for key in ("find", "before", "after", "at") if table.get(key)]
    if len(places) != 1:
        raise PatchFormError(f"{where}: exactly one of find, before, after, at is needed, found {places or 'none'}")
    text = {key: str(_need(table, key, str, where, "")) for key in ("find", "replace", "before", "after", "at", "code")}
    if text["find"]:
        if not text["replace"]:
            raise PatchFormError(f"{where}: 'find' needs 'replace'")
        if text["code"] or table.get("insert"):
            raise PatchFormError(f"{where}: 'find' takes 'replace', not 'code' or 'insert'")
    else:
        names = (table["insert"],) if isinstance(table.get("insert"), str) else _strings(table, "insert", where)
        if bool(names) == bool(text["code"]):
            raise PatchFormError(f"{where}: an insertion needs either 'insert' (snippet files) or 'code'")
        for name in names:
            if name not in snippets:
                raise PatchFormError(f"{where}: the snippet {name!r:.60} was not found in the patch's folder")
        if names:
            text["code"] = "\n\n".join(snippets[name].strip("\n") + "\n" for name in names)
    if text["at"] not in ("", "start", "end"):
        raise PatchFormError(f"{where}: 'at' must be 'start' or 'end', found {text['at']!r:.60}")
    edit = Edit(scope=_scope(table, where), count=_count(table, where), **text)
    bound = check_pattern(edit.anchor, where, expression=bool(edit.find)) if edit.anchor else frozenset()
    if edit.find:
        check_replacement(edit.replace, bound, where)
    else:
        check_code(edit.code, bound, where)
    return edit


def _signed(posts: tuple[Post, ...], where: str) -> tuple[Post, ...]:
    """The postconditions, of which one must be a sign that the patch is there: else no file is ever 'applied'."""
    if not any(post.present for post in posts):
        raise PatchFormError(f"{where}: a [[post]] with 'present' is needed: the sign that the patch is there")
    return posts


def _post(table: Mapping[str, Any], where: str) -> Post:
    kinds = ("present", "absent", "kept")
    _known(table, ("scope", "count", *kinds), where)
    patterns = {kind: str(_need(table, kind, str, where, "")) for kind in kinds}
    if sum(bool(pattern) for pattern in patterns.values()) != 1:
        raise PatchFormError(f"{where}: exactly one of 'present', 'absent' and 'kept' is needed")
    check_pattern("".join(patterns.values()), where)
    return Post(_scope(table, where), _count(table, where), **patterns)


def _superseded(table: Mapping[str, Any], where: str) -> Superseded:
    _known(table, ("scope", "present", "absent"), where)
    present, absent = _strings(table, "present", where), _strings(table, "absent", where)
    if not present:
        raise PatchFormError(f"{where}: 'present' needs at least one pattern")
    for pattern in (*present, *absent):
        check_pattern(pattern, where)
    return Superseded(_scope(table, where), present, absent)


def _requires(table: Mapping[str, Any], where: str) -> Requires:
    _known(table, ("flashinfer", "sm", "reason"), where)
    sm = _need(table, "sm", list, where, [])
    if not all(type(item) is int for item in sm):
        raise PatchFormError(f"{where}: 'sm' must be a list of numbers such as [90], found {sm!r:.60}")
    flashinfer = _specifier(str(_need(table, "flashinfer", str, where, "")), where)
    return Requires(flashinfer, tuple(sm), str(_need(table, "reason", str, where, "")))


KEYS = (
    "name", "summary", "target", "sglang", "sglang-reason", "excludes", "after", "upstream", "remove-when",
    "arithmetic", "requires", "edit", "post", "superseded",
)  # fmt: skip


def snippet_names(table: Mapping[str, Any]) -> list[str]:
    """The snippet files that a patch's table names, in order, before the table is checked."""
    names: list[str] = []
    edits = table.get("edit", [])
    for edit in edits if isinstance(edits, list) else []:
        if isinstance(edit, Mapping):
            insert = edit.get("insert", [])
            listed = insert if isinstance(insert, list) else [insert]
            names += [name for name in listed if isinstance(name, str)]
    return list(dict.fromkeys(names))


def load_patch(table: Mapping[str, Any], snippets: Mapping[str, str], *, where: str = "patch.toml") -> Patch:
    """Check a parsed `patch.toml` and its snippets (text by name); raises PatchFormError."""
    _known(table, KEYS, where)
    name = str(_need(table, "name", str, where))
    if not NAME.fullmatch(name):
        raise PatchFormError(f"{where}: name {name!r:.60} must be lower-case letters, digits and dashes")
    target = str(_need(table, "target", str, where))
    if not TARGET.fullmatch(target) or ".." in target.split("/"):
        raise PatchFormError(f"{where}: target {target!r:.120} must be a .py path inside the sglang package")
    edits = _need(table, "edit", list, where)
    posts = _need(table, "post", list, where)
    fixes = _need(table, "superseded", list, where, [])
    if not edits or not posts:
        raise PatchFormError(f"{where}: at least one [[edit]] and one [[post]] are needed")
    arithmetic = str(_need(table, "arithmetic", str, where, "stock"))
    if arithmetic not in ("stock", "own"):
        raise PatchFormError(f"{where}: 'arithmetic' must be 'stock' or 'own', found {arithmetic!r:.60}")
    frozen = tuple(_edit(edit, snippets, f"{where} edit {i}") for i, edit in enumerate(edits, 1))
    if (code := sum(len(edit.code) for edit in frozen)) > MOST_CODE:
        raise PatchFormError(f"{where}: the edits insert {code:,} characters, and {MOST_CODE:,} are allowed")
    canonical = json.dumps({"table": table, "snippets": dict(snippets)}, sort_keys=True, ensure_ascii=True, default=str)
    return Patch(
        name=name,
        summary=str(_need(table, "summary", str, where)),
        target=target,
        sglang=_specifier(str(_need(table, "sglang", str, where, "")), where),
        sglang_reason=str(_need(table, "sglang-reason", str, where, "")),
        edits=frozen,
        posts=_signed(tuple(_post(post, f"{where} post {i}") for i, post in enumerate(posts, 1)), where),
        superseded=tuple(_superseded(fix, f"{where} superseded {i}") for i, fix in enumerate(fixes, 1)),
        requires=_requires(_need(table, "requires", dict, where, {}), f"{where} requires"),
        excludes=_strings(table, "excludes", where),
        after=_strings(table, "after", where),
        upstream=_strings(table, "upstream", where),
        remove_when=str(_need(table, "remove-when", str, where, "")),
        arithmetic=arithmetic,
        digest=hashlib.sha256(canonical.encode()).hexdigest(),
        raw=canonical,
    )


def patch_from_raw(raw: str) -> Patch:
    """The patch that a state folder kept, exactly as it was applied."""
    kept = json.loads(raw)
    return load_patch(kept["table"], kept["snippets"], where="kept patch")
