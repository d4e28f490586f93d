"""From what a user calls a model to a local checkpoint directory."""

from __future__ import annotations

import re
from pathlib import Path

from deepinfer_core.errors import CheckpointError

FILES = ["*.json", "*.safetensors"]  # no code, no pickles
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(model: str | Path, revision: str | None = None) -> Path:
    """The local directory of `model`: a directory, or a Hugging Face id whose files are fetched through huggingface_hub.

    Raises: CheckpointError if it is neither, if huggingface_hub is not installed, or if the download fails.
    """
    if Path(model).is_dir():
        return Path(model)
    if not _HUB_ID.fullmatch(str(model)):
        raise CheckpointError(
            f"model {str(model)!r} is no directory; expected a checkpoint directory or a Hugging Face id like 'OWNER/NAME'; check the path"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise CheckpointError(
            f"model {str(model)!r} is no directory, and as a Hugging Face id it needs huggingface_hub, which is not installed; "
            "run `pip install huggingface_hub`, or give the directory of a downloaded checkpoint"
        ) from None
    try:
        return Path(snapshot_download(str(model), revision=revision, allow_patterns=FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model {str(model)!r} is no directory and cannot be fetched from Hugging Face ({str(error).splitlines()[0]}); check the id, "
            "the revision and the network, or give a local directory"
        ) from error
