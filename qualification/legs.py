"""A leg of a table: one process that answers once, or whose failure is its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

Leg = dict[str, Any]

LEG_TIMEOUT_S = 120


def run_apart(context: Any, run: Callable[[Leg, Connection], None], spec: Leg) -> Leg:  # noqa: ANN401 - contexts share no base with Pipe and Process
    """Run one leg in a process of its own.

    Args:
        context: of multiprocessing; a fork server that has imported torch and never touched
            CUDA lets every leg make its own context without importing again.
        run: called there with the leg and the pipe for its answer.
        spec: the leg.
    """
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(spec, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(LEG_TIMEOUT_S):
            return {"failed": f"no result after {LEG_TIMEOUT_S} s"}
        result: Leg = ours.recv()
    except EOFError:
        # A loader that fails is a result; it is shown, and no ratio is made of it.
        return {"failed": "the process ended without a result"}
    else:
        return result
    finally:
        process.kill()
        process.join()
