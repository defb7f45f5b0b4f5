"""Printing a variant part by part gives what libcst prints."""

from __future__ import annotations

import pytest
from packaging.version import Version

from mlapatch.catalogue import load_catalogue
from mlapatch.engine import tree
from mlapatch.engine.edit import Patched, apply_edits
from tests.corpus import Corpus


@pytest.mark.parametrize("version", ["0.4.6.post5", "0.5.1", "0.5.9", "0.5.23"])
def test_part_by_part(corpus: Corpus, version: str) -> None:
    for patch in load_catalogue().patches.values():
        module = tree.parse(corpus.text(version, f"sglang/{patch.target}"))
        edited = apply_edits(module, patch, Version(version))
        if isinstance(edited, Patched):
            assert tree.printed(edited.module) == edited.module.bytes
        assert tree.printed(module) == module.bytes


@pytest.mark.parametrize("source", [b"", b"\n", b"# only\n", b"x = 1", b"x = 1\r\n# end\r\n", b"\xef\xbb\xbfx = 1\n"])
def test_odd_files(source: bytes) -> None:
    assert tree.printed(tree.parse(source)) == tree.parse(source).bytes
