"""What a run measured, in one form for every kind of run, and when a difference is more than noise."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNREPEATED = 0.02  # taken as the noise of a figure that was measured once
_LARGEST = 1e18  # of a figure; false for NaN too
SMALLEST = 0.01  # differences below this are noise whatever the repeats say


@dataclass(frozen=True)
class Metric:
    """Repeated values of one figure in one case, e.g. `TPOT` for `512 in, 128 out, 1 stream`."""

    case: str
    name: str
    unit: str
    better: str
    values: tuple[float, ...]

    @property
    def middle(self) -> float:
        """The median of the repeats."""
        return median(self.values)

    @property
    def spread(self) -> float:
        """Range of the repeats over their median; 0 for a single value."""
        return (max(self.values) - min(self.values)) / abs(self.middle) if self.middle else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "case": self.case, "name": self.name, "unit": self.unit, "better": self.better,
            "values": list(self.values), "median": self.middle, "spread": self.spread,
        }  # fmt: skip

    def text(self) -> str:
        """`5.24 ms ±0.3 %`."""
        spread = f" ±{50 * self.spread:.1f} %" if len(self.values) > 1 else ""
        return f"{number(self.middle)} {self.unit}{spread}"


def number(value: float) -> str:
    """A figure with what digits are worth reading."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def of(result: Mapping[str, Any]) -> list[Metric]:
    """The metrics in a run's result."""
    found = []
    listed = result.get("metrics")
    for entry in listed if isinstance(listed, list) else []:
        listed_values = entry.get("values") if isinstance(entry, dict) else None
        values = tuple(map(float, filter(_is_figure, listed_values if isinstance(listed_values, list) else [])))
        if values:
            case, name, unit, better = (str(entry.get(key, "")) for key in ("case", "name", "unit", "better"))
            found.append(Metric(case, name, unit, better, values))
    return found


def _is_figure(value: object) -> bool:
    """Not what a damaged or foreign record may hold in a figure's place."""
    return isinstance(value, (int, float)) and abs(value) < _LARGEST


def factor(ratio: float) -> str:
    """A ratio in words: `13.7 x less`, or `+3.1 %` where it is small."""
    if ratio == 0:
        return "gone"
    if ratio < 0 or ratio == float("inf"):
        return "-"
    if 0.5 < ratio < 2:
        return f"{100 * (ratio - 1):+.1f} %"
    return f"{1 / ratio:.1f} x less" if ratio < 1 else f"{ratio:.1f} x more"


@dataclass(frozen=True)
class Change:
    """One figure in two runs; `ratio` is B over A, `verdict` is better, worse, changed or noise."""

    a: Metric
    b: Metric
    ratio: float
    verdict: str


def changes(a: Sequence[Metric], b: Sequence[Metric]) -> list[Change]:
    """Figures that both runs have, by case and name."""
    other = {(metric.case, metric.name): metric for metric in b}
    found = []
    for metric in a:
        match = other.get((metric.case, metric.name))
        if match is not None:
            ratio = match.middle / metric.middle if metric.middle else float("inf") if match.middle else 1.0
            found.append(Change(metric, match, ratio, _verdict(metric, match, ratio)))
    return found


def _verdict(a: Metric, b: Metric, ratio: float) -> str:
    """More than noise: the repeats do not overlap, and the medians differ by more than 1 % (2 % if unrepeated)."""
    lone = len(a.values) < 2 or len(b.values) < 2
    if abs(ratio - 1) <= (UNREPEATED if lone else SMALLEST):
        return "noise"
    if not lone and max(min(a.values), min(b.values)) <= min(max(a.values), max(b.values)):
        return "noise"
    if a.better not in ("lower", "higher"):
        return "changed"
    return "better" if (ratio < 1) == (a.better == "lower") else "worse"


def flatten(setup: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested set-up as dotted keys and text."""
    flat: dict[str, str] = {}
    for key, value in setup.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, name + ".")
        elif isinstance(value, list):
            flat[name] = ", ".join(map(str, value))
        else:
            flat[name] = str(value)
    return flat


# What must be equal for two runs to be compared, and why.
GROUNDS: tuple[tuple[str, str], ...] = (
    ("server.pool_tokens", "the cast's cost grows with the pool, so figures compare only at the same pool size"),
    ("server.model", "another model"),
    ("server.gpu", "another GPU"),
    ("server.tp", "another tensor parallelism"),
    ("server.kv_cache_dtype", "another KV dtype"),
)


def obstacles(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Why two set-ups should not be compared; empty where they can."""
    left, right = flatten(a), flatten(b)
    found = []
    for key, why in GROUNDS:
        if key in left and key in right and left[key] != right[key]:
            found.append(f"{key.removeprefix('server.')} {left[key]} against {right[key]}: {why}")
        elif key == "server.pool_tokens" and (key in left) != (key in right):
            found.append(f"the pool size is known for one run only: {why}")
    return found
