"""A patch's snippets as a module, as an applied patch has them (the patched file imports torch itself)."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

PATCHES = Path(__file__).resolve().parents[2] / "patches"
CAST_SLOTS = PATCHES / "common" / "cast_slots.py"
FUSED_DECODE = (
    CAST_SLOTS,
    PATCHES / "common" / "row_width.py",
    PATCHES / "common" / "active_cast.py",
    *(PATCHES / "fused-decode" / f"fused_{part}.py" for part in ("imports", "numbers", "kernel", "combine", "decode")),
)


def load(files: Sequence[Path]) -> ModuleType:
    """The files as one module, written to disk: Triton reads a kernel's source from a file."""
    path = Path(tempfile.mkdtemp(prefix="mlapatch-bench-")) / "snippets.py"
    path.write_text("import torch\n\n\n" + "\n\n".join(file.read_text() for file in files))
    spec = importlib.util.spec_from_file_location("mlapatch_snippets", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
