"""Two goldens folders side by side: the committed one and one just made.

On the processor the committed folder was made with, every tensor must agree to the bit. Elsewhere vector widths and
fused multiplications differ: integers must still be equal, and floating-point tensors within ``TOLERANCE`` of the
largest magnitude in the committed tensor.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from . import manifest
from .settings import Settings

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Difference:
    """One disagreement, ready to print."""

    where: str
    what: str


def same_machine(committed: Path, fresh: Path) -> bool:
    """Whether both folders were made with the same libraries on the same kind of processor."""
    return manifest.read(committed)["env"] == manifest.read(fresh)["env"]


def compare(committed: Path, fresh: Path, exact: bool) -> Iterator[Difference]:
    """Every difference; nothing if the folders agree. Of another checkpoint than the committed one, that alone."""
    if (other := another_checkpoint(committed, fresh)) is not None:
        yield other
        return
    paths = {str(path.relative_to(root)) for root in (committed, fresh) for path in root.rglob("*") if path.is_file()}
    for name in sorted(paths - {"manifest.json"}):
        missing = [root for root in (committed, fresh) if not (root / name).exists()]
        if missing:
            yield Difference(name, f"not in {missing[0]}")
        elif name.endswith(".safetensors"):
            yield from compare_tensors(name, load_file(committed / name), load_file(fresh / name), exact)
        elif (committed / name).read_bytes() != (fresh / name).read_bytes():
            yield Difference(name, "different bytes")
    yield from stale_hashes(committed)


def another_checkpoint(committed: Path, fresh: Path) -> Difference | None:
    """For folders of a stored checkpoint: the first of its files that has changed since the committed one was made."""
    old, new = manifest.read(committed), manifest.read(fresh)
    stored = old.get("checkpoint")
    changed = sorted(name for name in old["files"] | new["files"] if old["files"].get(name) != new["files"].get(name))
    if stored is None or not changed:
        return None
    return Difference(stored["name"], f"{changed[0]} is not the one that this was made with: {stored['remake']}")


def compare_tensors(
    file: str, committed: dict[str, torch.Tensor], fresh: dict[str, torch.Tensor], exact: bool
) -> Iterator[Difference]:
    """The tensors of one file, by name."""
    for name in sorted(committed.keys() | fresh.keys()):
        if name not in committed or name not in fresh:
            yield Difference(f"{file} {name}", f"only in the {'committed' if name in committed else 'new'} file")
            continue
        what = disagreement(committed[name], fresh[name], exact)
        if what:
            yield Difference(f"{file} {name}", what)


def disagreement(old: torch.Tensor, new: torch.Tensor, exact: bool) -> str | None:
    """Why two tensors do not count as the same, or None."""
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        return f"{list(old.shape)} {old.dtype} became {list(new.shape)} {new.dtype}"
    if old.numpy().tobytes() == new.numpy().tobytes():
        return None
    if not old.is_floating_point():
        return f"{int((old != new).sum())} of {old.numel()} integers differ"
    error = float((old.double() - new.double()).abs().max() / old.double().abs().max().clamp_min(1e-30))
    if not exact and error <= TOLERANCE:
        return None
    return f"differs by {error:.1e} of the largest magnitude"


def stale_hashes(folder: Path) -> Iterator[Difference]:
    """Tensors and files of a folder that are not the ones its manifest describes."""
    listed = manifest.read(folder)
    for name, expected in () if "checkpoint" in listed else listed["files"].items():
        if manifest.digest((folder / "checkpoint" / name).read_bytes()) != expected:
            yield Difference(f"checkpoint/{name}", "not the file the manifest describes")
    for path in sorted((folder / "goldens").glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if listed["tensors"].get(f"{path.stem}/{name}") != manifest.describe(tensor):
                yield Difference(f"goldens/{path.name} {name}", "not the tensor the manifest describes")


def settled(settings: Settings, folder: Path) -> Settings:
    """Those with the noise that a folder was made with: a search for one may end elsewhere on another processor."""
    if "noise_tries" not in settings.inputs:
        return settings
    seed = manifest.read(folder)["meta"]["settings"]["noise_seed"]
    return replace(settings, noise_seed=seed, inputs=settings.inputs | {"noise_tries": 1})
