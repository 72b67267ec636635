"""The spellings of config.json that other writers use, turned into one; and the layouts that are another's."""

import re
from typing import Any

from voicechat_core.errors import ConfigError

__all__ = ["MODEL_TYPE", "found_at", "normalised", "reject_other_layouts"]

MODEL_TYPE = "nemotron_voicechat"
BLOCK_TYPES = {"mamba": "M", "attention": "*", "mlp": "-"}
NO_CLAMP = [0.0, float("inf")]


def reject_other_layouts(data: dict[str, Any]) -> None:
    """Refuse what is not a runtime config.

    Raises:
        ConfigError: for a NeMo training config, another ``model_type``, or a part without which nothing can be made.
    """
    model_type = data.get("model_type")
    if model_type is None and isinstance(data.get("model"), dict) and "stt" in data["model"]:
        raise ConfigError("this is a NeMo training config (model.stt, no model_type): convert first")
    if model_type != MODEL_TYPE:
        raise ConfigError(f"model_type is {model_type!r}; only {MODEL_TYPE!r} is supported")
    if data.get("text_config") is None:
        raise ConfigError("text_config is missing")
    if data.get("tts_config") is None:
        raise ConfigError("tts_config is missing: its guidance_scale, top_p and noise_scale have no default")


def normalised(data: dict[str, Any]) -> dict[str, Any]:
    """A parsed config where null is absent, the attention context flat and the layer pattern a string.

    What is of the wrong type stays as it is: the schema names it.

    Raises:
        ConfigError: for a limit on Mamba's step sizes, which would change every hidden state, and for a number that
            NVIDIA's code would read as something else.
    """
    result: dict[str, Any] = _without_nulls(data)
    _normalise_pattern(_part(result, "text_config"))
    _check_time_step_limit(_part(result, "text_config").get("time_step_limit", NO_CLAMP))
    characters = _part(_part(result, "tts_config"), "character_encoder")
    if "rope_theta" in characters:  # transformers' name for it
        characters.setdefault("rope_base", characters["rope_theta"])
    _check_top_p(_part(result, "tts_config").get("top_p"))
    encoder = _part(_part(result, "audio_config"), "encoder")
    context = encoder.get("att_context_size")
    if isinstance(context, list) and len(context) == 1 and isinstance(context[0], list):
        encoder["att_context_size"] = context[0]
    return result


def found_at(data: dict[str, Any], message: str) -> str:
    """What stands at the place that a schema error names, as ``; found ...``: its message has the range only."""
    place = re.search(r"at `\$\.([\w.]+)`$", message)
    value: Any = data
    for key in place[1].split(".") if place else ():
        value = value.get(key) if isinstance(value, dict) else None
    return f"; found {value!r}" if place and isinstance(value, int | float | str) else ""


def _part(data: dict[str, Any], name: str) -> dict[str, Any]:
    """An object inside an object, or an empty one where there is something else."""
    part = data.get(name)
    return part if isinstance(part, dict) else {}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _normalise_pattern(text: dict[str, Any]) -> None:
    pattern = text.get("hybrid_override_pattern")
    if pattern is None and isinstance(text.get("layers_block_type"), list):
        pattern = [BLOCK_TYPES.get(str(kind), str(kind)) for kind in text["layers_block_type"]]
    if isinstance(pattern, list):
        pattern = "".join(str(kind) for kind in pattern)
    if pattern is not None:
        text["hybrid_override_pattern"] = pattern


def _check_time_step_limit(limit: Any) -> None:
    bounds = [_untagged(bound) for bound in limit] if isinstance(limit, list) else limit
    if bounds != NO_CLAMP:
        raise ConfigError(f"text_config.time_step_limit is {bounds!r}; only {NO_CLAMP!r} is supported")


def _check_top_p(top_p: Any) -> None:
    """NVIDIA's key is "top p or k": there a float is a mass and an integer a count."""
    if isinstance(top_p, int):
        raise ConfigError(f"tts_config.top_p is the integer {top_p}, which stands for top-k; only a float is supported")


def _untagged(bound: Any) -> Any:
    """A float as some writers tag it, ``{"__float__": "Infinity"}``."""
    tagged = isinstance(bound, dict) and bound.get("__float__") == "Infinity"
    return float("inf") if tagged else bound
