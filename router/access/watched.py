"""Whether files were replaced or written since they were last looked at. Asked in a loop; a notice from the kernel would need another
package, misses network file systems, and a second is soon enough.

What is compared is device, inode, size and time of the file that the name leads to, so the symbolic links by which Kubernetes swaps a
secret count too. A file that is away is a change of its own kind: `None`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_Mark = tuple[int, int, int, int] | None


class Watched:
    """The files as they are when it is made count as seen."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = self._marks()

    def changed(self) -> bool:
        """True once after each change of any of them. Call it before the files are read: what comes later is seen the next time."""
        before, self._seen = self._seen, self._marks()
        return before != self._seen

    def _marks(self) -> tuple[_Mark, ...]:
        return tuple(_mark(p) for p in self._paths)


def _mark(path: Path) -> _Mark:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
