"""Writing files so that nothing is ever left half-written.

May import: errors.
"""

from __future__ import annotations

import os
import stat
import tempfile

from preflop.errors import BadFile


def write_atomically(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a whole file or nothing: a temporary file beside it takes its place when it is complete.

    A path that exists and is not a regular file (a pipe, a terminal, a device) is written to directly.

    Raises:
        BadFile: the folder is missing, the disk is full, or the file may not be written. What stood
            at `path` before is untouched.
    """
    target = os.path.realpath(path)
    try:
        if os.path.isdir(target):
            raise IsADirectoryError(21, "it is a folder")
        if _is_special(target):
            with open(target, "wb", buffering=0) as stream:
                stream.write(content)
        else:
            _replace(target, content)
    except OSError as error:
        raise BadFile(
            f"cannot write {os.fspath(path)}: {error.strerror or error}.\n"
            "  Nothing was written. Name a file in a folder that exists, may be written to and has room."
        ) from error


def check_can_write(path: str | os.PathLike[str]) -> None:
    """Refuse what `write_atomically` would, as far as it can be seen before anything is written.

    Raises:
        BadFile: the folder is missing or may not be written to, or the path is a folder.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if os.path.isdir(target):
        reason = "it is a folder"
    elif not os.path.isdir(folder):
        reason = f"there is no folder {folder}"
    elif not os.access(target if _is_special(target) else folder, os.W_OK):
        reason = "permission denied"
    else:
        return
    raise BadFile(
        f"cannot write {os.fspath(path)}: {reason}.\n"
        "  Nothing was recorded. Name a file in a folder that exists and may be written to."
    )


def _is_special(target: str) -> bool:
    """Whether a path exists and is no regular file."""
    return os.path.exists(target) and not stat.S_ISREG(os.stat(target).st_mode)


def _replace(target: str, content: bytes) -> None:
    folder, name = os.path.split(target)
    handle, temporary = tempfile.mkstemp(prefix=f".{name[:100]}.", suffix=".part", dir=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def _mode(target: str) -> int:
    """Permissions of the file that is replaced, else what a plain open() would give."""
    if os.path.exists(target):
        return stat.S_IMODE(os.stat(target).st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
