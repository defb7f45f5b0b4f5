"""What must hold once `/health` answers 200: every rank runs the patched bytes, and one prompt makes sense."""

from __future__ import annotations

from collections.abc import Sequence

from mlapatch.serve.preflight import PatchedFile
from mlapatch.serve.transcript import Transcript


def rank_problem(log: Transcript, files: Sequence[PatchedFile]) -> str:
    """Why not every rank is known to run the patched files; '' where each has logged each file's sha256.

    A patched file logs `mlapatch: NAME active in PATH sha256=HEX` when a rank imports it.
    """
    for file in files:
        marks = [mark for mark in log.marks if mark.path.endswith(_tail(file)) or mark.sha256 == file.sha256]
        wrong = next((mark for mark in marks if mark.sha256 != file.sha256), None)
        if wrong is not None:
            who = f"rank {wrong.rank}" if wrong.rank else "the server"
            return f"{who} runs {wrong.path} with sha256 {wrong.sha256[:16]}..., status shows {file.sha256[:16]}..."
        heard = {mark.rank for mark in marks}
        ranks = [rank for rank in log.ranks if log.states[rank].phase is not None]
        if not marks or (heard == {None} and len(marks) < len(ranks)):
            return f"no rank has logged that it runs the patched {file.path.name}: the server imported another SGLang"
        silent = [rank for rank in ranks if rank not in heard] if heard != {None} else []
        if silent:
            return f"rank {', '.join(silent)} has not logged the sha256 of the patched {file.path.name}"
    return ""


def _tail(file: PatchedFile) -> str:
    return "/".join(file.path.parts[-2:])
