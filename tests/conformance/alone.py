"""One conformance row on a real driver, in this process alone: prints its outcome.

Rows that need an untouched driver, or may harm the process, run like this:
`python tests/conformance/alone.py ROW`.
"""

import sys

from cuda.bindings import driver

from fakecuda.conformance import ROWS, RealSubject


def main(name: str) -> None:
    """Run the named row on `cuda.bindings.driver`."""
    # Flushed at once: the process may not live to do it later.
    print(ROWS[name].body(RealSubject(driver)), flush=True)  # noqa: T201 - the outcome is the output


if __name__ == "__main__":
    main(sys.argv[1])
