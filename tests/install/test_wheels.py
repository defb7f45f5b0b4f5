"""The wheel store: real wheels of the index, small wheels made here, and everything that can go wrong between."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from tests.corpus import BACKEND, RELEASES

if TYPE_CHECKING:
    from tests.conftest import TreeFactory
    from tests.corpus import Corpus


def test_the_corpus_is_real(corpus: Corpus, install_tree: TreeFactory) -> None:
    for version in RELEASES:
        release = corpus.release(version)
        assert hashlib.sha256(corpus.text(version)).hexdigest() == release.record[BACKEND]
        tree = install_tree(version)
        assert (tree / BACKEND).read_bytes() == corpus.text(version)
        assert (tree / f"sglang-{version}.dist-info" / "RECORD").is_file()
        assert any(r.startswith("torch==") for r in release.requires) or version == "0.4.6.post5"
