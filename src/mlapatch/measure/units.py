"""Numbers as people of this field write them: GB is 1e9 bytes, GiB is 2**30."""

from __future__ import annotations


def size(count: float) -> str:
    """A byte count with decimal units, three significant figures."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.{_decimals(count / scale)}f} {unit}"
    return f"{count:.0f} B"


def both(count: float) -> str:
    """A large byte count in GB and GiB, since servers print one and data sheets the other."""
    return f"{count / 1e9:.2f} GB ({count / 2**30:.2f} GiB)"


def seconds(value: float) -> str:
    """A duration given in seconds, in the unit that reads best."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale:
            return f"{value / scale:.{_decimals(value / scale)}f} {unit}"
    return f"{value * 1e6:.2f} us"


def percent(share: float) -> str:
    """A share of 0 to 1 as a percentage."""
    return f"{100 * share:.1f} %"


def _decimals(value: float) -> int:
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
