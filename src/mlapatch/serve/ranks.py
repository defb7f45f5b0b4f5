"""Which ranks a node runs and logs, and which of them have said what patched bytes they run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from mlapatch.serve.server_options import ServerOptions
from mlapatch.serve.transcript import Transcript

_PART = re.compile(r"([A-Z][A-Z_]*)(\d+)")
_OPTIONS = {"tp": "tp-size", "pp": "pp-size", "dp": "dp-size", "nodes": "nnodes", "node": "node-rank"}


@dataclass(frozen=True)
class Layout:
    """How SGLang spreads its schedulers over nodes (entrypoints/engine.py: 927 in 0.5.9, 2045 in 0.5.23).

    `node` counts from 0. `known`: the server or its command line says so, it is not a default.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    nodes: int = 1
    node: int = 0
    dp_attention: bool = False
    known: bool = False

    @classmethod
    def of(cls, options: ServerOptions, facts: Mapping[str, str] | None = None) -> Layout:
        """From the command line, and where the log has shown the server's own arguments, from those."""
        said = facts or {}
        sizes = {name: max(options.number(option, 1) or 1, 1) for name, option in _OPTIONS.items()}
        sizes["node"] = max(options.number("node-rank", 0) or 0, 0)
        sizes |= {name: int(said[name]) for name in _OPTIONS if said.get(name, "").isdigit()}
        attention = said.get("dp_attention") == "True" or "enable-dp-attention" in options.given
        return cls(**sizes, dp_attention=attention, known="tp" in said or "tp-size" in options.given)

    @property
    def names(self) -> tuple[str, ...]:
        """The ranks of this node as `name_of` has them; one rank alone has no prefix and is ''."""
        pp_a_node, nodes_a_stage = max(self.pp // self.nodes, 1), max(self.nodes // self.pp, 1)
        tp_a_node = max(self.tp // nodes_a_stage, 1)
        first_pp = pp_a_node * (self.node // nodes_a_stage)
        first_tp = tp_a_node * (self.node % nodes_a_stage)
        replicas = range(self.dp if self._replicated else 1)
        every = product(replicas, range(first_pp, first_pp + pp_a_node), range(first_tp, first_tp + tp_a_node))
        return tuple(self._name(dict(zip(("DP", "PP", "TP"), map(str, rank), strict=True))) for rank in every)

    @property
    def _replicated(self) -> bool:
        """Whether each DP rank is a server of its own; with DP attention it is a share of the TP ranks."""
        return self.dp > 1 and not self.dp_attention

    def name_of(self, prefix: str | None) -> str:
        """A log prefix without the parts that follow from the others: `DP1 TP3 EP3` is `TP3` with DP attention."""
        return self._name(dict(_PART.findall(prefix or "")))

    def _name(self, parts: Mapping[str, str]) -> str:
        counted = {"DP": self._replicated, "PP": self.pp > 1, "TP": self.tp > 1}
        return " ".join(f"{kind}{parts[kind]}" for kind, counts in counted.items() if counts and kind in parts)

    @property
    def where(self) -> str:
        """`node 1 of 2 (counted from 0)`, or '' where there is one."""
        return f"node {self.node} of {self.nodes} (counted from 0)" if self.nodes > 1 else ""


@dataclass(frozen=True)
class Heard:
    """One patched file in a log: which ranks have said that they run it, by the sha256 that they gave."""

    path: str
    patches: tuple[str, ...]
    ranks: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """For people."""
        said = [f"sha256 {sha[:16]}... in {listed(ranks)}" for sha, ranks in self.ranks.items()]
        if self.missing:
            said.append(f"nothing from {listed(self.missing)}")
        return f"{self.path.rpartition('/')[2]} ({', '.join(self.patches)}): {'; '.join(said)}"


@dataclass(frozen=True)
class RankReport:
    """Every patched file of one node's log."""

    layout: Layout
    expected: tuple[str, ...]
    files: Sequence[Heard] = field(default_factory=tuple)

    @property
    def said(self) -> str:
        """Where nothing is missing: which ranks have said it, and where the others' lines are."""
        if self.layout.nodes == 1:
            return "every rank has logged the sha256 of the patched file"
        others = "the others log at home: mlapatch diagnose --ranks LOG for each node's log (docs/nodes.md)"
        return f"{self.layout.where}: {listed(self.expected)} logged the sha256 of the patched file; {others}"

    def as_dict(self) -> dict[str, object]:
        """The `ranks` of `diagnose --json` and `launch --json`."""
        files = [
            {
                "path": file.path,
                "patches": list(file.patches),
                "sha256": {sha: list(ranks) for sha, ranks in file.ranks.items()},
                "missing": list(file.missing),
            }
            for file in self.files
        ]
        return {
            "node": self.layout.node,
            "nodes": self.layout.nodes,
            "expected": [name or "the only rank" for name in self.expected],
            "files": files,
        }


def report(log: Transcript, options: ServerOptions | None = None) -> RankReport:
    """Which ranks a log must hold, and what each patched file's own line at import said in them."""
    layout = Layout.of(options or ServerOptions(), log.facts)
    talked = {layout.name_of(rank) for rank in log.ranks if log.states[rank].phase is not None}
    expected = layout.names if layout.known else tuple(sorted(talked, key=_order)) or ("",)
    files: dict[str, list[tuple[str, str, str]]] = {}
    for mark in log.marks:
        files.setdefault(mark.path, []).append((layout.name_of(mark.rank), mark.sha256, mark.patch))
    heard = []
    for path, marks in files.items():
        names = {name for name, _, _ in marks}
        patches = {patch for _, _, patch in marks}
        unnamed = names == {""} and len(marks) >= len(expected) * len(patches)  # before a rank has its prefix
        missing = () if unnamed else tuple(name for name in expected if name not in names)
        ranks = {sha: _ranks(name for name, its, _ in marks if its == sha) for _, sha, _ in marks}
        heard.append(Heard(path, tuple(sorted(patches)), ranks, missing))
    return RankReport(layout, expected, heard)


def _ranks(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names), key=_order))


def _order(name: str) -> list[tuple[str, int]]:
    return [(kind, int(number)) for kind, number in _PART.findall(name)]


def listed(names: Iterable[str]) -> str:
    """`TP0 to TP3, TP5`."""
    runs: list[list[str]] = []
    for name in sorted(names, key=_order):
        before = _order(runs[-1][-1]) if runs else []
        now = _order(name)
        follows = before and now and before[:-1] == now[:-1] and before[-1][0] == now[-1][0]
        if follows and now[-1][1] == before[-1][1] + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(_run(run) for run in runs)


def _run(run: Sequence[str]) -> str:
    if len(run) > 2:
        return f"{run[0]} to {run[-1]}"
    return ", ".join(name or "the only rank" for name in run)
