"""Writing values as the Python text that makes them again."""

from dataclasses import MISSING, fields, is_dataclass
from enum import IntEnum
from typing import Any


def as_code(value: Any) -> str:
    """An expression that gives an equal value where `from fakecuda import *` has been done.

    Args:
        value: A plain value, one of the driver's enumerations, or a dataclass of such.
    """
    if isinstance(value, IntEnum):
        return f"FakeCuda.{type(value).__name__}.{value.name}"
    if isinstance(value, dict):
        items = ", ".join(f"{as_code(key)}: {as_code(item)}" for key, item in value.items())
        return f"{{{items}}}"
    if is_dataclass(value):
        stated = [
            f"{field.name}={as_code(getattr(value, field.name))}"
            for field in fields(value)
            if field.default is MISSING or getattr(value, field.name) != field.default
        ]
        return f"{type(value).__name__}({', '.join(stated)})"
    return repr(value)
