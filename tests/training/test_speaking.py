"""The speech decoder's training: rows as served, the loss against numpy, the batched sampler, a run that goes on."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from training.loop import Budget
from training.speaking import train
from training.speaking.balance import FIXED_SHARE, presented, shares_of
from training.speaking.evaluate import Case, Generated, cases, forced, run_cases
from training.speaking.forward import Constants, heard_sums, hidden_states, prompt_latents, subword_table
from training.speaking.generate import generate, start, step
from training.speaking.judge import judge, recordings
from training.speaking.losses import given_levels, likelihoods, mixture_loss, random_given, row_terms
from training.speaking.pacing import DENSE, STAGES, VARIANTS, Variant, Words, positions, stage_of
from training.speaking.rows import SILENCE, Chances, Damage, Layout, Rows, _as_served, _shifted, draw, planned
from training.speaking.setting import Setting, is_frozen, is_half
from training.speaking.tables import (
    DELAY,
    SLOTS,
    Sentences,
    Tables,
    cumulative,
    nearest,
    prompt_frames,
    random_sentences,
    slots,
)
from training.speaking.train import SMOKE, Shapes, Way, make_trainer
from voicechat_core import duplex
from voicechat_core.config import VoiceChatConfig
from voicechat_core.model import Networks, VoiceChatModel, char_table
from voicechat_core.nn.ear_tts import EarTTS
from voicechat_core.noise import KeyedNoise
from voicechat_core.synthetic import preset_config
from voicechat_core.synthetic_text import RNNT_PIECES, write_tokenizer
from voicechat_core.synthetic_weights import random_networks
from voicechat_core.tokenizer import RnntVocabulary, Tokenizer

TEXTS = {"Hello.": "greet", "what is the time": "time", "thanks": "bye", "good answer please": "plus", "you": "repeat"}
PAD, BOS, EOS = 12, 1, 2
IDS = (PAD, BOS, EOS)
UNDAMAGED = Damage(0, 0, 0, 0)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """The tiny preset with busy weights and noise for sentences."""
    config, folder = preset_config("tiny"), tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_directory(folder)
    chars = char_table(config, tokenizer)
    networks = random_networks(config, chars, 0)
    return _setting(config, networks, tokenizer)


def _setting(config: VoiceChatConfig, networks: Networks, tokenizer: Tokenizer) -> Setting:
    tts, chars = networks.tts_model.tts_model, char_table(config, tokenizer)
    sentences = random_sentences(TEXTS, tuple(tts.rvq_embs.shape), held=1)
    sentences = dataclasses.replace(
        sentences, mus=np.array(tts.rvq_embs), silence=np.array(networks.tts_model.codec_silence_tokens)
    )
    tables = Tables.build(sentences, tokenizer.encode, np.ones(len(TEXTS)) / len(TEXTS), 20)
    prompt = prompt_frames(sentences, config.prompt_frames)
    used = set(np.array(tables.tokens).tolist())
    constants = Constants.build(config, chars, used, prompt, tables.sums[0, -1])
    networks.tts_model.audio_prompt_latents = {config.speaker: prompt_latents(tts, constants)}
    return Setting(config, networks, tokenizer, chars, sentences, tables, constants)


def _drawn(setting: Setting, seed: int, shape: tuple[int, int], **options: object) -> Rows:
    mx.random.seed(seed)
    return draw(setting.tables, shape, IDS, **options)  # type: ignore[arg-type]


# ---- tables and shares


def test_tables_hold_partial_sums_after_silence(setting: Setting) -> None:
    sentences, sums = setting.sentences, np.array(setting.tables.sums)
    codes = np.concatenate([sentences.silence[None], sentences.codes])
    assert sums.shape == (len(codes), 32, setting.config.tts_config.latent_size)
    for frame, count in ((0, 31), (1, 0), (3, 1), (len(codes) - 1, 17)):
        expected = sum(sentences.mus[q][codes[frame, q]] for q in range(count))
        np.testing.assert_allclose(sums[frame, count], expected if count else 0, atol=1e-6)


def test_noise_is_coded_by_its_own_codebooks() -> None:
    noise = random_sentences(TEXTS, (31, 64, 8), longest=6)
    codes = np.concatenate([noise.silence[None], noise.codes])
    latents = cumulative(codes, noise.mus)[:, -1]
    np.testing.assert_allclose(latents[0], 0, atol=0.02)
    assert latents[1:].std() == pytest.approx(1, abs=0.15)
    np.testing.assert_array_equal(nearest(latents, noise.mus)[:, :8], codes[:, :8])


def test_sentences_come_back_from_the_codec_file(tmp_path: Path, setting: Setting) -> None:
    s = setting.sentences
    np.savez(
        tmp_path / "codes.npz", text=np.array(s.texts), kind=np.array(s.kinds), seed=np.zeros(len(s)), codes=s.codes,
        split=np.where(s.held, "held", "train"), lengths=s.lengths, mus=s.mus, silence=s.silence[None],
    )  # fmt: skip
    found = Sentences.from_file(tmp_path / "codes.npz")
    assert (found.texts, found.kinds) == (s.texts, s.kinds)
    for name in ("held", "codes", "lengths", "mus", "silence"):
        np.testing.assert_array_equal(getattr(found, name), getattr(s, name))
    np.testing.assert_array_equal(found.only([2, 1]).speech(1), s.speech(1))
    assert found.trained().tolist() == [1, 2, 3, 4]


def test_slots_follow_the_weights() -> None:
    shares = np.bincount(slots(np.array([0.0, 1, 3, 0, 4])), minlength=5) / SLOTS
    np.testing.assert_allclose(shares, [0, 1 / 8, 3 / 8, 0, 4 / 8], atol=2 / SLOTS)


def test_fixed_forms_have_their_share_and_rare_words_come_first() -> None:
    texts = [
        "One plus two is three.",
        "One plus one is two.",
        "Okay.",
        "Blue.",
        "Blue green.",
        "It is a dragon.",
        "Ben, tiny.",
    ]
    kinds = ["plus", "plus", "stop", "repeat", "repeat", "carrier", "list"]
    weights = presented(texts, kinds, shares_of(kinds, texts))
    assert weights.sum() == pytest.approx(1)
    assert weights[:3].sum() == pytest.approx(FIXED_SHARE)
    assert weights[0] == pytest.approx(2 * weights[1])  # "three" is in one sentence, "plus" in two
    assert weights[4] == pytest.approx(2 * weights[3])
    assert weights[:2].sum() / weights[2] == pytest.approx((2 * 4.0 / 0.5) ** 0.5)


def test_a_share_of_an_absent_kind_goes_to_the_others() -> None:
    assert presented(["Okay."], ["stop"], shares_of(["stop"], ["Okay."])).tolist() == [1.0]


# ---- rows


def test_a_planned_turn_is_as_the_timeline_says(setting: Setting) -> None:
    index, lead = 1, 3
    n, tokens = int(setting.sentences.lengths[index]), setting.tokenizer.encode(setting.sentences.texts[index])
    rows = planned(setting.tables, np.array([index]), lead, 40, IDS)
    ids, frames = np.array(rows.ids)[0].tolist(), np.array(rows.frames)[0]
    end = lead + DELAY + n + 1
    between = [PAD] * (end - lead - 1 - len(tokens))
    assert ids == [PAD] * lead + [BOS, *tokens, *between, EOS] + [PAD] * (39 - end)
    first = 1 + int(setting.sentences.starts()[index])
    expected = np.zeros(40, int)
    expected[lead + DELAY : lead + DELAY + n] = np.arange(first, first + n)
    np.testing.assert_array_equal(frames, expected)
    loud = np.flatnonzero(np.array(rows.weights)[0] == 1)
    assert (loud[0], loud[-1]) == (lead + DELAY - 1, lead + DELAY + n + 1)
    assert np.array(rows.weights)[0, 0] == np.float32(0.07)


def test_the_history_is_the_frame_before_but_nothing_first_and_silence_at_an_eos(setting: Setting) -> None:
    rows = _drawn(setting, 3, (8, 91), damage=UNDAMAGED)
    ids, frames, history, heard = (np.array(x) for x in (rows.ids, rows.frames, rows.history, rows.heard))
    assert (heard[:, 0] == 0).all()
    assert (heard[:, 1:] == 31).all()
    ended = ids == EOS
    assert ended.sum() > 8
    assert (history[ended] == SILENCE).all()
    later = ~ended[:, 1:]
    np.testing.assert_array_equal(history[:, 1:][later], frames[:, :-1][later])
    assert (frames[:, :-1][ended[:, 1:]] != SILENCE).any()  # an interruption: something was being said


def test_after_an_eos_nothing_is_said_until_the_next_bos(setting: Setting) -> None:
    rows = _drawn(setting, 4, (24, 128), layout=Layout(p_interrupted=0.5))
    ids, frames = np.array(rows.ids), np.array(rows.frames)
    for row, said in zip(ids, frames, strict=True):
        since = None
        for t, token in enumerate(row):
            since = {BOS: 0, EOS: None}.get(int(token), None if since is None else since + 1)
            assert said[t] == SILENCE or (since is not None and since >= DELAY)
        assert (row == BOS).sum() - (row == EOS).sum() in (0, 1)


def test_interrupted_turns_lose_their_tokens_and_speech_beyond_the_eos(setting: Setting) -> None:
    always = _drawn(setting, 5, (16, 91), layout=Layout(p_interrupted=1.0, p_long=0.0))
    never = _drawn(setting, 5, (16, 91), layout=Layout(p_interrupted=0.0, p_long=0.0))
    lengths = []
    for rows in (always, never):
        spans = []
        for row in np.array(rows.ids):
            ends = np.flatnonzero(row == EOS)
            spans += [int(b - a) for a, b in zip(np.flatnonzero(row == BOS), ends, strict=False)]
        lengths.append(spans)
    shortest = min(DELAY + int(n) for n in setting.sentences.lengths)
    assert min(lengths[1]) >= shortest
    assert min(lengths[0]) < shortest
    assert np.mean(lengths[0]) < np.mean(lengths[1]) - 3


def test_sentences_are_drawn_by_weight_and_stay_whole(setting: Setting) -> None:
    weights = np.array([0, 0, 1, 3, 0.0])
    tables = Tables.build(setting.sentences, setting.tokenizer.encode, weights, 100)
    mx.random.seed(0)
    frames = np.array(draw(tables, (64, 91), IDS, layout=Layout(p_interrupted=0)).frames)
    starts = 1 + setting.sentences.starts()
    counts = [int((frames == start).sum()) for start in starts]
    assert counts[0] == counts[1] == counts[4] == 0
    assert 2.2 < counts[3] / counts[2] < 4


def test_short_rows_leave_long_sentences_out(setting: Setting) -> None:
    longest = int(np.argmax(setting.sentences.lengths))
    limit = int(setting.sentences.lengths[longest]) - 1
    tables = Tables.build(setting.sentences, setting.tokenizer.encode, np.ones(5) / 5, limit)
    first = 1 + int(setting.sentences.starts()[longest])
    for short, is_there in ((True, False), (False, True)):
        mx.random.seed(1)
        assert (np.array(draw(tables, (64, 91), IDS, short=short).frames) == first).any() == is_there


def test_damage_is_as_often_as_it_says(setting: Setting) -> None:
    clean = _drawn(setting, 6, (400, 91), damage=UNDAMAGED)
    only = {
        "partial": _drawn(setting, 6, (400, 91), damage=Damage(0.4, 0, 0, 0)),
        "wrong": _drawn(setting, 6, (400, 91), damage=Damage(0, 0.1, 0, 0)),
        "dropped": _drawn(setting, 6, (400, 91), damage=Damage(0, 0, 0.3, 0)),
        "hidden": _drawn(setting, 6, (400, 91), damage=Damage(0, 0, 0, 0.1)),
    }
    np.testing.assert_array_equal(np.array(clean.ids), np.array(only["wrong"].ids))
    heard = {name: np.array(rows.heard)[:, 1:] for name, rows in only.items()}
    assert (heard["partial"] < 31).mean() == pytest.approx(0.4 * 31 / 32, abs=0.02)
    assert heard["partial"][heard["partial"] < 31].mean() == pytest.approx(15, abs=0.5)
    assert (heard["dropped"] == 0).mean() == pytest.approx(0.15, abs=0.03)
    assert set(np.unique(heard["dropped"])) == {0, 31}
    changed = np.array(only["wrong"].history) != np.array(clean.history)
    assert changed.mean() == pytest.approx(0.05, abs=0.012)
    assert np.array(only["hidden"].unconditional).mean() == pytest.approx(0.1, abs=0.05)
    assert not np.array(clean.unconditional).any()


def test_integers_are_drawn_evenly_and_within_their_bounds() -> None:
    mx.random.seed(0)
    counts = np.bincount(np.array(Chances(30000).integers((2, 4), 30000)), minlength=6)
    assert counts[[0, 1, 5]].sum() == 0
    np.testing.assert_allclose(counts[2:5] / 30000, 1 / 3, atol=0.01)
    with pytest.raises(ValueError, match="5 random numbers are asked for; there are 4"):
        Chances(4).take(5)


# ---- teacher-forced hidden states equal the served ones


def test_the_table_is_the_served_one(setting: Setting) -> None:
    table, _ = subword_table(setting.tts, setting.constants)
    served = setting.tts.subword_table(setting.chars)[setting.constants.used]
    np.testing.assert_allclose(np.array(table), np.array(served), atol=3e-6)
    assert {*IDS} < set(np.array(setting.constants.used).tolist())


def _stepped(setting: Setting, ids: NDArray[np.int64], codes: NDArray[np.int32]) -> NDArray[np.float32]:
    """Hidden states ``[rows, T, H]`` of the project's own step by step run that is fed ``codes`` ``[T, Q]``."""
    tts, table = setting.tts, setting.tts.subword_table(setting.chars)
    latents = setting.networks.tts_model.audio_prompt_latents[setting.config.speaker]
    state, result = tts.warm_up(latents, setting.silence, PAD, EOS, setting.chars), []
    for token, code in zip(ids, codes, strict=True):
        audio = tts.embed_codes(mx.array(code)[None, None])
        hidden, state = tts.advance(audio, table[mx.array([[int(token)]])], state)
        result.append(np.array(hidden))
    return np.concatenate(result, axis=1)


def _fed(setting: Setting, rows: Rows, row: int) -> NDArray[np.int32]:
    """The codes that a row's history stands for; K where a level is not heard."""
    sentences, size = setting.sentences, setting.config.tts_config.codebook_size
    every = np.concatenate([sentences.silence[None], sentences.codes.astype(np.int32)])
    codes = every[np.array(rows.history)[row]]
    return np.where(np.arange(31) < np.array(rows.heard)[row][:, None], codes, size).astype(np.int32)


@pytest.mark.parametrize("fused", [False, True])
def test_rows_at_once_give_what_stepping_gives(setting: Setting, fused: bool) -> None:
    rows = dataclasses.replace(_drawn(setting, 8, (3, 50)), unconditional=mx.array([False, True, False]))
    heard = heard_sums(setting.tables, rows)
    at_once = np.array(hidden_states(setting.tts, rows, heard, setting.constants, fused=fused))
    for row, hidden in enumerate(np.array(rows.unconditional)):
        stepped = _stepped(setting, np.array(rows.ids)[row], _fed(setting, rows, row))
        np.testing.assert_allclose(at_once[row], stepped[int(hidden)], atol=2e-4)
    assert np.abs(at_once).mean() > 0.3


def test_a_window_hides_what_stepping_does_not_see(setting: Setting) -> None:
    layers = setting.tts.backbone.layers
    before = [layer.self_attn.window for layer in layers]
    try:
        for layer in layers:
            layer.self_attn.window = 16
        test_rows_at_once_give_what_stepping_gives(setting, True)
    finally:
        for layer, window in zip(layers, before, strict=True):
            layer.self_attn.window = window


def test_a_row_sees_what_duplex_feeds(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt by ``duplex.start`` and a turn after it: the codes drawn there, as a row, give the states met there."""
    model = VoiceChatModel.from_networks(
        setting.config, setting.networks, setting.tokenizer, RnntVocabulary(RNNT_PIECES)
    )
    met: list[NDArray[np.float32]] = []
    own = EarTTS.decode

    def recorded(self: EarTTS, *arguments: Any) -> Any:
        result = own(self, *arguments)
        met.append(np.array(result[1]))
        return result

    monkeypatch.setattr(EarTTS, "decode", recorded)
    noise = KeyedNoise(5, setting.config.tts_config)
    prompt, state = duplex.start(model, model.warm_up(), [BOS, 30, 31, EOS], noise)
    assert prompt is not None
    codes, speech = [np.array(prompt.codes)[0, 1:]], state.speech
    said = [PAD, PAD, BOS, *setting.tokenizer.encode("what is the time"), PAD, EOS, PAD, PAD]
    for index, token in enumerate(said):
        text = mx.array([[token]], dtype=mx.int32)
        speech, _ = duplex._speak(model, text, speech, noise.frame(index, speech.steps))
        codes.append(np.array(speech.codes)[0])
    drawn = np.concatenate(codes)
    sentences = dataclasses.replace(
        setting.sentences.only([1]), codes=drawn.astype(np.uint8), lengths=np.array([len(drawn)], np.int32)
    )
    tables = Tables.build(sentences, setting.tokenizer.encode, np.ones(1), 100)
    ids, frames = mx.array([[PAD] * 3 + said], dtype=mx.int32), mx.arange(1, 1 + len(drawn))[None]
    history, heard = _as_served(ids, _shifted(frames), mx.full(ids.shape, 31), 31, EOS)
    rows = Rows(ids, frames, history, heard, mx.ones(ids.shape), mx.array([False]))
    for row, hidden in enumerate((rows, dataclasses.replace(rows, unconditional=mx.array([True])))):
        found = hidden_states(setting.tts, hidden, heard_sums(tables, hidden), setting.constants)
        np.testing.assert_allclose(np.array(found)[0], np.concatenate(met, axis=1)[row], atol=2e-4)


# ---- the loss


def _mixture_by_hand(setting: Setting, x: NDArray[np.float64], target: NDArray[np.float64]) -> tuple[float, ...]:
    """``-sum q lp`` and the divergence of one frame in float64, from the head's parameters after the stack."""
    head = setting.tts.mog_head
    weight = {name: np.array(getattr(head, name).weight, np.float64) for name in ("proj_mus", "proj_logs", "proj_else")}
    logits = np.array(head.proj_logits.weight, np.float64) @ x
    means = (weight["proj_mus"] @ x).reshape(head.components, head.rank)
    rho = max(float((weight["proj_logs"] @ x)[0]), head.min_log_std)
    rest, low = weight["proj_else"] @ x, np.array(head.low_mat, np.float64)
    lp = np.empty(head.components)
    for k in range(head.components):
        mean, std = low[k] @ means[k] * np.exp(rho) + rest, np.exp(rho)
        lp[k] = (-0.5 * ((target - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)).sum()
    q = np.exp(lp - lp.max()) / np.exp(lp - lp.max()).sum() * 0.99 + 0.01 / head.components
    log_choice = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    return -float((q * lp).sum()), float((q * (np.log(q) - log_choice)).sum())


def _head_case(setting: Setting, count: int = 5) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    rng, tts = np.random.default_rng(0), setting.config.tts_config
    x = mx.array(rng.standard_normal((count, tts.hidden_size), np.float32))
    target = mx.array(rng.standard_normal((count, tts.latent_size), np.float32))
    return x, target, mx.array([1.0, 0.07, 1.0, 0.0, 1.0]), mx.array([31, 30, 26, 22, 29])


def test_the_loss_is_the_mixtures_by_numpy(setting: Setting) -> None:
    x, target, weights, still_open = _head_case(setting)
    found = mixture_loss(*likelihoods(setting.tts.mog_head, x, target), weights, still_open)
    stacked = x
    for layer in setting.tts.mog_head.mlp_stack:
        stacked = layer(stacked)
    frames = [
        _mixture_by_hand(setting, a, b)
        for a, b in zip(np.array(stacked, np.float64), np.array(target, np.float64), strict=True)
    ]
    w, n = np.array(weights, np.float64), np.array(still_open)
    expected = (np.array(frames) * w[:, None]).sum(axis=0) / (w * n).sum()
    assert float(found["component"]) == pytest.approx(expected[0], rel=1e-5)
    assert float(found["choice"]) == pytest.approx(expected[1], rel=1e-3)


def test_the_gradient_is_the_losss_slope_where_q_is_held(setting: Setting) -> None:
    """Finite differences of the loss with the responsibilities of the middle point."""
    x, target, weights, still_open = _head_case(setting)
    head = setting.tts.mog_head
    held = [mx.array(v) for v in (head.proj_mus.weight, head.proj_else.weight, head.low_mat, head.proj_logs.weight)]
    lp0, _ = likelihoods(head, x, target)
    q = 0.99 * mx.softmax(lp0, axis=-1) + 0.01 / head.components

    def put(values: list[mx.array]) -> None:
        head.proj_mus.weight, head.proj_else.weight, head.low_mat, head.proj_logs.weight = values

    def loss(*values: mx.array) -> mx.array:
        put(list(values))
        found = mixture_loss(*likelihoods(head, x, target), weights, still_open)
        return found["component"] + found["choice"]

    def with_q(values: list[mx.array]) -> float:
        put(values)
        lp, logits = likelihoods(head, x, target)
        each = -(q * lp).sum(axis=-1) - (q * (logits - mx.logsumexp(logits, axis=-1, keepdims=True))).sum(axis=-1)
        return float((each * weights).sum()) / float((weights * still_open).sum())

    try:
        gradients = mx.grad(loss, argnums=list(range(len(held))))(*held)
        mx.eval(gradients)
        rng = np.random.default_rng(2)
        for i, (value, gradient) in enumerate(zip(held, gradients, strict=True)):
            direction = mx.array(rng.standard_normal(value.shape, np.float32))
            size = 2e-3 / float(mx.sqrt(mx.square(direction).mean()))
            sides = [with_q([v + s * size * direction if j == i else v for j, v in enumerate(held)]) for s in (1, -1)]
            slope, expected = (sides[0] - sides[1]) / (2 * size), float((gradient * direction).sum())
            assert slope == pytest.approx(expected, rel=0.03, abs=0.02 * float(mx.sqrt(mx.square(gradient).sum())))
    finally:
        put(held)


def test_given_levels_cover_the_samplers_passes(setting: Setting) -> None:
    for i, (start_level, _) in enumerate(setting.tts.passes):
        rate = [2, 3, 4, 5, 7][i] / 8 if i else 0
        assert start_level in (0, 1, 2, 5, 9)
        assert given_levels(mx.array([rate]), 31).tolist()[0] <= start_level
    assert given_levels(mx.array([0.0, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8]), 31).tolist() == [0, 0, 1, 2, 5, 9]
    mx.random.seed(0)
    given = np.array(random_given(2, (50, 40), 31))
    assert (given[0] == 0).all()  # the first draw's rates are below .45: nothing is given
    assert given[1].max() >= 9
    assert {1, 2, 3, 4, 5, 6, 7, 8, 9} <= set(given.ravel().tolist())


def test_row_terms_ask_for_what_is_left_after_what_is_given(setting: Setting) -> None:
    rows = planned(setting.tables, np.array([1, 2]), 2, 16, IDS)
    given = mx.broadcast_to(mx.array([0, 5])[:, None, None], (2, 2, 16))
    found = row_terms(setting.tts, rows, given, setting.tables, setting.constants)
    hidden = np.array(hidden_states(setting.tts, rows, heard_sums(setting.tables, rows), setting.constants))
    sums, mus = np.array(setting.tables.sums), setting.sentences.mus
    codes = np.concatenate([setting.sentences.silence[None], setting.sentences.codes])[np.array(rows.frames)]
    total, count = np.zeros(2), 0.0
    for level in (0, 5):
        for row in range(2):
            for t in range(16):
                weight = float(rows.weights[row, t])
                known = sum((mus[q][codes[row, t, q]] for q in range(level)), np.zeros(sums.shape[-1]))
                rest = sum(mus[q][codes[row, t, q]] for q in range(level, 31))
                x = mx.array(hidden[row, t]) + setting.tts.embed_code(mx.array(known.astype(np.float32)))
                for layer in setting.tts.mog_head.mlp_stack:
                    x = layer(x)
                total += weight * np.array(_mixture_by_hand(setting, np.array(x, np.float64), rest))
                count += weight * (31 - level)
    assert float(found["component"]) == pytest.approx(total[0] / count, rel=1e-4)
    assert float(found["choice"]) == pytest.approx(total[1] / count, rel=1e-3)


# ---- generation


def test_one_row_is_the_projects_own_step(setting: Setting) -> None:
    tts, table = setting.tts, setting.tts.subword_table(setting.chars)
    latents = setting.networks.tts_model.audio_prompt_latents[setting.config.speaker]
    served = tts.warm_up(latents, setting.silence, PAD, EOS, setting.chars)
    batched = start(tts, latents, setting.silence, setting.constants, setting.chars, 1)
    codes = mx.full((1, 1, 31), 64, dtype=mx.int32)
    for position in range(6):
        key = mx.random.key(position)
        u = mx.random.uniform(shape=(len(tts.passes), 32), key=key)
        normals = mx.random.normal(shape=(len(tts.passes), 32), key=key)
        condition = table[mx.array([[BOS if position == 1 else PAD]])]
        expected, _, served = tts.step(condition, codes, (u, normals), served)
        found, batched = step(tts, condition, codes, (u[:, None, None], normals[:, None, None]), batched)
        np.testing.assert_array_equal(np.array(found), np.array(expected))
        codes = expected


def test_rows_do_not_know_each_other(setting: Setting) -> None:
    tts, table = setting.tts, setting.tts.subword_table(setting.chars)
    latents = setting.networks.tts_model.audio_prompt_latents[setting.config.speaker]
    ids = [[BOS, 30, PAD], [PAD, BOS, 40]]
    draws = [
        (mx.random.uniform(shape=(len(tts.passes), 2, 1, 32), key=mx.random.key(t)),
         mx.random.normal(shape=(len(tts.passes), 2, 1, 32), key=mx.random.key(100 + t)))
        for t in range(3)
    ]  # fmt: skip

    def run(members: list[int]) -> NDArray[np.int32]:
        state, result = start(tts, latents, setting.silence, setting.constants, setting.chars, len(members)), []
        codes = mx.full((len(members), 1, 31), 64, dtype=mx.int32)
        for t in range(3):
            condition = table[mx.array([[ids[m][t]] for m in members])]
            u, normals = (x[:, mx.array(members)] for x in draws[t])
            codes, state = step(tts, condition, codes, (u, normals), state)
            result.append(np.array(codes)[:, 0])
        return np.stack(result, axis=1)

    together = run([0, 1])
    np.testing.assert_array_equal(together, np.concatenate([run([0]), run([1])]))
    assert (together[0] != together[1]).any()


def test_generation_hears_silence_at_an_eos(setting: Setting) -> None:
    """With an EOS that sounds like any other token only the history can differ."""
    latents = setting.networks.tts_model.audio_prompt_latents[setting.config.speaker]
    ids = np.array([[PAD, BOS, 30, EOS, PAD]], np.int32)
    heard: list[NDArray[np.int32]] = []
    original = setting.tts.embed_codes
    spy: Callable[[mx.array], mx.array] = lambda codes: (heard.append(np.array(codes)), original(codes))[1]  # noqa: E731
    object.__setattr__(setting.tts, "embed_codes", spy)
    try:
        codes = generate(setting.tts, ids, latents, setting.silence, setting.constants, setting.chars)
    finally:
        object.__delattr__(setting.tts, "embed_codes")
    steps = [x[0, 0] for x in heard if x.shape == (1, 1, 31) and x.ndim == 3][-5:]
    assert (steps[0] == 64).all()
    np.testing.assert_array_equal(steps[3], np.array(setting.silence))
    for t in (1, 2, 4):
        np.testing.assert_array_equal(steps[t], codes[0, t - 1])


def test_cases_say_where_the_words_are(setting: Setting) -> None:
    found = cases(setting, held=1, trained=2, others=1, late=1, silence=9)
    assert [case.kind for case in found] == ["held", "trained", "trained", "late", "second", "interrupted", "silence"]
    for case in found[:-1]:
        assert case.ids[case.start] == BOS
        assert case.ids[case.stop - 1] == EOS
        assert (case.ids[: case.start] == BOS).sum() == (case.kind == "second")
    assert (found[-1].ids == PAD).all()
    interrupted, whole = found[5], found[0]
    assert interrupted.stop - interrupted.start < whole.stop - whole.start


def test_generated_cases_keep_their_order_and_lengths(setting: Setting, tmp_path: Path) -> None:
    wanted = cases(setting, held=1, trained=2, others=1, silence=5)
    latents = setting.networks.tts_model.audio_prompt_latents[setting.config.speaker]
    made = run_cases(setting, wanted, latents)
    assert [len(c) for c in made.codes] == [len(case.ids) for case in wanted]
    made.save(tmp_path / "generated.npz")
    with np.load(tmp_path / "generated.npz") as file:
        assert file["texts"].tolist() == [case.text for case in wanted]
        assert file["codes"].shape == (sum(len(case.ids) for case in wanted), 31)
        assert file["lengths"].tolist() == [len(case.ids) for case in wanted]
    read = Generated.read(tmp_path / "generated.npz")
    assert [(c.kind, c.text, c.start, c.stop) for c in read.cases] == [
        (c.kind, c.text, c.start, c.stop) for c in wanted
    ]
    for a, b in zip(read.codes, made.codes, strict=True):
        np.testing.assert_array_equal(a, b)


# ---- judging


class FakeCodec:
    """Decodes a frame to a constant that its first code says, in thousandths."""

    def decode(self, codes: mx.array) -> mx.array:
        return mx.repeat(codes[..., 0].astype(mx.float32) / 1000, 10, axis=1)


def test_words_silence_and_interruptions_are_judged() -> None:
    def frames(*levels: int) -> NDArray[np.uint8]:
        return np.repeat(np.array(levels, np.uint8)[:, None], 2, axis=1)

    none = np.zeros(0, np.int32)
    made = Generated(
        [
            Case("held", "one two", none, 3, 5),
            Case("interrupted", "", none, 1, 4),
            Case("interrupted", "", none, 1, 3),
            Case("silence", "", none, 0, 4),
        ],
        [frames(0, 7, 7, 50, 60, 9, 9, 0), frames(0, 50, 50, 50, 50, 2, 0), frames(0, 50, 0, 0), frames(0, 2, 9, 0)],
    )
    clips: list[NDArray[np.float32]] = []

    def hears(samples: NDArray[np.float32], rate: int) -> str:
        assert rate == 22050
        clips.append(samples)
        return "one three"

    found = judge(made, FakeCodec(), hears, 22050, 10)  # type: ignore[arg-type]
    assert found["held"]["word_error"] == 0.5
    assert found["frames_after_interruption"] == [2, 0]
    assert found["silence"] == {"audible_frames": 1, "loudest": pytest.approx(0.009)}
    np.testing.assert_allclose(clips[0], np.repeat(np.array([7, 7, 50, 60, 9, 9]) / 1000, 10), rtol=1e-6)


def test_the_recordings_own_codes_are_the_ceiling(setting: Setting) -> None:
    own = recordings(setting.sentences, 10)
    assert [case.text for case in own.cases] == [setting.sentences.texts[0]]
    np.testing.assert_array_equal(own.codes[0][own.cases[0].start : own.cases[0].stop], setting.sentences.speech(0))
    np.testing.assert_array_equal(own.codes[0][0], setting.sentences.silence)


# ---- training


def test_what_is_rounded_is_what_a_bfloat16_session_rounds() -> None:
    wide, vector = mx.zeros((4, 4)), mx.zeros((4,))
    rounded = (
        "backbone.layers.0.self_attn.q_proj.weight",
        "embed_code.weight",
        "gated_fusion_audio_text.text_proj.weight",
    )
    assert all(is_half(name, wide) for name in rounded)
    assert is_half("gated_fusion_audio_text.audio_proj.bias", vector)
    assert is_half("mog_head.mlp_stack.0.mlp.up_proj.weight", wide)
    for name in ("rvq_embs", "mog_head.proj_mus.weight", "mog_head.proj_logits.weight", "mog_head.low_mat"):
        assert not is_half(name, wide)
    assert not is_half("backbone.norm.weight", vector)
    assert is_frozen("rvq_embs", wide)
    assert is_frozen("audio_prompt_projection_W", wide)
    assert not is_frozen("embed_code.weight", wide)


def test_training_lowers_the_loss_and_leaves_what_is_frozen(setting: Setting) -> None:
    tts = setting.tts
    before = {name: np.array(getattr(tts, name)) for name in ("rvq_embs", "audio_prompt_projection_W", "bos_emb")}
    trainer = make_trainer(setting, Shapes((2, 24), (1, 30)), Way(half=False), peak=3e-3)
    trainer._warmup = 5
    try:
        terms = [trainer.step(0.0, 2, 24) for _ in range(25)]
        totals = [float(t["component"] + t["choice"]) for t in terms]
        assert np.mean(totals[-5:]) < np.mean(totals[:5]) - 0.5
        for name in ("rvq_embs", "audio_prompt_projection_W"):
            np.testing.assert_array_equal(np.array(getattr(tts, name)), before[name])
        assert (np.array(tts.bos_emb) != before["bos_emb"]).all()
    finally:
        setting.networks.update(random_networks(setting.config, setting.chars, 0).parameters())


def test_a_call_ends_at_its_moment_and_the_training_with_its_budget() -> None:
    assert len(list(train._until(Budget(steps=5), time.monotonic() - 1))) == 1
    assert len(list(train._until(Budget(steps=5), time.monotonic() + 60))) == 5


def test_forced_figures_tell_right_from_wrong(setting: Setting) -> None:
    found = forced(setting, np.array([1, 3]), steps=20)
    assert set(found) == {"component", "choice", "wrong", "first", "second", "eighth"}
    assert found["wrong"] != found["component"]
    assert 0 <= found["first"] <= 1
    assert all(np.isfinite(list(found.values())))


@pytest.mark.slow
def test_the_smoke_run_goes_on_and_exports(tmp_path: Path) -> None:
    train.main(["--smoke", "--steps", "2", "--out", str(tmp_path)])
    train.main(["--smoke", "--steps", "3", "--out", str(tmp_path), "--resume"])
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [line for line in lines if '"held_fixed_first"' in line and '"step": 3' in line]
    config = train.small_config()
    setting = Setting.build(config, train._few(train.smoke_sentences(config)), seed=9)
    different = np.array(setting.tts.embed_code.weight)
    setting.load(tmp_path / "speaking.safetensors")
    tts = setting.networks.tts_model
    assert (np.array(tts.tts_model.embed_code.weight) != different).any()
    np.testing.assert_array_equal(np.array(tts.tts_model.rvq_embs), setting.sentences.mus)
    np.testing.assert_array_equal(np.array(tts.codec_silence_tokens), setting.sentences.silence)
    latents = np.array(tts.audio_prompt_latents["Aria"])
    assert latents.shape == (1, 37, 160)
    np.testing.assert_allclose(latents, np.array(prompt_latents(setting.tts, setting.constants)), atol=1e-5)
    with np.load(tmp_path / "generated.npz") as file:
        assert file["codes"].max() < 128
    assert SMOKE.at(3) == SMOKE.long


def test_paced_text_stands_before_its_speech_and_dense_text_does_not_wait() -> None:
    texts = ["Table green.", "Green table.", "Table table."]
    fit = Words.fit(texts, np.array([11, 11, 14], np.int32))
    times = fit.times("Table green.", ["T", "able", " green", "."], 11)
    assert times[0] == 0
    assert 0 < times[1] < times[2] < times[3] < 11
    rng = np.random.Generator(np.random.PCG64(0))
    assert positions(times, DENSE, rng).tolist() == [1, 2, 3, 4]
    paced = positions(np.array([0.0, 1.0, 7.0, 9.0]), Variant(1.0, 2.0), rng)
    assert paced.tolist() == [1, 2, 6, 8]


@pytest.mark.slow
def test_a_training_goes_on_from_exported_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing left to train, what it began with is what it exports."""
    monkeypatch.setattr(train, "speak", lambda *told: None)  # what it sounds like is not asked, and takes long
    first, second = tmp_path / "first", tmp_path / "second"
    train.main(["--smoke", "--steps", "1", "--out", str(first)])
    begun = first / "speaking.safetensors"
    words = ["--weights", str(begun), "--seconds", "60", "--used", "30"]
    train.main(["--smoke", *words, "--seed", "1", "--out", str(second)])
    before, after = (mx.load(str(file)) for file in (begun, second / "speaking.safetensors"))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]).item() for name in before)
    log = (second / "log.jsonl").read_text()
    assert '"used": {"seconds": 30.0, "steps": 0}' in log
    assert '"progress"' not in log


def test_stages_begin_paced_and_end_dense() -> None:
    assert [stage_of(x) for x in (0.0, 0.24, 0.25, 0.6, 1.0)] == [0, 0, 1, 2, 3]
    assert all(len(shares) == len(VARIANTS) and sum(shares) == pytest.approx(1) for _, shares in STAGES)
    dense = [shares[0] for _, shares in STAGES]
    assert dense == sorted(dense)
    assert dense[-1] > 0.8


def test_a_row_of_paced_text_has_the_same_tokens_with_pads_between(setting: Setting) -> None:
    paced = (DENSE, Variant(1.0, 2.0))
    encode, decode, weights = setting.tokenizer.encode, setting.tokenizer.decode, np.ones(len(setting.sentences))
    tables = Tables.build(setting.sentences, encode, weights, 100, decode, IDS[0], paced)
    mx.random.seed(3)
    rows = draw(tables, (8, 91), IDS, layout=Layout(p_interrupted=0, variants=(0.0, 1.0)))
    facts, tokens = np.array(tables.facts), np.array(tables.tokens)
    spelt = [tokens[a : a + n] for a, n in facts[1, :, 2:]]
    assert [s[s != IDS[0]].tolist() for s in spelt] == [encode(text) for text in setting.sentences.texts]
    assert any((s == IDS[0]).any() for s in spelt)
    row = np.array(rows.ids)[0]
    start = int(np.flatnonzero(row == IDS[1])[0])
    assert any(row[start + 1 : start + 1 + len(s)].tolist() == s.tolist() for s in spelt)
    with pytest.raises(ValueError, match="layouts of text"):
        draw(tables, (8, 91), IDS, layout=Layout(variants=(0.5, 0.2, 0.3)))
