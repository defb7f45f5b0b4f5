"""`mlapatch demo`: the whole story on a real SGLang wheel in a temporary folder, through the command line itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mlapatch.errors import MlapatchError
from mlapatch.exits import Exit
from mlapatch.install.wheels import WheelStore
from mlapatch.install.write import sha256
from mlapatch.outcome import Outcome, Text
from mlapatch.progress import ProgressLine

TARGET = "srt/layers/attention/flashinfer_mla_backend.py"
STORY = (
    (("status",), "what is there"),
    (("apply", "gather-cast"), "the patch of the original story"),
    (("status", "--require", "gather-cast"), "what a launch script checks"),
    (("diff", "gather-cast"), "what it changed"),
    (("apply", "gather-cast"), "applying it again changes nothing"),
    (("revert",), "and back"),
)


def demo(*, release: str) -> Outcome:
    """Fetch the wheel, run each step as a user would type it, and prove that the bytes came back."""
    progress = ProgressLine()
    with tempfile.TemporaryDirectory(prefix="mlapatch-demo-") as folder:
        site = Path(folder) / "site-packages"
        site.mkdir()
        print(f"fetching the real sglang {release} wheel (kept for the next time)", flush=True)
        WheelStore.default(progress).unpack(release, site)
        progress.close()
        file = site / "sglang" / TARGET
        before = sha256(file.read_bytes())
        for step, why in STORY:
            _type(step, why, site)
        after = sha256(file.read_bytes())
        lines = [f"before {before}", f"after  {after}"]
        if before != after:
            raise MlapatchError(
                Exit.FOUND,
                "the bytes did not come back",
                where=str(file),
                expected=before,
                found=after,
                next="report it with the two sha256: this must not happen",
            )
        proof = f"the original bytes are back; the same works on your SGLang: mlapatch status{os.linesep}"
        return Outcome(data={"release": release, "sha256": before}, blocks=[Text(("", *lines, proof.rstrip()))])


def _type(step: tuple[str, ...], why: str, site: Path) -> None:
    print(f"\n# {why}\n$ mlapatch {' '.join(step)}", flush=True)
    command = [sys.executable, "-m", "mlapatch", *step]
    done = subprocess.run(command, env={**os.environ, "MLAPATCH_SGLANG": str(site)}, check=False)
    if done.returncode:
        raise MlapatchError(
            Exit.FOUND,
            "a step of the demo failed",
            where=" ".join(step),
            expected="exit 0",
            found=str(done.returncode),
            next="mlapatch doctor; the step's own words stand above",
        )
