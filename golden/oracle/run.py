"""One folder, from settings to manifest."""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from . import checkpoint, inputs, manifest, model, tokenizer
from .model import Oracle
from .recording import Tensors
from .settings import Settings
from .stages import codec, ear_tts, end_to_end, llm, perception, rnnt


def make_folder(settings: Settings, folder: Path) -> None:
    """Write ``goldens/``, ``manifest.json`` and, of drawn weights, ``checkpoint/`` into the new ``folder``."""
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        oracle = model.build(settings, Path(scratch))
        if settings.checkpoint:
            oracle.settings = settings = far_from_ties(oracle)
            stages = recorded_stages(oracle)
        else:
            save_checkpoint(oracle, folder / "checkpoint")
            stages = drawn_stages(oracle)
    manifest.write_stages(folder / "goldens", stages, settings.omit)
    manifest.write(folder, settings, stages)


def save_checkpoint(oracle: Oracle, folder: Path) -> None:
    """The weights as they are now, with their configuration and tokenizer."""
    folder.mkdir(parents=True)
    characters = len(oracle.tts.tts_model.embed_subword.char_vocab)
    config = checkpoint.runtime_config(oracle.settings, oracle.vocab_size, characters, oracle.rnnt_vocabulary)
    tokenizer.save(oracle.tokenizer, folder)
    checkpoint.save(folder, config, oracle.weights())


def drawn_stages(oracle: Oracle) -> dict[str, Tensors]:
    """Every stage by name. Each draws its inputs from a stream of its own."""
    settings = oracle.settings
    exact, odd, clip = (inputs.drawn_sound(settings, name) for name in ("exact", "odd", "clip"))
    text = inputs.drawn_text(settings, oracle.vocab_size)
    return {
        "perception_exact": perception.record(oracle, exact),
        "perception_odd": perception.record(oracle, odd),
        "rnnt": rnnt.record(oracle, exact),
        "llm": llm.record(oracle),
        "codec": codec.record(oracle, *inputs.drawn_for_codec(settings)),
        "tts": ear_tts.record(oracle, text),
        "tts_q8": ear_tts.record_few_quantizers(oracle, text),
        "e2e_plain": end_to_end.record(oracle, clip, prompted=False),
        "e2e_prompt": end_to_end.record(oracle, clip, prompted=True),
    }


def far_from_ties(oracle: Oracle) -> Settings:
    """The settings with that noise, of ``noise_tries`` seeds, whose nearest choice of a code is farthest from a tie.

    Trained codebooks grow fine: of 4,000 choices some lie within 1e-6 of another, where the last bit of a sum could
    decide, and all that follows would differ.
    """
    settings = oracle.settings
    assert settings.noise_seed is not None
    seeds = range(settings.noise_seed, settings.noise_seed + settings.inputs["noise_tries"])
    tries = [replace(settings, noise_seed=seed) for seed in seeds]
    if len(tries) == 1:
        return settings
    return max(tries, key=lambda chosen: least_margin(replace(oracle, settings=chosen)))


def least_margin(oracle: Oracle) -> float:
    """Of the codes in both conversations."""
    return min(float(said["code_margin_from_t1"].min()) for said in conversations(oracle).values())


def conversations(oracle: Oracle) -> dict[str, Tensors]:
    """Questions and their answers, by stage."""
    kinds = {"e2e_plain": False, "e2e_prompt": True}
    return {
        name: end_to_end.record(oracle, inputs.conversation(oracle.settings, name), prompted)
        for name, prompted in kinds.items()
    }


def recorded_stages(oracle: Oracle) -> dict[str, Tensors]:
    """Conversations; the speech decoder on an answer's text; the codec on a question's sound and an answer's codes."""
    settings, said = oracle.settings, conversations(oracle)
    asked, frames = inputs.question(settings, "e2e_plain"), settings.inputs["codec_frames"]
    text, codes = (said["e2e_plain"][key] for key in ("gen_text_timeline", "codes"))
    answer = inputs.answer(text[0], settings.inputs["tts_steps"])
    return {
        "perception_question": perception.record(oracle, asked),
        "codec": codec.record(oracle, inputs.loudest(asked, frames), codes[:, answer][:, :frames]),
        "tts": ear_tts.record(oracle, text[0, answer]),
        **said,
    }
