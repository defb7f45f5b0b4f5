"""A run that is kept while a verb works: written when it begins, and again with what came out or what broke it off."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlapatch.errors import MlapatchError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BY_THE_WAY_SECONDS = 5.0
"""How long a verb whose work is not the run waits for another process's write."""

# What a store can do to its user; a Python without sqlite3 is the last.
_TROUBLE = (MlapatchError, OSError, ValueError, TypeError, ImportError)


@dataclass
class Kept:
    """A run in the making: the caller fills `result`, completes `setup`, and says in `status` how it ended.

    `run` is its number, None where it is not kept.
    """

    setup: dict[str, Any]
    result: dict[str, Any] = field(default_factory=dict)
    status: str = "done"
    run: int | None = None

    def lose(self, error: Exception) -> None:
        """It is not kept: the result's notes say why, and everything else goes on."""
        known = (error.where, error.found) if isinstance(error, MlapatchError) else (type(error).__name__,)
        found = ": ".join(filter(None, known))
        said = f"not kept as a run: {error}" + (f" ({found})" if found else "")
        self.run = None
        self.result["notes"] = [*self.result.get("notes", ()), said]


@contextmanager
def keeping(
    keep: bool, db: Path | None, kind: str, setup: dict[str, Any], label: str, *, needed: bool = True
) -> Iterator[Kept]:
    """Keep what the block finds; without `keep` nothing is written.

    A store that cannot be used is an error before anything was measured (exit 5), and a note afterwards. Where the run
    is not `needed` (`verify` and `launch` answer something else) it is a note always.
    """
    kept, trouble = Kept(setup), None
    with ExitStack() as stack:
        if keep:
            try:
                from mlapatch.measure.runs import BUSY_SECONDS, Store

                wait = BUSY_SECONDS if needed else BY_THE_WAY_SECONDS
                store = stack.enter_context(Store(db, wait=wait))
                kept.run = store.start(kind, setup, label)
            except _TROUBLE as error:
                if needed:
                    raise
                trouble = error
        try:
            yield kept
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            said = "interrupted" if interrupted else f"{type(error).__name__}: {error}"
            if kept.run is not None:
                with suppress(*_TROUBLE):
                    status = "interrupted" if interrupted else "failed"
                    store.finish(kept.run, {**kept.result, "error": said}, status=status, setup=kept.setup)
            raise
        if kept.run is not None:
            try:
                store.finish(kept.run, kept.result, status=kept.status, setup=kept.setup)
            except _TROUBLE as error:  # what was found is shown all the same
                trouble = error
        if trouble is not None:
            kept.lose(trouble)
