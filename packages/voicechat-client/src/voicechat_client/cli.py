"""The ``voicechat-client`` command."""

import sys
from importlib.metadata import version

__all__ = ["main"]


def main() -> None:
    """Say what this version can do: nothing yet. Exits with status 1, or 0 for ``--version``."""
    if sys.argv[1:] == ["--version"]:
        print(version("voicechat-client"))
        return
    sys.exit(f"voicechat-client {version('voicechat-client')}: not implemented in this version; only voicechat-core is")
