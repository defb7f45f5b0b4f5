"""Watch a start: the log, `/health` and the process tree at the same time, until it is ready, dead or silent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlapatch.serve import gpu_state
from mlapatch.serve.diagnosis import diagnose
from mlapatch.serve.health import Health, Poller
from mlapatch.serve.ports import listener
from mlapatch.serve.processes import Death, Tree
from mlapatch.serve.transcript import READY, WARM_UP, Transcript
from mlapatch.serve.verdicts import Diagnosis, Ending, Silence

Tell = Callable[[str], None]
_NEVER = -1000


@dataclass(frozen=True)
class Timing:
    """Seconds; tests use smaller ones."""

    look: float = 0.25
    poll: float = 1.0
    linger: float = 1.0  # for the dying process's last lines
    report_silence: float = 30.0
    patience: Mapping[str, float] = field(default_factory=dict)


@dataclass
class LogTail:
    """Feeds a growing file to a transcript."""

    path: Path
    transcript: Transcript
    _offset: int = 0

    def read(self) -> bool:
        """Take what is new; True where there was something."""
        try:
            with self.path.open("rb") as log:
                log.seek(self._offset)
                data = log.read(8 << 20)
        except OSError:
            return False
        self._offset += len(data)
        self.transcript.feed(data)
        return bool(data)

    def drain(self) -> None:
        """Take all that is there."""
        while self.read():
            pass


class Follower:
    """Follows one server from start to readiness, and afterwards until it ends."""

    def __init__(self, tree: Tree, tail: LogTail, timing: Timing, tell: Tell, *, host: str, port: int | None) -> None:
        self.tree, self.tail, self.timing, self.tell = tree, tail, timing, tell
        self.log = tail.transcript
        self.host, self.port = host, port
        self.began = time.monotonic()
        self.poller: Poller | None = None
        self.phases: dict[str, float] = {}
        self._phase = ""
        self._other = 0
        self._progress: tuple[object, ...] = ()
        self._moved = self.began
        self._reported = 0.0

    @property
    def url(self) -> str:
        """Where the server listens, once it is known: from its command line, or from its own log."""
        port = self.port or self.log.facts.get("port")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}" if port else ""

    def until_ready(self) -> Diagnosis | None:
        """None when `/health` answers 200; else why the start failed. The tree is left as it is."""
        while True:
            failure = self._turn()
            if failure is not None:
                return failure
            if self.poller is not None and self.poller.last is Health.UP and not self._another_answers():
                self.phases[READY] = round(time.monotonic() - self.began, 1)
                self._say(f"ready: {self.url}/health answers 200")
                return None
            silence = self._silence()
            if silence is not None:
                return silence
            time.sleep(self.timing.look)

    def until_ended(self) -> Diagnosis | None:
        """After readiness: None where the server ended because it was asked to, else why it died."""
        while True:
            failure = self._turn()
            if failure is not None:
                return failure
            if self.tree.exit_code() is not None:
                return None
            time.sleep(self.timing.look)

    def close(self) -> None:
        """Stop asking `/health`."""
        if self.poller is not None:
            self.poller.stop()

    # -------------------------------------------------------------------------------------------------- one turn
    def _turn(self) -> Diagnosis | None:
        self.tail.read()
        deaths = [death for death in self.tree.look() if death.code != 0]
        code = self.tree.exit_code()
        if (self.poller is None and self.url and self.log.server_phase() in (WARM_UP, READY)) or self._http_only():
            self._poll()
        self._show_phase()
        if code is not None:
            return self._root_ended(code)
        if deaths:
            return self._worker_died(deaths[0])
        if self.log.has_died():
            self._linger()
            return diagnose(self.log)
        return None

    def _http_only(self) -> bool:
        """A server that logs nothing we know (log level error) is asked as soon as its port is known."""
        return self.poller is None and bool(self.url) and time.monotonic() - self.began > 5

    def _poll(self) -> None:
        if self.poller is None and self.url:
            self.poller = Poller(self.url, self.timing.poll)

    def _another_answers(self) -> bool:
        """Whether a process that is older than this server holds its port (a start with --force): not our readiness."""
        port = self.port or self.log.facts.get("port")
        holder = listener(int(port)) if port else None
        if holder is None or holder.created >= self.tree.root.create_time():
            return False
        if holder.pid != self._other:
            self._other = holder.pid
            self._say(f"{self.url} is answered by pid {holder.pid} ({holder.name}), which was there before this server")
        return True

    def _root_ended(self, code: int) -> Diagnosis | None:
        self.tree.finish_log(self.timing.linger + 1)
        self.tail.drain()
        self.log.close()
        if self.log.ready is not None and (self.log.stopped is not None or code in (0, -15, -2)):
            return None
        known = None if code == _NEVER else code
        return diagnose(self.log, ending=Ending("the server process", known))

    def _worker_died(self, death: Death) -> Diagnosis | None:
        self._linger()
        if self.log.stopped is not None:
            return None
        rank = death.worker.rank if self.log.prefixed or death.worker.rank is None else None
        name = f"process {death.worker.pid} ({death.worker.title[:60]})"
        return diagnose(self.log, ending=Ending(name, death.code, rank))

    def _linger(self) -> None:
        """Give the dying process a moment for its last lines."""
        deadline = time.monotonic() + self.timing.linger
        while time.monotonic() < deadline and self.tree.exit_code() is None:
            self.tail.read()
            time.sleep(self.timing.look / 2)
        self.tail.drain()

    # ------------------------------------------------------------------------------------------------ telling
    def _say(self, text: str) -> None:
        self.tell(f"[{time.monotonic() - self.began:6.1f} s] {text}")

    def _show_phase(self) -> None:
        phase = self.log.server_phase()
        if phase != self._phase:
            self._phase = phase
            self.phases[phase] = round(time.monotonic() - self.began, 1)
            if phase != READY:
                self._say(self.log.book.title(phase))

    def _silence(self) -> Diagnosis | None:
        progress = (self._phase, self.log.last_number, self.tree.compiling)
        now = time.monotonic()
        if progress != self._progress:
            self._progress, self._moved, self._reported = progress, now, 0.0
        quiet = now - self._moved
        patience = self._patience()
        if patience and quiet > patience:
            compiling = self.tree.compiling
            self._linger()
            load = gpu_state.load_percent({})
            return diagnose(self.log, silence=Silence(quiet, self.tree.root.pid, load, tuple(sorted(compiling))))
        if quiet - self._reported >= self.timing.report_silence:
            self._reported = quiet
            limit = f" of {patience:.0f}" if patience else ""
            title = self.log.book.title(self._phase)
            self._say(f"{title}: no new line for {quiet:.0f}{limit} s; {self.doing()}")
        return None

    def _patience(self) -> float:
        chosen = self.timing.patience.get(self._phase)
        if chosen is not None:
            return chosen
        return next(phase.patience for phase in self.log.book.phases if phase.id == self._phase)

    def doing(self) -> str:
        """What the process tree does while the log is silent."""
        if self.tree.compiling:
            return f"compiling kernels ({len(self.tree.compiling)} of ninja, nvcc, ptxas and their like are running)"
        parts = [f"{self.tree.cpu_percent():.0f} % of a CPU core"]
        load = gpu_state.load_percent({})
        if load is not None:
            parts.append(f"GPUs at {load} %")
        if self.poller is not None:
            parts.append(f"/health: {self.poller.last.value}")
        return ", ".join(parts)
