"""A wrong edit is never made: every perturbation of the real files, every patch.

The oracles use Python's `ast` and `symtable` only. By default the newest release's files are perturbed;
`MLAPATCH_PERTURB=all` perturbs one file for each distinct content on the index (`MLAPATCH_PERTURB=0.5.1.post1,0.5.9`
those), which takes an hour.
"""

from __future__ import annotations

import ast
import os
from collections import Counter
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from mlapatch.catalogue import load_catalogue
from mlapatch.engine.judgement import Judgement
from mlapatch.engine.verdict import Fits, apply, definitions, judge
from tests.check.perturbations import FITS, Perturbation
from tests.check.source import NotHere, Source, outside, parsed, same_code, unbound_names
from tests.check.table import RUNNER_TABLE, TABLE
from tests.corpus import ALL_CONTENTS, BACKEND, RUNNER, Corpus, cache_root

if TYPE_CHECKING:
    from mlapatch.engine.patch import Patch

CHOSEN = os.environ.get("MLAPATCH_PERTURB", "0.5.23")
VERSIONS = ALL_CONTENTS if CHOSEN == "all" else tuple(CHOSEN.split(","))
ALL_PATCHES = tuple(load_catalogue().patches.values())
PATCHES = [patch for patch in ALL_PATCHES if f"sglang/{patch.target}" == BACKEND]
REPLACED = {"to", "data_type"}  # the only identifiers that an edit may take away

CASES = [(BACKEND, p) for p in TABLE] + [(RUNNER, p) for p in RUNNER_TABLE]


@cache
def original(version: str, path: str = BACKEND) -> bytes:
    return Corpus(cache_root()).text(version, path)


@cache
def patched(version: str, name: str) -> bytes:
    patch = next(p for p in ALL_PATCHES if p.name == name)
    result = apply(original(version, f"sglang/{patch.target}"), patch, Version(version))
    assert isinstance(result, Fits), result
    return result.source


def changed(perturbation: Perturbation, data: bytes) -> bytes:
    return perturbation.change(Source(data.decode())).encode()


def concerned(patch: Patch, perturbation: Perturbation, version: Version) -> bool:
    """Whether the patch has an edit at one of the anchors that the perturbation breaks."""
    return not perturbation.breaks or any(
        edit.scope == scope and part in edit.anchor and edit.count.expected(version) != (0,)
        for edit in patch.edits
        for scope, part in perturbation.breaks
    )


def assert_right(before: bytes, after: bytes, patch: Patch) -> None:
    """The edit took nothing away, changed nothing outside its scopes, and needs no name that is not there."""
    compile(after, "after.py", "exec", dont_inherit=True)
    scopes = {edit.scope for edit in patch.edits}
    kept, now = Counter(outside(before, scopes)), Counter(outside(after, scopes))
    assert not kept - now, "code outside the patch's scopes changed"
    old = {name.split(".")[0] for name, _ in kept if "." in name}
    assert not [n for n, _ in now - kept if "." in n and n.split(".")[0] in old], "added to a class outside the scopes"
    assert not unbound_names(after) - unbound_names(before)
    assert set(identifiers(before) - identifiers(after)) <= REPLACED


@lru_cache(maxsize=8)
def identifiers(data: bytes) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in ast.walk(parsed(data)):
        for name in ("id", "attr", "arg", "name"):
            value = getattr(node, name, None)
            if isinstance(value, str):
                found[value] += 1
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("path", "perturbation"), CASES, ids=lambda value: str(value) if isinstance(value, Perturbation) else ""
)
def test_never_a_wrong_edit(version: str, path: str, perturbation: Perturbation) -> None:
    release = Version(version)
    try:
        before = changed(perturbation, original(version, path))
    except NotHere:
        pytest.skip("this file has nothing to change")
    for patch in ALL_PATCHES:
        if f"sglang/{patch.target}" != path or not patch.supports(release):
            continue
        result = apply(before, patch, release)
        verdict = judge(before, patch, release, prove=isinstance(result, Judgement))
        allowed = perturbation.allowed if concerned(patch, perturbation, release) else FITS
        assert str(verdict.verdict) in allowed, f"{patch.name}: {verdict}"
        if isinstance(result, Judgement):
            assert result.verdict is verdict.verdict
            assert result.reason
            continue
        assert_right(before, result.source, patch)
        again = judge(result.source, patch, release)
        assert str(again.verdict) == "applied", f"{patch.name}: {again}"
        if perturbation.commutes:
            try:
                other = changed(perturbation, patched(version, patch.name))
            except NotHere:  # the change needs what the patch replaced
                continue
            assert same_code(result.source, other), f"{patch.name} does not commute with '{perturbation}'"


def helpers(patch: Patch) -> list[str]:
    """The names that the patch defines; of many, every third by default."""
    names = sorted({name for edit in patch.edits for name, _ in definitions(edit)})
    return names if CHOSEN == "all" or len(names) < 8 else names[::3]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_helper_of_the_same_name_is_never_taken_for_the_patch(version: str, patch: Patch) -> None:
    release = Version(version)
    if not patch.supports(release):
        pytest.skip("unsupported")
    for name in helpers(patch):
        before = original(version) + f"\n\ndef {name}(*args):\n    return args[0]\n".encode()
        verdict = judge(before, patch, release)
        assert str(verdict.verdict) in {"edited", "drifted", "ambiguous"}, f"{name}: {verdict}"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_after_applying_only_the_patchs_own_code_counts(version: str, patch: Patch) -> None:
    release = Version(version)
    if not patch.supports(release):
        pytest.skip("unsupported")
    done = patched(version, patch.name)
    anchor = b"def get_cuda_graph_seq_len_fill_value"
    elsewhere = done.replace(anchor, b"def unrelated(self):\n        return 2\n\n    " + anchor)
    assert elsewhere != done
    assert str(judge(elsewhere, patch, release).verdict) == "applied"
    source = Source(done.decode())
    for name in helpers(patch):
        helper = source.scope(name)
        start, end = source.span(helper)
        without = source.spliced([(start, end, "")]).encode()
        assert str(judge(without, patch, release).verdict) == "edited", name
        last = source.span(helper.body[-1])
        other = source.spliced([(*last, "return None")]).encode()
        assert str(judge(other, patch, release).verdict) == "edited", name
