"""Text that came from outside, for a terminal: what could steer it is escaped. Request ids and tenants are whatever clients sent."""

from __future__ import annotations


def printable(text: str) -> str:
    """Characters that are not printable as Python writes them: \\x1b, \\n, \\u202e."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_json(text: str) -> str:
    """The same JSON, its line breaks kept: json.dumps leaves the control characters from 0x7f on as they are."""
    return "".join(c if c.isprintable() or c == "\n" else _json_escaped(c) for c in text)


def _json_escaped(c: str) -> str:
    units = c.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
