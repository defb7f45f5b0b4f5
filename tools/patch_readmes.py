#!/usr/bin/env python3
"""Write the diff section of patches/*/README.md from the real file of one SGLang release.

python tools/patch_readmes.py            # writes
python tools/patch_readmes.py --check    # exits 1 where a README is not what it would write
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from packaging.version import Version

from mlapatch.catalogue import load_catalogue
from mlapatch.engine.patch import Patch
from mlapatch.engine.verdict import Fits, apply
from mlapatch.install.wheels import WheelStore

RELEASE = "0.5.23"
START, END = "<!-- diff -->", "<!-- /diff -->"
LONGEST = 30  # longer insertions are the helpers, which stand in the folder


def edits_diff(patch: Patch, source: bytes) -> str:
    """The hunks of a patch without context, less the inserted helpers."""
    outcome = apply(source, patch, Version(RELEASE))
    if not isinstance(outcome, Fits):
        raise SystemExit(f"{patch.name} does not fit {RELEASE}: {outcome.reason}")
    before, after = source.decode().splitlines(), outcome.source.decode().splitlines()
    hunks: list[list[str]] = []
    for line in list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]:
        if line.startswith("@@"):
            hunks.append([])
        else:
            hunks[-1].append(line)
    shown = [hunk for hunk in hunks if len(hunk) <= LONGEST]
    return "\n\n".join("\n".join(hunk) for hunk in shown)


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    catalogue, stale = load_catalogue(), []
    for name, patch in catalogue.patches.items():
        path = Path(catalogue.folders[name]) / "README.md"
        target = f"sglang/{patch.target}"
        source = WheelStore.default().files(RELEASE, [target]).files[target]
        text = path.read_text(encoding="utf-8")
        head, _, rest = text.partition(START)
        _, _, tail = rest.partition(END)
        section = f"{START}\nSGLang {RELEASE}:\n\n```diff\n{edits_diff(patch, source)}\n```\n{END}"
        new = f"{head}{section}{tail}"
        if new != text:
            stale.append(str(path))
            if not check:
                path.write_text(new, encoding="utf-8")
    print("\n".join(stale) or "all current")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
