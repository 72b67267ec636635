"""The ``voicechat-server`` command."""

import sys
from importlib.metadata import version

__all__ = ["main"]


def main() -> None:
    """Say what this version can do: nothing yet. Exits with status 1, or 0 for ``--version``."""
    if sys.argv[1:] == ["--version"]:
        print(version("voicechat-server"))
        return
    sys.exit(f"voicechat-server {version('voicechat-server')}: not implemented in this version; only voicechat-core is")
