"""Parsing and printing of quantities with units.

All other code uses SI units: bytes, seconds, flop, watts, joules."""

from __future__ import annotations

import math
import re

_PREFIX = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_BASE = {
    **{"": ("", 1.0), "B": ("B", 1.0), "b": ("B", 1 / 8), "bit": ("B", 1 / 8), "W": ("W", 1.0)},
    **{"FLOP": ("flop", 1.0), "flop": ("flop", 1.0), "FLOPS": ("flop/s", 1.0)},
}
# Two letters look like mu: the micro sign (µ) and the Greek letter (\u03bc), which phones type.
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "\u03bcs": 1e-6, "ns": 1e-9}
# unit -> its SI unit, and its size in that SI unit
_UNITS = {
    prefix + unit: (si, times * scale)
    for prefix, times in _PREFIX.items()
    for unit, (si, scale) in _BASE.items()
} | {unit: ("s", scale) for unit, scale in _TIME.items()}
_PATTERN = re.compile(
    r"\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ\u03bc]*?)(/s|ps)?\s*"
)
LONGEST_NUMBER = 300  # characters of a number in an option


def kind(text: object) -> str:
    """Return the unit of a quantity: 's', 'B', 'flop', 'W', 'B/s', 'flop/s', or '' without a unit.

    Raises ValueError for anything but a quantity.

    >>> kind("25GB/s"), kind("10us"), kind("24GiB"), kind("27TFLOPS"), kind(5), kind("5G")
    ('B/s', 's', 'B', 'flop/s', '', '')
    >>> kind("300W"), kind("0.3kW")
    ('W', 'W')
    """
    return _parsed(text)[1]


def quantity(text: object) -> float:
    """Return a quantity as a number in SI units [B, s, flop, W, B/s, flop/s].

    A quantity is text such as '25GB/s', '400Mbit/s', '10us', '24GiB', '27.8TFLOP/s', or a number,
    which is returned unchanged. Raises ValueError for anything else.

    >>> quantity("25GB/s"), quantity("400 Mbit/s"), quantity("2us"), quantity(3)
    (25000000000.0, 50000000.0, 2e-06, 3.0)
    >>> quantity("400Mbps"), quantity("25GBps")
    (50000000.0, 25000000000.0)
    >>> quantity("2µs") == quantity("2\u03bcs") == quantity("2us")
    True
    """
    return _parsed(text)[0]


def _parsed(text: object) -> tuple[float, str]:
    """Return a quantity as a number in SI units, and its SI unit."""
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise ValueError(f"needs a number with a unit such as 25GB/s, not {text!r:.80}")
    if not isinstance(text, str):
        return float(text), ""
    match = _PATTERN.fullmatch(text)
    if not match or not math.isfinite(float(match[1])):
        raise ValueError(
            f"{text!r:.80} is not a number with a unit such as 25GB/s, 400Mbit/s, 24GiB, 10us"
        )
    si, scale = _UNITS.get(match[2], ("unknown", 0.0))
    if si == "unknown" or (match[3] and si in ("", "s")):
        raise ValueError(
            f"{text!r:.80} has an unknown unit; use B, bit, FLOP, W with k, M, G, T (or Ki, Mi,"
            " Gi), or s, ms, us"
        )
    each = "/s" if match[3] and not si.endswith("/s") else ""
    return float(match[1]) * scale, si + each


def number_of(text: str, kind: type[int] | type[float] = int) -> float:
    """Parse a finite number that a user wrote in the digits 0 to 9. Raises ValueError.

    `int` and `float` alone would also accept digits of other scripts, and underscores.

    >>> number_of("12"), number_of("1e3", float)
    (12, 1000.0)
    """
    if not text.isascii() or "_" in text or len(text) > LONGEST_NUMBER:
        raise ValueError(f"{text!r:.80} is not a number in the digits 0 to 9")
    value = kind(text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r:.80} is not a finite number")
    return value


def show_bytes(value: float) -> str:
    """Return bytes as text with a decimal prefix.

    >>> show_bytes(4.5e9), show_bytes(812), show_bytes(0)
    ('4.50 GB', '812 B', '0 B')
    """
    return _scaled(value, "TGMk", "B") or f"{value:.0f} B"


def show_long(seconds: float) -> str:
    """Return the duration of a training [s] as text, in seconds, minutes, hours or days.

    >>> show_long(12.584), show_long(362.0), show_long(37164.2), show_long(591672.7)
    ('12.58 s', '6.0 min', '10.3 h', '6.8 days')
    """
    for most, unit, size in ((120, "", 1), (7200, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < most:
            return f"{seconds / size:.1f} {unit}" if unit else show_time(seconds)
    return f"{seconds / 86400:.1f} days"


def show_time(value: float) -> str:
    """Return a duration [s] as text in s, ms or us.

    >>> show_time(0.0123), show_time(2.5), show_time(4e-6), show_time(-1e-19)
    ('12.3 ms', '2.50 s', '4.0 us', '0 s')
    """
    if abs(value) < 5e-8:
        return "0 s"
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.1f} us"


def show_range(low: float, high: float) -> str:
    """Return a range of times [s] as text; the unit is written once if both ends have the same.

    >>> show_range(0.2587, 0.8643), show_range(0.5, 1.25)
    ('258.7-864.3 ms', '500.0 ms-1.25 s')
    """
    first, second = show_time(low), show_time(high)
    same = first.split()[1] == second.split()[1]
    return f"{first.split()[0] if same else first}-{second}"


def show_percent(share: float, digits: int = 0, sign: bool = False) -> str:
    """Return a share as a percentage; `sign` writes a plus sign too, for differences.

    >>> show_percent(0.5), show_percent(-0.004, sign=True), show_percent(0.0534, 1, sign=True)
    ('50 %', '+0 %', '+5.3 %')
    """
    shown = round(100 * float(share), digits) + 0.0  # no -0
    return f"{shown:{'+' if sign else ''}.{digits}f} %"


def show_count(count: int, thing: str) -> str:
    """Return a count and its noun, in the plural unless the count is 1.

    >>> show_count(1, "server"), show_count(2000, "server"), show_count(2, "batch")
    ('1 server', '2,000 servers', '2 batches')
    """
    return f"{count:,} {thing}" + ("" if count == 1 else "es" if thing.endswith("tch") else "s")


def show_dollars(value: float) -> str:
    """Return a price as text, to the cent, or to three digits below $1.

    >>> show_dollars(12.345), show_dollars(0.0012345), show_dollars(0)
    ('$12.35', '$0.00123', '$0.00')
    """
    return f"${value:.2f}" if value >= 1 or value == 0 else f"${value:.3g}"


def show_energy(value: float) -> str:
    """Return an energy [J] as text with a decimal prefix.

    >>> show_energy(1234567.0), show_energy(12.5), show_energy(0.25), show_energy(0)
    ('1.23 MJ', '12.50 J', '0.25 J', '0.00 J')
    """
    return _scaled(value, "GMk", "J") or f"{value:.2f} J"


def _scaled(value: float, prefixes: str, unit: str) -> str:
    """Return the value with the first prefix that leaves a number of 1 or more; '' if none does."""
    fitting = (prefix for prefix in prefixes if abs(value) >= _PREFIX[prefix])
    return next((f"{value / _PREFIX[prefix]:.2f} {prefix}{unit}" for prefix in fitting), "")
