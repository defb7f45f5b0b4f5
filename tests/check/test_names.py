from __future__ import annotations

import pytest

from mlapatch.engine.names import unbound
from tests.corpus import RELEASES, TARGETS, Corpus


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x = 1\ndef f():\n    return x", set()),
        ("def f():\n    return x", {"x"}),
        ("def f(x):\n    return [x for y in x if y]", set()),
        ("def f():\n    def g():\n        return h\n    return g", {"h"}),
        ("class A:\n    b = 1\n    def f(self):\n        return b", {"b"}),
        ("import os.path\nfrom a import b as c\ndef f():\n    return os, c", set()),
        ("from a import b as c\ndef f():\n    return b", {"b"}),
        ("def f():\n    global later\n    later = 1\ndef g():\n    return later", set()),
        ("def f():\n    if 'maybe' in globals():\n        return maybe()", set()),
        ("def f():\n    return print(__file__, len([]))", set()),
        ("missing()", {"missing"}),
        ("# coding: latin-1\nx = '\xe4'\ndef f():\n    return x", set()),
    ],
)
def test_unbound(code: str, expected: set[str]) -> None:
    assert unbound(code.encode("latin-1")) == expected


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("path", TARGETS)
def test_the_real_files_have_nothing_that_would_hide_a_wrong_edit(corpus: Corpus, version: str, path: str) -> None:
    assert not unbound(corpus.text(version, path)) & {"self", "forward_batch", "kv_indptr", "kv_indices", "q", "layer"}
