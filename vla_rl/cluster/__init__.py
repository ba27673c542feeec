"""The cluster: from a plan to supervised Ray actors. No other room imports Ray."""

import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path


def _ask_for_a_token() -> None:
    """Let Ray's processes answer only who knows a secret: all users of a machine can reach its loopback interface.

    Ray reads these variables when it is imported. A token of the user's own stays, since a running cluster knows it.
    Its file is read once: processes that start later do not miss it when it is gone.
    """
    own = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if "ray" in sys.modules or own:
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    token = ""
    with suppress(OSError):
        token = Path("~/.ray/auth_token").expanduser().read_text().strip()
    os.environ["RAY_AUTH_TOKEN"] = token or secrets.token_hex(32)


_ask_for_a_token()
