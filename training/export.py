"""The trained parts as one checkpoint in the published layout: ``python -m training.export --help``.

Each training leaves a safetensors file with its networks' tensors under the checkpoint's own names and axes. Together
they must fill the model: what is missing, left over or of another shape is refused by the loader's own checks. Licence
and notices go with them, as they lie beside the checkpoint of the package; its model card is written by hand.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import mlx.core as mx

from training.small import TEXT_VOCABULARY, small_config
from training.vocabulary import rnnt_pieces, write_tokenizer
from voicechat_core.builtin import FOLDER, SMALL
from voicechat_core.checkpoint import checkpoint_tensors
from voicechat_core.config import VoiceChatConfig
from voicechat_core.convert import convert
from voicechat_core.errors import CheckpointError
from voicechat_core.files import written_whole
from voicechat_core.model import Networks, char_table
from voicechat_core.nn.char_table import CharTable
from voicechat_core.quantization import Quantization
from voicechat_core.shards import INDEX
from voicechat_core.synthetic import published
from voicechat_core.tokenizer import Tokenizer
from voicechat_core.weights import SHARD_BYTES, assign, read_tensors, write_tensors

__all__ = ["dense", "export", "stored"]

# The nearest of two codes must not be a matter of rounding: 11 bits of mantissa where the codes are found.
HALF = ("tts_model.audio_codec.", "tts_model.tts_model.rvq_embs")
# Few numbers; exponents of exponents; and the filterbank, which whoever reads it must read exactly.
WIDE = (".A_log", ".dt_bias", "tts_model.audio_prompt_latents.Aria", ".featurizer.fb", ".featurizer.window")
FILES = ("tts_model.audio_codec.", "stt_model.", "tts_model.")  # the first that fits has a tensor
SHARD = "model-{:05d}-of-{:05d}.safetensors"
NOTICES = ("LICENSE", "NOTICE")  # the NOTICE is hibari's, whose voice the answers have
# As the published 8-bit build: the language model with its table and heads. Groups of 64 divide all its widths.
PACKED = Quantization(group_size=64, bits=8)


def stored(tensors: Iterable[tuple[str, mx.array]]) -> Iterator[tuple[str, mx.array]]:
    """Each tensor in the format that the checkpoint keeps it in: 16 bits but where that would change a choice."""
    for name, value in tensors:
        if not mx.issubdtype(value.dtype, mx.floating) or name.endswith(WIDE):
            yield name, value
        else:
            yield name, value.astype(mx.float16 if name.startswith(HALF) else mx.bfloat16)


def export(parts: list[Path], target: Path, *, packed: bool = True) -> int:
    """Write the checkpoint that the trained ``parts`` make.

    Args:
        parts: safetensors files whose tensors together are the model's.
        target: a directory that does not exist.
        packed: with the language model in 8 bits; without, all matrices in 16.

    Returns the bytes of weights.

    Raises:
        CheckpointError: when tensors are missing, given twice or of another shape, or the target cannot be written.
    """
    with tempfile.TemporaryDirectory() as scratch, written_whole(target) as directory:
        whole = Path(scratch) / "dense"
        dense(parts, whole)
        if packed:
            whole, source = Path(scratch) / "packed", whole
            convert(source, whole, PACKED)
        for name in NOTICES:
            shutil.copyfile(FOLDER / SMALL / name, directory / name)
        return _in_files(whole, directory)


def _in_files(whole: Path, target: Path) -> int:
    """The same checkpoint with a file for each of ``FILES``: training a part again leaves the others' bytes alone."""
    tensors, total = read_tensors(whole), 0
    weight_map: dict[str, str] = {}
    for number, prefix in enumerate(FILES, 1):
        file = target / SHARD.format(number, len(FILES))
        some = {name: tensors.pop(name) for name in sorted(tensors) if name.startswith(prefix)}
        mx.save_safetensors(str(file), some, {"format": "pt"})
        weight_map |= dict.fromkeys(some, file.name)
        total += sum(value.nbytes for value in some.values())
    if tensors:
        raise CheckpointError(f"{min(tensors)}: belongs to no file")
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    for file in whole.glob("*.json"):
        if file.name != INDEX:
            shutil.copyfile(file, target / file.name)
    return total


def dense(parts: list[Path], target: Path) -> int:
    """The checkpoint with every matrix in 16 bits; see ``export``."""
    config = small_config(rnnt_pieces())
    with written_whole(target) as scratch:
        write_tokenizer(scratch)
        tokenizer = Tokenizer.from_directory(scratch, TEXT_VOCABULARY)
        networks = _networks(config, char_table(config, tokenizer), parts)
        text = json.dumps(published(config), indent=1, ensure_ascii=False)
        (scratch / "config.json").write_text(text, encoding="utf-8")
        return write_tensors(scratch, stored(checkpoint_tensors(networks, config)), SHARD_BYTES)


def _networks(config: VoiceChatConfig, chars: CharTable, parts: list[Path]) -> Networks:
    tensors: dict[str, mx.array] = {}
    for part in parts:
        found = cast("dict[str, mx.array]", mx.load(str(part)))
        twice = sorted(tensors.keys() & found.keys())
        if twice:
            raise CheckpointError(f"{part}: {twice[0]} is in another part too")
        tensors |= found
    networks = Networks(config)
    _fill_buffers(networks, chars)
    assign(networks, tensors, optional=_buffers(networks))
    if tensors:
        raise CheckpointError(f"{sorted(tensors)[0]}: not a tensor of this model")
    return networks


def _buffers(networks: Networks) -> tuple[str, ...]:
    """Integer buffers of the speech decoder, which follow from the vocabulary."""
    start = "tts_model.tts_model.embed_subword"
    flags = ("subword_flag_emb.is_continuation", "bos_eos_emb.special_flags")
    return tuple(f"{start}.{name}" for name in (*flags, "subword_flag_emb.pad_tensor", "bos_eos_emb.pad_tensor"))


def _fill_buffers(networks: Networks, chars: CharTable) -> None:
    flags = networks.tts_model.tts_model.embed_subword
    flags.subword_flag_emb.is_continuation = mx.array(chars.is_continuation)
    flags.bos_eos_emb.special_flags = mx.array(chars.special_flags)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path, nargs="+", help="the codec's, the listening's and the speaking's file")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint's directory; must not exist")
    parser.add_argument("--dense", action="store_true", help="keep the language model in 16 bits")
    options = parser.parse_args()
    size = export(options.parts, options.out, packed=not options.dense)
    print(f"{options.out}: {size / 1e6:.2f} MB of weights, {' and '.join(NOTICES)}; no model card (README.md)")


if __name__ == "__main__":
    main()
