"""Writes files so that a reader sees the old one or the new one, never half of either."""

import os
import tempfile
from pathlib import Path

from goldenppo.adapters.interface import UsageError


def check_writable(path: str | Path) -> None:
    """Refuses a path that cannot be written, before any work is done.

    Raises:
        UsageError: the folder is missing or may not be written to, or the path is a folder.
    """
    path = Path(path)
    folder = path.parent
    if path.is_dir():
        raise UsageError(f"cannot write {str(path)!r}: it is a folder; give a file name")
    if not folder.is_dir():
        raise UsageError(f"cannot write {str(path)!r}: there is no folder {str(folder)!r}; make it first")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise UsageError(f"cannot write {str(path)!r}: no permission; name another place")


def write(path: str | Path, text: str) -> None:
    """Writes a text file atomically: into a temporary neighbour, flushed to disk, then renamed over the old one.

    Raises:
        UsageError: the file cannot be written; the old one is untouched.
    """
    path = Path(path)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as problem:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise UsageError(f"cannot write {str(path)!r}: {problem.strerror}") from None
