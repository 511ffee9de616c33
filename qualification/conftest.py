"""One set of bodies for a GB10 and for any other CUDA GPU: the marker says which was asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qualification.cuda_rehearsal import make_checkpoint

if TYPE_CHECKING:
    from loadproof.gate import DeviceClass

# A folder of safetensors of one's own, instead of the one that is made here.
CHECKPOINT_VARIABLE = "LOADPROOF_CHECKPOINT"


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("gb10", marks=pytest.mark.gb10),
        pytest.param("cuda", marks=pytest.mark.cuda),
    ],
)
def device_class(request: pytest.FixtureRequest) -> DeviceClass:
    """The class of hardware that was asked for; the gate has checked that it is here."""
    asked: DeviceClass = request.param
    return asked


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint to qualify on: the user's, or 3 GB of random bytes."""
    given = os.environ.get(CHECKPOINT_VARIABLE)
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("weights")
    make_checkpoint(folder, 3.0)
    return folder
