"""The command ``loadproof``, and ``python -m loadproof``: as light as what comes before Ctrl-C.

The command line takes a third of a second to import, in which an interruption would show a
traceback of whatever was being imported.  Until it can tell of one, it just ends by it.
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
    cli.main()


if __name__ == "__main__":
    main()
