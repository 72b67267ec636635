"""``python -m tests.soak``: see ``nox -s soak``. Status 1 with the first thing that did not come back."""

import argparse
import secrets
import sys
import tempfile
from functools import partial
from pathlib import Path

import trio

from tests.server.server_process import serving
from tests.soak.soak import SoakError, soak
from voicechat_core.synthetic import synthesize

WARM_TURNS = 60  # about half a minute


def main() -> int:
    """Run it on a small checkpoint."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    options = parser.parse_args()
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, log = Path(folder) / "tiny", Path(folder) / "log"
        synthesize(checkpoint, seed=0)
        try:
            with serving(checkpoint, log) as server:
                tell = partial(print, flush=True)
                trio.run(partial(soak, server, minutes=options.minutes, seed=seed, warm_turns=WARM_TURNS, tell=tell))
        except (SoakError, AssertionError, OSError) as error:
            print(*log.read_text().splitlines()[-20:], sep="\n", file=sys.stderr)
            print(f"seed {seed}: {error}", file=sys.stderr)
            return 1
    print("everything came back")
    return 0


sys.exit(main())
