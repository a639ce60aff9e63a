"""Errors that a person can act on. Whoever runs the build prints the message as one line and exits with 1."""

import contextlib
import errno
from collections.abc import Iterator


class BuildError(Exception):
    """The build cannot go on. The text says what is wrong and what to do, in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def os_error_text(error: OSError, doing: str, cure: str = "") -> str:
    """One line for an OSError: what was being done, what the system said, and the cure."""
    if error.errno == errno.ENOSPC or error.errno == errno.EDQUOT:
        reason = "no space left on the disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason = "no permission to write there" if error.errno != errno.EROFS else "the file system is read-only"
    else:
        reason = error.strerror or str(error)
    where = f" ({error.filename})" if error.filename else ""
    return f"{doing}: {reason}{where}" + (f"; {cure}" if cure else "")


@contextlib.contextmanager
def explain(doing: str, cure: str = "") -> Iterator[None]:
    """Turn an OSError of the block into a BuildError that says what was being done."""
    try:
        yield
    except OSError as error:
        raise BuildError(os_error_text(error, doing, cure)) from error
