"""What a user did wrong, said in one message without a stack trace."""

from __future__ import annotations

import sys
from collections.abc import Callable

USER_ERROR_EXIT = 2


class UserError(Exception):
    """A mistake the user can mend: `what` names the file, key or value, `remedy` says what to do."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  -> {self.remedy}" if self.remedy else self.what


def run_cli(main: Callable[[], int | None]) -> None:
    """Runs a command's `main` and exits: 0 or its return value, 2 for a UserError, 130 for Ctrl-C."""
    try:
        code = main() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = USER_ERROR_EXIT
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from what is finished", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # `... | head` closed our standard output
        sys.stderr.close()
        code = 141
    sys.exit(code)
