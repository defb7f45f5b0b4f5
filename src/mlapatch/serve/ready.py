"""What must hold once `/health` answers 200: every rank runs the patched bytes, and one prompt makes sense."""

from __future__ import annotations

from collections.abc import Sequence

from mlapatch.serve.preflight import PatchedFile
from mlapatch.serve.ranks import Heard, RankReport, listed


def rank_problem(report: RankReport, files: Sequence[PatchedFile]) -> str:
    """Why not every rank of this node is known to run the patched files; '' where each has logged each file's sha256.

    A patched file logs `mlapatch: NAME active in PATH sha256=HEX` when a rank imports it.
    """
    for file in files:
        heard = [one for one in report.files if one.path.endswith(_tail(file)) or file.sha256 in one.ranks]
        wrong = next(((one, sha) for one in heard for sha in one.ranks if sha != file.sha256), None)
        if wrong is not None:
            return _other_bytes(*wrong, file)
        if not heard or set(heard[0].missing) == set(report.expected):
            return f"no rank has logged that it runs the patched {file.path.name}: the server imported another SGLang"
        silent = heard[0].missing
        if silent:
            seen = listed(name for name in report.expected if name not in silent)
            return f"rank {listed(silent)} has not logged the sha256 of the patched {file.path.name} ({seen} did)"
    return ""


def _other_bytes(heard: Heard, sha: str, file: PatchedFile) -> str:
    ranks = [name for name in heard.ranks[sha] if name]
    who = f"rank {listed(ranks)}" if ranks else "the server"
    return f"{who} runs {heard.path} with sha256 {sha[:16]}..., status shows {file.sha256[:16]}..."


def _tail(file: PatchedFile) -> str:
    return "/".join(file.path.parts[-2:])
