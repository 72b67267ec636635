"""Names of the files that a checkpoint's tensors lie in. Reads nothing."""

import re

__all__ = ["INDEX", "SINGLE", "numbered"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def numbered(names: set[str]) -> set[str]:
    """Every shard that names like ``model-00001-of-00003.safetensors`` promise."""
    pattern = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.safetensors")
    found = [match for name in names if (match := pattern.fullmatch(name))]
    return {f"{m[1]}-{i:05d}-of-{m[3]}.safetensors" for m in found for i in range(1, int(m[3]) + 1)}
