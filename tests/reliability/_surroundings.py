"""Environments that no installer leaves behind: garbage in variables, no home, terminals and encodings of any kind."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import mlapatch.cli
from tests.reliability._attempts import CODES, SENTINEL, Tally
from tests.reliability._place import Place

SRC = Path(mlapatch.cli.__file__).parents[2]
#: What is set (bytes where it is no UTF-8); None takes a variable out.
ODD: dict[str, dict[str, str | bytes | None]] = {
    "LANG=C": {"LANG": "C", "LC_ALL": "C"},
    "POSIX without UTF-8": {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ASCII output": {"PYTHONIOENCODING": "ascii:strict"},
    "Latin-1 output": {"PYTHONIOENCODING": "latin-1"},
    "UTF-16 output": {"PYTHONIOENCODING": "utf-16"},
    "COLUMNS=0": {"COLUMNS": "0", "LINES": "0"},
    "COLUMNS garbage": {"COLUMNS": "x\x1b", "LINES": "-99999999999999999999"},
    "COLUMNS huge": {"COLUMNS": "999999999"},
    "TERM=dumb": {"TERM": "dumb"},
    "TERM garbage": {"TERM": "\x1b[2J"},
    "TERM unset": {"TERM": None},
    "NO_COLOR": {"NO_COLOR": "1"},
    "FORCE_COLOR and NO_COLOR": {"FORCE_COLOR": "1", "NO_COLOR": "1", "CLICOLOR_FORCE": "1"},
    "no HOME": {"HOME": None, "XDG_CACHE_HOME": None, "XDG_DATA_HOME": None, "MLAPATCH_CACHE": None},
    "HOME is a device": {"HOME": "/dev/null", "XDG_CACHE_HOME": None, "XDG_DATA_HOME": None, "MLAPATCH_CACHE": None},
    "HOME is no UTF-8": {"HOME": b"/dev/null/\xff", "XDG_DATA_HOME": None, "MLAPATCH_CACHE": None},
    "cache is a device": {"MLAPATCH_CACHE": "/dev/null"},
    "cache below a device": {"MLAPATCH_CACHE": "/dev/null/x"},
    "cache is empty": {"MLAPATCH_CACHE": ""},
    "cache in /proc": {"MLAPATCH_CACHE": "/proc/self/\x1b[2J"},
    "cache is no UTF-8": {"MLAPATCH_CACHE": b"\xff\xfe"},
    "cache of 5,000 letters": {"MLAPATCH_CACHE": "/" + "a" * 5000},
    "runs in a device": {"MLAPATCH_DB": "/dev/null"},
    "runs nowhere": {"MLAPATCH_DB": b"/proc/\xff/\x1b[2J"},
    "an SGLang that is no UTF-8": {"MLAPATCH_SGLANG": b"/tmp/\xff\xfe\x1b[2J"},
    "an SGLang of 5,000 letters": {"MLAPATCH_SGLANG": "a" * 5000},
    "an SGLang that is a device": {"MLAPATCH_SGLANG": "/dev/zero"},
    "an SGLang with shell words": {"MLAPATCH_SGLANG": f"$(touch {SENTINEL})`touch {SENTINEL}`; touch {SENTINEL}"},
    "TMPDIR nowhere": {"TMPDIR": "/proc/nowhere"},
    "no PATH": {"PATH": None},
    "PATH garbage": {"PATH": b"\xff:/dev/null::\x1b"},
    "bytecode nowhere": {"PYTHONPYCACHEPREFIX": "/dev/null/x"},
    "a start-up file": {"PYTHONSTARTUP": SENTINEL, "PYTHONINSPECT": None},
    "warnings are errors": {"PYTHONWARNINGS": "error"},
    "development mode": {"PYTHONDEVMODE": "1"},
    "hash seed 0": {"PYTHONHASHSEED": "0"},
    "GPUs garbage": {"CUDA_VISIBLE_DEVICES": "-1,,x,99999999999999999999999999,GPU-\x1b[2J,MIG-"},
    "git elsewhere": {"GIT_DIR": "/dev/null", "GIT_WORK_TREE": "/", "GIT_CONFIG_GLOBAL": "/dev/zero"},
    "git that runs things": {"GIT_SSH_COMMAND": f"touch {SENTINEL}", "GIT_EXTERNAL_DIFF": f"touch {SENTINEL}",
                             "GIT_PAGER": f"touch {SENTINEL}", "PAGER": f"touch {SENTINEL}"},
    "time zone garbage": {"TZ": "garbage\x1b", "LC_TIME": "xx_XX"},
    "5,000 variables": {f"V{i}": "x" * 20 for i in range(5000)},
    "secrets with escapes": {"HF_TOKEN": "\x1b[2J", "SGLANG_X": b"\xff\x1b]0;x\x07", "NCCL_DEBUG": "\x9b31m\u202e"},
    "settings with markup": {"SGLANG_X": "[bold red]x[/]", "NCCL_DEBUG": ":warning: [/]"},
}  # fmt: skip
VERBS = (("status",), ("doctor",), ("diff", "gather-cast"), ("status", "--json"), ("runs",), ("estimate",), ("list",))


def environments(place: Place, rng: random.Random, *, thorough: bool) -> Tally:
    """Each environment with several verbs, in processes of their own, as a user meets them."""
    tally = Tally("inputs", "environments: variables, homes, terminals, encodings; status, doctor, diff, runs, list")
    place.restore()
    chosen = list(ODD) if thorough else rng.sample(list(ODD), 2)
    for name in chosen:
        for verb in rng.sample(VERBS, 1):
            tally.attempt(f"{name}: {' '.join(verb)}", lambda n=name, v=verb: _started(place, ODD[n], v))  # type: ignore[misc]
    if (place.work / SENTINEL).exists():
        tally.lose("a variable was executed")
    return tally


def _started(place: Place, odd: dict[str, str | bytes | None], verb: tuple[str, ...]) -> None:
    environment = {os.fsencode(k): os.fsencode(v) for k, v in {**os.environ, "PYTHONPATH": str(SRC)}.items()}
    for name, value in odd.items():
        environment.pop(name.encode(), None)
        if value is not None:
            environment[name.encode()] = value if isinstance(value, bytes) else value.encode()
    command = [sys.executable, "-m", "mlapatch", *verb]
    if "MLAPATCH_SGLANG" not in odd and verb[0] in ("status", "doctor", "diff"):
        command += ["--sglang", str(place.site)]
    done = subprocess.run(command, env=environment, cwd=place.work, capture_output=True, check=False, timeout=120)
    shown = done.stderr + (b"" if verb[0] == "diff" else done.stdout)
    assert done.returncode in CODES, f"exit {done.returncode}: {done.stderr.decode(errors='replace')[-400:]}"
    assert b"Traceback" not in shown, shown[-400:]
    if odd.get("PYTHONIOENCODING") != "utf-16":
        assert not any(byte < 32 and byte not in b"\n\t" for byte in shown), f"control characters: {shown[:200]!r}"
