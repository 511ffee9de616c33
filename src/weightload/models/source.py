"""Where a model's files are: a local folder, or a repository's copy in the hub's cache.

Only what a load needs is asked of the hub: the small files first, then the shards
that their index names. huggingface_hub decides what is fetched and what is cached, and
honours its own offline switch. Everything after comes from one commit.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weightload.checkpoint.folder import INDEX_NAME, SINGLE_NAME, read_index
from weightload.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import os

# What from_pretrained itself uses to find a repository's files, and its defaults.
HUB_DEFAULTS: dict[str, Any] = {
    "cache_dir": None,
    "force_download": False,
    "local_files_only": False,
    "proxies": None,
    "revision": "main",
    "subfolder": "",
    "token": None,
}
_SMALL_FILES = ("*.json", "*.py", "*.jinja")
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")


class Source(NamedTuple):
    """A model's files.

    Attributes:
        name: what the caller called it.
        folder: holds the config and the weights.
        hub: keywords that find the same files again.
    """

    name: str | os.PathLike[str]
    folder: Path
    hub: dict[str, Any]


def locate(name: str | os.PathLike[str], hub: dict[str, Any]) -> Source:
    """Find a model's files, and fetch them if they are not here.

    Args:
        name: a folder, or a repository of the hub.
        hub: the caller's own among `HUB_DEFAULTS`.

    Raises:
        UsageError: there is no such folder or repository, or it cannot be reached.
    """
    subfolder = hub.get("subfolder") or ""
    path = Path(name)
    if path.is_file():
        raise UsageError(f"{path} is a file; point to the folder that also holds config.json.")
    if path.is_dir():
        return Source(name, path / subfolder, hub)
    root = _fetch(str(name), hub, [f"{_within(subfolder)}{each}" for each in _SMALL_FILES])
    # The folder of a copy in the cache is called by its commit.
    hub = hub | {"revision": root.name}
    folder = root / subfolder
    index = folder / INDEX_NAME
    shards = [SINGLE_NAME]
    if index.is_file():
        shards += sorted(set(read_index(index).values()))
    _fetch(str(name), hub, [f"{_within(subfolder)}{each}" for each in shards])
    return Source(name, folder, hub)


def _within(subfolder: str) -> str:
    return f"{subfolder}/" if subfolder else ""


def _fetch(repository: str, hub: dict[str, Any], patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for the hub
    from huggingface_hub.errors import (  # noqa: PLC0415 - only for the hub
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    passed = {
        key: value
        for key, value in hub.items()
        if key in {"cache_dir", "force_download", "local_files_only", "revision", "token"}
    }
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns, **passed))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise UsageError(
            f"{repository} is neither a folder here nor a repository of the hub that you may "
            f"read; check the name, or give a token."
        ) from error
    except RevisionNotFoundError as error:
        raise UsageError(
            f"{repository} has no revision {hub['revision']!r}; give a branch, a tag or a commit "
            f"that it has."
        ) from error
    except LocalEntryNotFoundError as error:
        raise UsageError(
            f"{repository} is not in the hub's cache and cannot be fetched now; go online, or "
            f"give the folder that holds it."
        ) from error


def weights_of(source: Source) -> Path:
    """The file or folder to load, as from_pretrained would choose it.

    Raises:
        CheckpointError: the weights are not safetensors.
    """
    folder = source.folder
    if (folder / SINGLE_NAME).is_file():
        return folder / SINGLE_NAME
    if (folder / INDEX_NAME).is_file():
        return folder
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{source.name} holds its weights as pickles ({pickles[0]}), which can run code of "
            f"their own when they are read; load it once with from_pretrained, write it with "
            f"save_pretrained, and load that."
        )
    raise CheckpointError(
        f"{source.name} holds neither {SINGLE_NAME} nor {INDEX_NAME}; point to the folder of a "
        f"model's weights, or write the model with save_pretrained."
    )
