"""What a user did wrong, said in one message without a stack trace."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

USER_ERROR_EXIT = 2
# Exit codes of `python -m pretrain train`, which schedulers and scripts may act on.
PREEMPTED_EXIT = 75  # stopped by a signal after saving: the same command goes on
DIVERGED_EXIT = 76  # NaN, overflow or spikes beyond the guard's patience: going on is no use
LOST_RANK_EXIT = 77  # a process died or hung: the same command goes on from the last checkpoint


class UserError(Exception):
    """A mistake the user can mend: `what` names the file, key or value, `remedy` says what to do."""

    exit_code = USER_ERROR_EXIT

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  -> {self.remedy}" if self.remedy else self.what


# What a file system refuses: no bug of ours, so the path and the reason are enough. {}: where else.
_REFUSED = {
    errno.EACCES: "choose a place that you may read and write",
    errno.EPERM: "choose a place that you may read and write",
    errno.EROFS: "this file system is read-only: {}",
    errno.ENOSPC: "the disk is full: free some of it; the same command goes on",
    errno.EFBIG: "files may not be that large here: raise `ulimit -f`",
    errno.EDQUOT: "your quota is full: free some of it; the same command goes on",
    errno.ENOTDIR: "a part of this path is a file: {}",
    errno.ENAMETOOLONG: "a name in this path is too long: {}",
    errno.ELOOP: "links in this path lead back to themselves: {}",
    errno.EISDIR: "this is a folder: name a file",
}


def refusal(error: OSError, elsewhere: str = "choose another place") -> UserError | None:
    """What a full, read-only or forbidden file system says, as a UserError; None for a bug of ours.

    elsewhere: how the command at hand is told another place.
    """
    remedy = _REFUSED.get(error.errno or 0)
    written = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of which a write knows no name
    if remedy is None or error.filename is None and error.errno not in written:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return UserError(f"{where}{error.strerror}", remedy.format(elsewhere))


def run_cli(main: Callable[[], int | None]) -> None:
    """Runs a command's `main` and exits: 0 or its return value, 2 (or its own code) for a UserError, 130 for Ctrl-C."""
    try:
        code = main() or 0
    except UserError as error:
        code = _say(error)
    except BrokenPipeError:  # `... | head` closed our standard output
        sys.stderr.close()
        code = 141
    except OSError as error:
        if not (known := refusal(error)):
            raise
        code = _say(known)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from what is finished", file=sys.stderr)
        code = 130
    sys.exit(code)


def _say(error: UserError) -> int:
    print(f"error: {error}", file=sys.stderr, flush=True)
    # torchrun ends with forty lines of its own and repeats in the last ones what it finds here.
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = json.dumps({"message": str(error), "timestamp": int(time.time())})
        with contextlib.suppress(OSError):  # the disk may be what the error is about
            Path(report).write_text(text)
    return error.exit_code
