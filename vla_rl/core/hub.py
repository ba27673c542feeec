"""``hf://OWNER/NAME``: checkpoints and data sets on the model hub, downloaded once and then read as folders.

hf://OWNER/NAME             the whole repository
hf://OWNER/NAME@REVISION    a branch, tag or commit of it
hf://OWNER/NAME/PATH        a file or folder in it
"""

import re
from pathlib import Path
from typing import Literal

from vla_rl.core.errors import UserError

PREFIX = "hf://"
_ADDRESS = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+?))?(/(?P<path>.+))?")

RepoType = Literal["model", "dataset"]


def is_hub_address(text: object) -> bool:
    """Whether this is meant as an address on the hub."""
    return isinstance(text, str) and text.startswith(PREFIX)


def hub_address_problem(text: str) -> str | None:
    """What is wrong with an address, and the remedy; None if it is well-formed."""
    return None if _ADDRESS.fullmatch(text) else "is no address on the model hub; write hf://OWNER/NAME"


def download(address: str, repo_type: RepoType) -> Path:
    """The local copy of what an address names; nothing is downloaded twice.

    Raises UserError if it does not exist, or if neither the hub nor an earlier copy can be reached.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise UserError(f"{address} {hub_address_problem(address)}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"{address}: to download it, pip install huggingface_hub; or name a folder") from None
    path = found["path"]
    patterns = None if path is None else [path, f"{path}/*"]
    try:
        root = Path(
            snapshot_download(found["repo"], repo_type=repo_type, revision=found["revision"], allow_patterns=patterns)
        )
    except Exception as error:  # of the hub's and of the network's libraries, which have no common base
        kind = "data set" if repo_type == "dataset" else "model"
        raise UserError(
            f"{address}: this {kind} cannot be downloaded ({type(error).__name__}: {_first_line(error)}); check the "
            "name, the network and, for a private one, the token (HF_TOKEN); or name a folder"
        ) from error
    local = root / path if path else root
    if not local.exists():
        raise UserError(f"{address}: {found['repo']} has no {path}")
    return local


def upload(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Create the model repository if it is missing, and commit the folder's files to it; returns its address.

    Raises UserError without network or token, or if the repository cannot be written.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UserError(f"--repo {repo}: write OWNER/NAME")
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise UserError("to push, pip install huggingface_hub") from None
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(folder_path=str(folder), repo_id=repo, commit_message=message)
    except Exception as error:  # as in ``download``
        raise UserError(
            f"{repo}: nothing was pushed ({type(error).__name__}: {_first_line(error)}); check the network and the "
            "token (HF_TOKEN, or `hf auth login`); --dry-run DIR writes what would be pushed"
        ) from error
    return PREFIX + repo


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
