"""GPU activity records in order of time, in bounded memory: sorted runs, on disk once there is more than one."""

from __future__ import annotations

import heapq
import itertools
import tempfile
from array import array
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RUN = 200_000
_READ = 4096


Record: TypeAlias = tuple[float, float, int, int]  # start and duration in us, group, correlation of the launch


class _Run(NamedTuple):
    offset: int
    length: int
    first: float
    last: float


class Spool:
    """Add records in any order, then iterate them by start time as often as needed."""

    def __init__(self, run: int = RUN) -> None:
        self._file: BinaryIO | None = None
        self._limit = run
        self._columns = _columns()
        self._runs: list[_Run] = []
        self._sorted = True
        self.count = 0

    def extend(self, records: Sequence[Record]) -> None:
        """Add records, in any order."""
        if not records:
            return
        for column, values in zip(self._columns, zip(*records, strict=True), strict=True):
            column.extend(values)
        self._sorted = False
        self.count += len(records)
        if len(self._columns[0]) >= self._limit:
            self._spill()

    def close(self) -> None:
        """Forget the records and delete the file."""
        self._columns, self._runs = _columns(), []
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self.close()

    def _order(self) -> None:
        if self._sorted:
            return
        times = self._columns[0]
        order = sorted(range(len(times)), key=times.__getitem__)
        for index, column in enumerate(self._columns):
            self._columns[index] = array(column.typecode, map(column.__getitem__, order))
        self._sorted = True

    def _spill(self) -> None:
        self._order()
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="mlapatch-trace-")  # noqa: SIM115  lives as long as the spool
        offset = self._file.seek(0, 2)
        times = self._columns[0]
        for begin in range(0, len(times), _READ):
            for column in self._columns:
                self._file.write(column[begin : begin + _READ].tobytes())
        self._runs.append(_Run(offset, len(times), times[0], times[-1]))
        self._columns = _columns()
        self._sorted = True

    def __iter__(self) -> Iterator[Record]:
        if self._runs and len(self._columns[0]):
            self._spill()
        if not self._runs:
            self._order()
            return zip(*self._columns, strict=True)
        runs = sorted(self._runs, key=lambda run: run.first)
        if all(a.last <= b.first for a, b in itertools.pairwise(runs)):
            return chain.from_iterable(map(self._read, runs))
        return heapq.merge(*(self._read(run) for run in runs))

    def _read(self, run: _Run) -> Iterator[Record]:
        return chain.from_iterable(self._blocks(run))

    def _blocks(self, run: _Run) -> Iterator[Iterator[Record]]:
        assert self._file is not None  # noqa: S101  a run exists only once the file does
        at, left = run.offset, run.length
        while left:
            count = min(_READ, left)
            self._file.seek(at)
            columns = _columns()
            for column in columns:
                column.frombytes(self._file.read(count * column.itemsize))
            at = self._file.tell()
            left -= count
            yield zip(*columns, strict=True)


def _columns() -> list[array[Any]]:
    return [array("d"), array("d"), array("L"), array("q")]
