"""`superseded` needs positive evidence of a whole fix; half a fix, or only an absence, is `drifted`."""

from __future__ import annotations

import pytest
from packaging.version import Version

from mlapatch.engine.patch import Patch
from mlapatch.engine.verdict import Fits, apply, judge
from tests.check.source import DECODE, EXTEND, Source
from tests.check.test_perturbations import PATCHES
from tests.check.upstream_fixes import gathered_rows, native_fp8, native_fp8_on_some_gpus, shared_shadow
from tests.corpus import WITHOUT_CAST, Corpus

VERSIONS = ("0.5.9", "0.5.16", "0.5.23")


def verdict_on(text: str, patch: Patch, version: str) -> str:
    data = text.encode()
    compile(data, "variant.py", "exec", dont_inherit=True)
    assert not isinstance(apply(data, patch, Version(version)), Fits), "a wrong edit"
    return str(judge(data, patch, Version(version)).verdict)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_whole_fix_is_superseded(corpus: Corpus, version: str, patch: Patch) -> None:
    source = Source(corpus.text(version).decode())
    assert verdict_on(native_fp8(source), patch, version) == "superseded"
    assert verdict_on(gathered_rows(source, (DECODE, EXTEND)), patch, version) == "superseded"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_half_a_fix_or_an_unknown_one_is_drift(corpus: Corpus, version: str, patch: Patch) -> None:
    source = Source(corpus.text(version).decode())
    for half in (
        gathered_rows(source, (EXTEND,)),
        gathered_rows(source, (DECODE,)),
        native_fp8(source, (DECODE,)),
        native_fp8(source, (EXTEND,)),
        shared_shadow(source),
    ):
        assert verdict_on(half, patch, version) == "drifted"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_fix_that_still_casts_on_other_gpus_is_not_one(corpus: Corpus, version: str, patch: Patch) -> None:
    source = Source(corpus.text(version).decode())
    allowed = {"drifted", "superseded"} if patch.requires.sm else {"drifted"}  # fp8-plan is for the same GPUs
    assert verdict_on(native_fp8_on_some_gpus(source), patch, version) in allowed


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_words_of_a_fix_elsewhere_prove_nothing(corpus: Corpus, version: str, patch: Patch) -> None:
    text = corpus.text(version).decode()
    calls = ("pool.get_mla_kv_buffer(q)", "wrapper.run(q, ckv_scale=1.0, kpe_scale=1.0)")
    other = "\n\ndef other(pool, wrapper, q):\n" + "".join(f"    {call}\n" for call in calls)
    verdict = judge((text + other).encode(), patch, Version(version))
    assert str(verdict.verdict) == "applicable"


@pytest.mark.parametrize("version", WITHOUT_CAST)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_before_the_cast_there_is_nothing_to_fix(corpus: Corpus, version: str, patch: Patch) -> None:
    verdict = judge(corpus.text(version), patch, Version(version))
    assert str(verdict.verdict) == "unsupported"
    assert "0.4.6.post5" in verdict.reason
    assert version in verdict.reason
    # Without a known version the structure alone must not call it fixed either.
    assert str(judge(corpus.text(version), patch, None).verdict) == "drifted"
