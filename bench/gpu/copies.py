"""A copy of the payload's SGLang for each server: the environment it runs in, mlapatch on it, and its weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SITE = Path("/tmp/site")
HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
WEIGHTS = ("dummy", "attention")
FOLDER = Path("sglang", "srt", "model_loader")
CALL = "            initialize_dummy_weights(model)\n"
MODULE = "mlapatch_dummy_weights"
OWN_CALL = f"""\
            from sglang.srt.model_loader.{MODULE} import initialize

            initialize(model)
"""
SAID = "mlapatch: weights of dummy_weights.py"  # by a server that has them


def environment(site: Path, *, flashinfer: bool = False) -> dict[str, str]:
    path = [
        str(REPOSITORY / "src"),
        str(site),
        "/tmp/extra",
        str(SITE),
        str(SITE / "nvidia_cutlass_dsl/python_packages"),
    ]
    if flashinfer:
        path.insert(0, "/tmp/flashinfer")
    return {
        **os.environ,
        "PYTHONPATH": ":".join(path),
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def mlapatch(site: Path, *args: str) -> dict[str, Any]:
    """Run a verb on one copy of the payload's SGLang and return its JSON."""
    command = [sys.executable, "-m", "mlapatch", *args, "--sglang", str(site), "--json"]
    done = subprocess.run(command, env=environment(site), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited {done.returncode}:\n{done.stdout}{done.stderr}")
    return dict(json.loads(done.stdout))


def copy_of(name: str, weights: str) -> Path:
    """Where a variant's copy lies: one with other weights is another copy."""
    return Path(f"/tmp/site-{name}" if weights == "dummy" else f"/tmp/site-{name}-{weights}")


def own_copy(name: str, weights: str = "dummy") -> Path:
    """A copy of the sglang package for one variant; everything else stays in /tmp/site."""
    copy = copy_of(name, weights)
    if not copy.exists():
        copy.mkdir()
        for item in ("sglang", *(path.name for path in SITE.glob("sglang-*.dist-info"))):
            shutil.copytree(SITE / item, copy / item)
    if weights == "attention":
        give_weights(SITE, copy)
    return copy


def give_weights(site: Path, copy: Path) -> None:
    """Let the dummy loader of `copy` call dummy_weights.py; `site` has the loader as it came. SystemExit if not."""
    loader = site / FOLDER / "loader.py"
    text = loader.read_text()
    if text.count(CALL) != 1:
        raise SystemExit(
            f"{loader}: {text.count(CALL)} lines '{CALL.strip()}', one was expected: no weights for {copy}"
        )
    (copy / FOLDER / f"{MODULE}.py").write_bytes((HERE / "dummy_weights.py").read_bytes())
    (copy / FOLDER / "loader.py").write_text(text.replace(CALL, OWN_CALL))
