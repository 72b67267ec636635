"""Which modules of a checkpoint are quantized, and how: the config's map against the tensors. Knows no arrays.

MLX's affine scheme stores a matrix ``[outputs, inputs]`` as ``weight`` (uint32, ``bits`` bits a number, packed along a
row), and ``scales`` and ``biases`` (one of each for ``group_size`` numbers of a row). The tensors are the truth: a
module is quantized if and only if its ``scales`` exist. The map in config.json says with what bits and group size;
where the shapes say something else, the shapes are right.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from voicechat_core.errors import ConfigError

__all__ = ["BITS", "GROUP_SIZES", "Plan", "Quantization", "QuantizationMap", "Shaped", "plan"]

BITS = (2, 3, 4, 5, 6, 8)  # a number's; what MLX's affine kernels know
GROUP_SIZES = (32, 64, 128)
WORD = 32  # bits
MODE = "affine"


@dataclass(frozen=True)
class Quantization:
    """How one matrix is stored."""

    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.bits} bits in groups of {self.group_size}"

    def shapes(self, outputs: int, inputs: int) -> tuple[list[int], list[int]]:
        """Shapes of the packed weight and of its scales; ``inputs`` is a multiple of the group size."""
        return [outputs, inputs * self.bits // WORD], [outputs, inputs // self.group_size]


@dataclass(frozen=True)
class QuantizationMap:
    """``quantization`` of config.json: a setting for all modules, and what single modules say of themselves.

    ``overrides`` maps a module's path, from the checkpoint's root, to its own setting or to whether it is quantized.
    """

    default: Quantization | None = None
    overrides: dict[str, Quantization | bool] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the map; keys that are neither settings nor paths of modules are ignored.

        Raises:
            ConfigError: naming the key, for a mode other than affine and for bits or a group size that do not exist.
        """
        default = _setting("quantization", data) if "bits" in data or "group_size" in data else None
        overrides: dict[str, Quantization | bool] = {}
        for path, entry in data.items():
            if "." not in path:  # the settings themselves, and what other software keeps here
                continue
            if isinstance(entry, bool):
                overrides[path] = entry
            elif isinstance(entry, Mapping):
                overrides[path] = _setting(f"quantization.{path}", {**_inherited(default), **entry})
            else:
                raise ConfigError(f"quantization.{path} is {entry!r}; a setting, true or false is needed")
        return cls(default, overrides)

    def of(self, path: str) -> Quantization | None:
        """What the map says of a quantized module, or None if it says nothing."""
        own = self.overrides.get(path)
        return own if isinstance(own, Quantization) else self.default


def _inherited(default: Quantization | None) -> dict[str, Any]:
    return {} if default is None else {"bits": default.bits, "group_size": default.group_size}


def _setting(where: str, entry: Mapping[str, Any]) -> Quantization:
    mode = entry.get("mode", MODE)
    if mode != MODE:
        raise ConfigError(f"{where}.mode is {mode!r}; only {MODE!r} is supported")
    for key, known in (("bits", BITS), ("group_size", GROUP_SIZES)):
        if type(entry.get(key)) is not int or entry[key] not in known:
            raise ConfigError(f"{where}.{key} is {entry.get(key)!r}; one of {', '.join(map(str, known))} is needed")
    return Quantization(entry["bits"], entry["group_size"])


# ------------------------------------------------------------------------------------- map and tensors


class Shaped(Protocol):
    """What is looked at of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its axes."""

    @property
    def dtype(self) -> Any:
        """Its kind of number, whose text ends in ``uint32`` for packed ones."""


@dataclass
class Plan:
    """A checkpoint's quantized modules and their settings, what forbids loading it, and what is merely odd."""

    modules: dict[str, Quantization] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)  # by the module's path
    warnings: list[str] = field(default_factory=list)


def plan(
    quantization_map: QuantizationMap, tensors: Mapping[str, Shaped], matrices: Mapping[str, tuple[int, int]]
) -> Plan:
    """Match the map with the tensors.

    Args:
        quantization_map: what config.json says.
        tensors: everything that is stored, by name.
        matrices: path of each module that can be quantized, and its outputs and inputs.

    Returns:
        The packed modules that can be loaded, a problem for each other one, and what is merely odd.
    """
    result = Plan()
    for path in sorted(name.removesuffix(".scales") for name in tensors if name.endswith(".scales")):
        fault = _fault(path, quantization_map, tensors, matrices)
        fault = fault or _settle(path, quantization_map, tensors, matrices[path], result)
        if fault is not None:
            result.problems[path] = fault
    result.problems.update(_orphans(tensors))
    result.warnings.extend(_unfulfilled(quantization_map, result, tensors))
    return result


def _settle(
    path: str, config: QuantizationMap, tensors: Mapping[str, Shaped], matrix: tuple[int, int], result: Plan
) -> str | None:
    """Add a module with the setting that its shapes have, and a warning where the map says another; or say why not."""
    weight, scales = (list(tensors[f"{path}.{part}"].shape) for part in ("weight", "scales"))
    said = config.of(path)
    fits = [q for q in _every_setting(matrix[1]) if q.shapes(*matrix) == (weight, scales)]
    if not fits:
        return _misfit(path, said, weight, scales, *matrix)
    (result.modules[path],) = fits
    if said != fits[0]:
        says = "nothing" if said is None else str(said)
        result.warnings.append(f"{path}: config.json says {says}, its shapes {fits[0]}, which is taken")
    return None


def _every_setting(inputs: int) -> Iterator[Quantization]:
    """No two of them give the same shapes: the words of a row tell the bits, its scales the group size."""
    return (Quantization(bits, size) for bits in BITS for size in GROUP_SIZES if inputs % size == 0)


def _fault(
    path: str, config: QuantizationMap, tensors: Mapping[str, Shaped], matrices: Mapping[str, tuple[int, int]]
) -> str | None:
    """What is wrong with a module that has scales, before any shape is looked at."""
    for part in ("weight", "biases"):
        if f"{path}.{part}" not in tensors:
            return f"{path} has scales but no {part}"
    if path not in matrices:
        return f"{path} has scales, but this model has no matrix of that name that could be quantized"
    if config.overrides.get(path) is False:
        return f"{path} has scales, but config.json says that it is not quantized (false)"
    kind = str(tensors[f"{path}.weight"].dtype).rsplit(".", 1)[-1]
    if kind != "uint32":
        return f"{path} is there both dense ({kind} weight) and quantized (scales): one of the two is needed"
    scales, biases = (list(tensors[f"{path}.{part}"].shape) for part in ("scales", "biases"))
    if scales != biases:
        return f"{path}.scales has shape {scales} but {path}.biases {biases}"
    return None


def _misfit(
    path: str, said: Quantization | None, weight: list[int], scales: list[int], outputs: int, inputs: int
) -> str:
    if said is not None and inputs % said.group_size:
        return f"{path}: group_size {said.group_size} does not divide its {inputs} inputs"
    found = f"weight {weight} and scales {scales}"
    if said is None:
        return f"{path}: {found} fit no bits and group size for {outputs} outputs and {inputs} inputs"
    wanted, wanted_scales = said.shapes(outputs, inputs)
    return f"{path}: {found}; {said} make them {wanted} and {wanted_scales}"


def _orphans(tensors: Mapping[str, Shaped]) -> Iterator[tuple[str, str]]:
    for name in sorted(tensors):
        path, _, part = name.rpartition(".")
        if part == "biases" and f"{path}.scales" not in tensors:
            yield path, f"{path} has biases but no scales"
        is_packed = str(tensors[name].dtype).endswith("uint32")
        if part == "weight" and is_packed and f"{path}.scales" not in tensors:
            yield path, f"{path} has a packed weight (uint32) but no scales"


def _unfulfilled(config: QuantizationMap, found: Plan, tensors: Mapping[str, Shaped]) -> Iterator[str]:
    """What the map promises and the tensors do not hold; a dense weight is loaded as it is."""
    if config.default is not None and not found.modules and not found.problems:
        yield f"config.json says {config.default}, but nothing is packed"
    for path, own in sorted(config.overrides.items()):
        if own is False or path in found.modules or path in found.problems:
            continue
        if f"{path}.weight" in tensors:
            yield f"{path}: config.json says that it is quantized, but its weight is dense and has no scales"
        else:
            yield f"{path}: config.json says that it is quantized, but there is no such module"
