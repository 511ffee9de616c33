"""When each row last ran on hardware, by the outcome tables that landed."""

from collections import Counter
from collections.abc import Collection
from typing import Any

from fakecuda.conformance.row import Row


def when_rows_ran(rows: Collection[Row], tables: list[dict[str, Any]]) -> list[str]:
    """A line for most rows, which ran together, and one for each other row.

    Args:
        rows: All rows.
        tables: The outcome tables of runs on hardware, oldest first.
    """
    last: dict[str, str] = {}
    for table in tables:
        where = f"{table['date']} on {table['device']}, driver API {table['driver_api']}"
        last |= dict.fromkeys(table["rows"], where)
    ran = {row.name: last.get(row.name, "never") for row in rows if not row.one_sided}
    (usual, count), *_ = Counter(ran.values()).most_common(1)
    lines = [f"{usual}: {count} of {len(rows)} rows"]
    lines += [f"{when}: {name}" for name, when in ran.items() if when != usual]
    lines += [f"the fake alone: {row.name} ({row.one_sided})" for row in rows if row.one_sided]
    return lines
