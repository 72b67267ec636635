"""Golden tensors of NemotronLabs VoiceChat, made by NVIDIA's own PyTorch classes.

    python golden/generate.py                                  remake every committed folder
    python golden/generate.py plain grouped --check            remake them elsewhere and compare: exit 1 if they differ
    python golden/generate.py plain --seed 7 --out DIR         a folder of one's own at DIR/plain
    python golden/generate.py small --checkpoint CKPT --out DIR    of another checkpoint in the published layout

Configurations are the files of ``golden/configs``. See ``golden/README.md`` for what a folder holds.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from oracle import environment, settings
from oracle.settings import Settings

FIXTURES = Path(__file__).parent / "fixtures"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"configurations; all of them ({settings.names()})")
    parser.add_argument("--out", type=Path, default=FIXTURES, help="parent of the folders (golden/fixtures)")
    parser.add_argument("--check", action="store_true", help="compare with the folders there instead of replacing them")
    parser.add_argument("--seed", type=int, help="seed of the weights")
    parser.add_argument("--audio-seed", type=int, help="seed of the inputs (weights' seed + 1000)")
    parser.add_argument("--noise-seed", type=int, help="seed of the speech decoder's noise (weights' seed + 2000)")
    parser.add_argument("--checkpoint", type=Path, help="instead of the stored checkpoint that a configuration names")
    parser.add_argument("--override", type=Path, help="a JSON object merged into each configuration")
    return parser.parse_args(arguments)


def configured(name: str, options: argparse.Namespace) -> Settings:
    """One configuration with the command line's changes."""
    overrides = settings.read_overrides(options.override)
    if options.checkpoint is not None:
        overrides["checkpoint"] = stored_at(options.checkpoint.resolve(), name, options.out)
    seeds = {key: getattr(options, key) for key in ("seed", "audio_seed", "noise_seed")}
    return Settings.load(name, overrides | {key: value for key, value in seeds.items() if value is not None})


def stored_at(folder: Path, name: str, out: Path) -> dict[str, str]:
    """A checkpoint that the packages load by its path."""
    remake = f"python golden/generate.py {name} --checkpoint {folder} --out {out}"
    return {"name": str(folder), "folder": str(folder), "remake": remake}


def make(chosen: Settings, folder: Path) -> None:
    """Build the model, run every stage, and write checkpoint, goldens and manifest into ``folder``."""
    from oracle.run import make_folder

    environment.prepare()
    make_folder(chosen, folder)


def replace(name: str, chosen: Settings, out: Path) -> None:
    """Make a folder elsewhere on the same disk, then put it in place: a reader never meets half of one."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.resolve().parent, prefix=".making-") as scratch:
        fresh, old = Path(scratch) / "new", Path(scratch) / "old"
        make(chosen, fresh)
        if (out / name).exists():
            (out / name).rename(old)
        fresh.rename(out / name)
    print(f"{out / name}: written")


def check(name: str, chosen: Settings, out: Path) -> int:
    """Remake a folder elsewhere and print what differs; the number of differences."""
    from oracle.comparison import TOLERANCE, compare, same_machine, settled

    chosen = settled(chosen, out / name)
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / name
        make(chosen, fresh)
        exact = same_machine(out / name, fresh)
        differences = list(compare(out / name, fresh, exact))
    rule = (
        "to the bit" if exact else f"integers exactly, floats within {TOLERANCE:g} of each tensor's largest magnitude"
    )
    print(f"{name}: {len(differences)} differences, compared {rule}")
    width = max((len(difference.where) for difference in differences), default=0)
    for difference in differences:
        print(f"  {difference.where:<{width}}  {difference.what}")
    return len(differences)


def main(arguments: list[str]) -> int:
    """Make or check the named configurations; 1 if a check found differences."""
    options = parse(arguments)
    found = 0
    for name in options.names or settings.names():
        chosen = configured(name, options)
        if options.check:
            found += check(name, chosen, options.out)
        else:
            replace(name, chosen, options.out)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
