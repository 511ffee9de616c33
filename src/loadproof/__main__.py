"""The command ``loadproof``, and ``python -m loadproof``: as light as what comes before Ctrl-C.

The command line takes a third of a second to import, in which an interruption would show a
traceback of whatever was being imported.  Until it can tell of one, it just ends by it.  When it
has told what there was to tell, Python takes some milliseconds more to end: an interruption then
would change the exit status, and is too late.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Import the command line and run it."""
    handler = signal.getsignal(signal.SIGINT)
    # Whoever started it with the signal ignored, as a shell does in the background, meant it.
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from loadproof import cli  # noqa: PLC0415 -- see above

    signal.signal(signal.SIGINT, handler)
    try:
        cli.main()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
