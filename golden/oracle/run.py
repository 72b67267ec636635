"""One folder, from settings to manifest."""

import tempfile
from pathlib import Path

import torch

from . import checkpoint, manifest, model, tokenizer
from .model import Oracle
from .recording import Tensors
from .settings import Settings
from .stages import codec, ear_tts, end_to_end, llm, perception, rnnt


def make_folder(settings: Settings, folder: Path) -> None:
    """Write ``checkpoint/``, ``goldens/`` and ``manifest.json`` into the new ``folder``."""
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        oracle = model.build(settings, Path(scratch))
        save_checkpoint(oracle, folder / "checkpoint")
        stages = run_stages(oracle)
    manifest.write_stages(folder / "goldens", stages)
    manifest.write(folder, settings, stages)


def save_checkpoint(oracle: Oracle, folder: Path) -> None:
    """The weights as they are now, with their configuration and tokenizer."""
    folder.mkdir(parents=True)
    characters = len(oracle.tts.tts_model.embed_subword.char_vocab)
    config = checkpoint.runtime_config(oracle.settings, oracle.vocab_size, characters, oracle.rnnt_vocabulary)
    tokenizer.save(oracle.tokenizer, oracle.settings.tokenizer["n_special"], folder)
    checkpoint.save(folder, config, oracle.weights())


def run_stages(oracle: Oracle) -> dict[str, Tensors]:
    """Every stage by name. Each draws its inputs from a stream of its own."""
    return {
        "perception_exact": perception.record(oracle, "exact"),
        "perception_odd": perception.record(oracle, "odd"),
        "rnnt": rnnt.record(oracle),
        "llm": llm.record(oracle),
        "codec": codec.record(oracle),
        "tts": ear_tts.record(oracle),
        "tts_q8": ear_tts.record_few_quantizers(oracle),
        "e2e_plain": end_to_end.record(oracle, prompted=False),
        "e2e_prompt": end_to_end.record(oracle, prompted=True),
    }
