"""Training the codec: its passes against the served codec, quantizer and losses against NumPy, and whole small runs."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from training.codec import audio, discriminators, encode, losses, train
from training.codec.discriminators import Judges, judge_terms, made_terms
from training.codec.finish import PREFIX, finished, load, measure, save
from training.codec.framing import depthwise, frames, overlap_add
from training.codec.losses import log_mel_distance, means, reconstruction, spectrum
from training.codec.network import NO_LIMIT, CodecNetwork
from training.codec.quantizer import Quantizer
from training.codec.rehearsal import agree, on_cpu
from training.codec.steps import JUDGED, PLAIN, QUANTIZED, Coding, Sizes, draw, starting_codec
from training.loop import Budget, Log
from training.small import small_config
from voicechat_core.config import CodecConfig
from voicechat_core.nn.codec import Codec
from voicechat_core.nn.stft import overlap_add as served_overlap_add

TINY = CodecConfig(base_channels=4, blocks_per_stage=1, latent_dim=6, num_quantizers=4, codebook_size=8)
FRAME, RATE = TINY.frame_samples, TINY.sample_rate
SIZES = Sizes(2, 4, (1, 4), first=50)


@pytest.fixture(autouse=True)
def _no_compiling() -> Iterator[None]:
    """On a CPU every fused kernel would be built by a C++ compiler; ``test_loop`` compiles."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> mx.array:
    return mx.array(scale * np.random.default_rng(seed).standard_normal(shape), mx.float32)


def busy_codec(seed: int = 0) -> Codec:
    """Starting weights, louder at the end so that the clamp has work, with codebooks."""
    codec = starting_codec(TINY, seed)
    codec.decoder.layers[-1].weight = 60 * codec.decoder.layers[-1].weight
    codec.prvq.mus_list = list(normal(4, 8, 6, seed=seed, scale=0.1))
    return codec


def coding_of(codec: Codec) -> Coding:
    coding = Coding(TINY, codec)
    coding.quantizer.centres = mx.stack(codec.prvq.mus_list)
    return coding


# ---- framing


def assert_adjoint(ours, known, x: mx.array) -> None:
    """The same values, and the same gradient of a weighted sum."""
    y = known(x)
    weight = normal(*y.shape, seed=9)
    np.testing.assert_allclose(np.array(ours(x)), np.array(y), atol=1e-6)
    gradients = [mx.grad(lambda x, f=f: (f(x) * weight).sum())(x) for f in (ours, known)]
    np.testing.assert_allclose(np.array(gradients[0]), np.array(gradients[1]), atol=2e-6)


@pytest.mark.parametrize(("size", "hop"), [(16, 4), (8, 8), (12, 3)])
def test_frames_and_overlap_add(size: int, hop: int) -> None:
    def stacked(x: mx.array) -> mx.array:
        return mx.stack([x[:, i : i + size] for i in range(0, x.shape[1] - size + 1, hop)], axis=1)

    assert_adjoint(lambda x: frames(x, size, hop), stacked, normal(2, size + 5 * hop))
    assert_adjoint(lambda c: overlap_add(c, hop), lambda c: served_overlap_add(c, hop), normal(2, 5, size))


def test_depthwise_is_a_causal_convolution() -> None:
    x, weight = normal(2, 9, 3), normal(3, 7, 1, seed=1)

    def known(x: mx.array, weight: mx.array) -> mx.array:
        return mx.conv1d(mx.pad(x, [(0, 0), (6, 0), (0, 0)]), weight, groups=3)

    assert_adjoint(lambda x: depthwise(x, weight), lambda x: known(x, weight), x)
    assert_adjoint(lambda w: depthwise(x, w), lambda w: known(x, w), weight)


# ---- the network is the served codec


def test_passes_are_the_served_codecs() -> None:
    codec = busy_codec()
    network = CodecNetwork(codec, TINY)
    samples = normal(2, 5 * FRAME, scale=0.3)
    latents = network.encode(samples)
    np.testing.assert_allclose(np.array(latents), np.array(codec.encode(samples)), atol=1e-5)
    codes = codec.quantize(latents)
    served, ours = codec.decode(codes), network.decode(codec.dequantize(codes))
    np.testing.assert_allclose(np.array(ours), np.array(served), atol=1e-5)
    free = network.decode(codec.dequantize(codes), NO_LIMIT)
    assert np.abs(np.array(free - served)).max() > 0.05  # the clamp did something


def test_the_limit_stops_gradients_only_where_it_clamps() -> None:
    codec = busy_codec()
    network = CodecNetwork(codec, TINY)
    latents = normal(1, 2, 6)

    def size(latents: mx.array, limit: float) -> mx.array:
        return mx.square(network.decode(latents, limit)).sum()

    norms = [float(mx.square(mx.grad(size)(latents, limit)).sum().item()) for limit in (0.0, 1.0, NO_LIMIT)]
    assert norms[0] == 0
    assert 0 < norms[1] < norms[2]


# ---- quantizer


def test_search_is_the_served_search() -> None:
    codec = busy_codec()
    coding, latents = coding_of(codec), normal(3, 5, 6, scale=0.2)
    found = coding.quantizer.search(latents.reshape(-1, 6))
    assert mx.array_equal(found.codes.T.reshape(3, 5, 4), codec.quantize(latents))
    rest = latents.reshape(-1, 6) - codec.dequantize(codec.quantize(latents)).reshape(-1, 6)
    np.testing.assert_allclose(np.array(found.residuals[-1]), np.array(rest), atol=1e-6)
    assert mx.array_equal(found.residuals[0], latents.reshape(-1, 6))


def test_kept_levels_and_their_gradient() -> None:
    codec = busy_codec()
    quantizer, latents = coding_of(codec).quantizer, normal(2, 3, 6, scale=0.2)
    levels = mx.array([1, 3])
    codes = codec.quantize(latents)

    def kept(latents: mx.array) -> mx.array:
        return quantizer.kept(latents, quantizer.search(latents.reshape(-1, 6)), levels)

    known = [sum(codec.prvq.mus_list[q][codes[i, :, q]] for q in range(n)) for i, n in enumerate((1, 3))]
    np.testing.assert_allclose(np.array(kept(latents)), np.array(mx.stack(known)), atol=1e-6)
    weight = normal(2, 3, 6, seed=4)
    gradient = mx.grad(lambda x: (kept(x) * weight).sum())(latents)
    np.testing.assert_allclose(np.array(gradient), np.array(weight), atol=1e-6)


def test_commitment_against_numpy() -> None:
    codec = busy_codec()
    quantizer, latents = coding_of(codec).quantizer, normal(7, 6, scale=0.2)
    residuals = np.array(quantizer.search(latents).residuals)
    known = np.square(residuals[4]).mean() + 0.1 * np.square(residuals[[1, 2, 4]]).mean()

    def commitment(latents: mx.array) -> mx.array:
        return quantizer.commitment(latents, quantizer.search(latents))

    assert commitment(latents).item() == pytest.approx(known, rel=1e-5)
    gradient = 2 * residuals[4] / residuals[4].size + 0.2 * residuals[[1, 2, 4]].sum(0) / residuals[[1, 2, 4]].size
    np.testing.assert_allclose(np.array(mx.grad(commitment)(latents)), gradient, atol=1e-7)


def test_learning_is_a_moving_average() -> None:
    quantizer, latents = coding_of(busy_codec()).quantizer, normal(20, 6, scale=0.2)
    quantizer.counts, quantizer.sums = normal(4, 8, seed=2) ** 2, normal(4, 8, 6, seed=3)
    counts, sums, found = np.array(quantizer.counts), np.array(quantizer.sums), quantizer.search(latents)
    quantizer.learn(found)
    for q in range(4):
        for k in range(8):
            chose = np.array(found.codes[q]) == k
            counts[q, k] = 0.97 * counts[q, k] + 0.03 * chose.sum()
            sums[q, k] = 0.97 * sums[q, k] + 0.03 * np.array(found.residuals[q])[chose].sum(0)
    np.testing.assert_allclose(np.array(quantizer.counts), counts, atol=1e-6)
    np.testing.assert_allclose(np.array(quantizer.sums), sums, atol=1e-6)
    np.testing.assert_allclose(np.array(quantizer.centres), sums / np.maximum(counts, 1e-3)[..., None], rtol=1e-5)


def test_only_dead_entries_are_revived_and_where_data_is() -> None:
    quantizer = coding_of(busy_codec()).quantizer
    quantizer.counts = mx.where(mx.arange(8) % 2 == 0, mx.array(0.01), mx.array(3.0)) * mx.ones((4, 8))
    before, residuals = np.array(quantizer.centres), normal(5, 20, 6, seed=8)
    assert quantizer.used().item() == 0.5
    quantizer.revive(residuals)
    after = np.array(quantizer.centres)
    assert (after[:, 1::2] == before[:, 1::2]).all()
    for q in range(4):
        distances = np.abs(after[q, ::2, None] - np.array(residuals[q])).max(-1)
        assert (distances.min(1) == 0).all()
    assert quantizer.used().item() == 1
    assert np.array_equal(np.array(quantizer.sums)[:, ::2], after[:, ::2])


def test_k_means_finds_clusters_level_by_level() -> None:
    mx.random.seed(0)
    draws = np.random.default_rng(0)
    coarse, fine = 10 * draws.standard_normal((8, 6)), draws.standard_normal((8, 6))
    points = (
        coarse[draws.integers(0, 8, 4000)] + fine[draws.integers(0, 8, 4000)] + 0.01 * draws.standard_normal((4000, 6))
    )
    quantizer = Quantizer(2, 8, 6)
    quantizer.initialise(mx.array(points, mx.float32), 100)
    spreads = [float(mx.square(r).mean().item()) for r in quantizer.search(mx.array(points, mx.float32)).residuals]
    assert spreads[1] < 0.5 * spreads[0]
    assert spreads[2] < 0.7 * spreads[1]
    np.testing.assert_allclose(np.array(quantizer.counts).sum(1), 100, rtol=0.02)
    np.testing.assert_allclose(
        np.array(quantizer.sums), np.array(quantizer.centres * quantizer.counts[:, :, None]), rtol=1e-5
    )


# ---- losses


def test_spectrum_against_numpy() -> None:
    samples = normal(2, 1000)
    real, imaginary = spectrum(samples, 64, 16)
    padded = np.pad(np.array(samples, np.float64), [(0, 0), (32, 32)])
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(64) / 64)
    assert real.shape == (2, 1 + 1000 // 16, 33)
    for t in (0, 7, 62):
        known = np.fft.rfft(padded[:, t * 16 : t * 16 + 64] * window)
        np.testing.assert_allclose(np.array(real[:, t]), known.real, atol=2e-5)
        np.testing.assert_allclose(np.array(imaginary[:, t]), known.imag, atol=2e-5)


def test_distances_of_a_gain() -> None:
    """Twice as loud is ln 2 away in every log-mel that is not at the floor."""
    noise = normal(1, 4 * FRAME, scale=0.1)
    assert log_mel_distance(2 * noise, noise, RATE) == pytest.approx(np.log(2), abs=1e-3)
    assert log_mel_distance(noise, noise, RATE) == 0
    assert reconstruction(noise, noise, RATE).item() == 0
    loss = reconstruction(2 * noise, noise, RATE).item()
    assert loss == pytest.approx(np.log(2) + 0.3, abs=0.06)  # a few bands are too narrow to have a bin
    assert loss < np.log(2) + 0.3


def test_silence_is_at_the_floor() -> None:
    quiet = normal(1, 2 * FRAME, scale=1e-6)
    assert reconstruction(quiet, mx.zeros_like(quiet), RATE).item() < 0.02


def test_reconstruction_gradient_by_differences() -> None:
    made = normal(1, 2 * FRAME, scale=0.1)
    wanted = 0.5 * made + normal(1, 2 * FRAME, seed=1, scale=1e-3)

    def loss(made: mx.array) -> mx.array:
        return reconstruction(made, wanted, RATE)

    gradient = mx.grad(loss)(made)
    slope = mx.sqrt(mx.square(gradient).sum()).item()
    way = gradient / slope
    measured = (loss(made + 5e-4 * way) - loss(made - 5e-4 * way)).item() / 1e-3
    assert slope == pytest.approx(measured, rel=0.02)
    assert mx.abs(mx.grad(lambda w: reconstruction(made, w, RATE))(wanted)).max().item() == 0


def test_means() -> None:
    values = [normal(3, 4), normal(2, seed=1)]
    np.testing.assert_allclose(np.array(means(values)), [np.array(v).mean() for v in values], rtol=1e-6)


# ---- judges


def test_judges_losses_from_their_scores() -> None:
    mx.random.seed(0)
    judges, real, made = Judges(4, 2), normal(2, 2 * FRAME, scale=0.1), normal(2, 2 * FRAME, seed=1, scale=0.1)
    for judge in judges.judges:
        judge.layers[-1].weight = 100 * judge.layers[-1].weight  # scores that differ
    on_real, on_made = judges(real), judges(made)
    assert [len(found) for _, found in on_real] == [5, 5, 5, 4, 4, 4, 4]
    assert on_real[0][0].shape == (2, 65, 14, 8)  # 513 bins halved three times, 1 + 3528 // 256 frames
    terms = {name: value.item() for name, value in judge_terms(judges, real, made).items()}
    assert terms["real"] == pytest.approx(sum(np.square(1 - np.array(s)).mean() for s, _ in on_real), rel=1e-4)
    assert terms["made"] == pytest.approx(sum(np.square(np.array(s)).mean() for s, _ in on_made), rel=1e-4)
    terms = {name: value.item() for name, value in made_terms(judges, real, made).items()}
    assert terms["fooled"] == pytest.approx(sum(np.square(1 - np.array(s)).mean() for s, _ in on_made), rel=1e-4)
    apart = [
        np.mean([np.abs(np.array(a) - np.array(b)).mean() for a, b in zip(x, y, strict=True)])
        for (_, x), (_, y) in zip(on_real, on_made, strict=True)
    ]
    assert terms["alike"] == pytest.approx(sum(apart), rel=1e-4)
    gradient = mx.grad(lambda real: made_terms(judges, real, made)["alike"])(real)
    assert mx.abs(gradient).max().item() == 0


def test_judges_learn_to_tell_apart() -> None:
    run = train.Run.new(TINY, SIZES, 0, channels=2, half=False)
    run.judges._warmup, run.judges._peak = 1, 1e-2
    real, made = normal(2, FRAME, scale=0.3), normal(2, FRAME, seed=1, scale=0.02)
    terms = [run.judges.step(0.0, real, made) for _ in range(20)]
    first, last = (sum(terms[i][name].item() for name in ("real", "made")) for i in (0, -1))
    assert first > 6
    assert last < 0.9 * first


def test_judges_in_half_compute_in_bfloat16() -> None:
    run = train.Run.new(TINY, SIZES, 0, channels=2, half=True)
    real, made = normal(2, FRAME, scale=0.3), normal(2, FRAME, seed=1, scale=0.3)
    with run.judges.using(run.judges.weights) as judges:
        score, found = judges(real)[0]
    assert score.dtype == found[0].dtype == mx.bfloat16
    exact = train.Run.new(TINY, SIZES, 0, channels=2, half=False)
    rough, fine = run.judges.step(0.0, real, made), exact.judges.step(0.0, real, made)
    assert rough["real"].item() == pytest.approx(fine["real"].item(), rel=0.02)


# ---- recordings


def test_tape_holds_each_training_sentence_once_and_no_held_one() -> None:
    recordings = audio.synthetic(10, RATE, seconds=0.1)
    whole = audio.tape(recordings, 0, 1)
    for recording in recordings:
        middle = recording.pcm[len(recording.pcm) // 2 :][:50]
        windows = np.lib.stride_tricks.sliding_window_view(whole, 50)
        assert (windows == middle).all(1).sum() == (recording.about["split"] == "train")
    assert len(audio.tape(recordings, 0, 10**6)) >= 10**6
    with pytest.raises(ValueError, match="no recording"):
        audio.tape([r for r in recordings if r.about["split"] == "held"], 0, 1)


def test_clips_lie_after_silence() -> None:
    recordings = audio.synthetic(3, RATE, seconds=0.2)
    made = audio.clips(recordings, FRAME)
    start = audio.LEAD_FRAMES * FRAME
    for row, frames_, recording in zip(np.array(made.samples), made.frames, recordings, strict=True):
        length = len(recording.pcm)
        assert frames_ == -(-length // FRAME)
        assert (row[:start] == 0).all()
        assert np.array_equal(row[start : start + length], recording.pcm / np.float32(32768))
        assert (row[start + length :] == 0).all()
    assert made.samples.shape[1] == start + made.frames.max() * FRAME


def test_read_takes_whole_files_of_the_bank(tmp_path: Path) -> None:
    import soundfile

    sound = np.arange(1000, dtype=np.int16)
    for name in ("a.flac", "b.flac"):
        soundfile.write(tmp_path / name, sound, RATE)
    items = [{"text": str(i), "split": "train", "file": i % 2, "offset": 10 * i, "samples": 5} for i in range(4)]
    bank = {"rate": RATE, "files": ["a.flac", "b.flac"], "items": items}
    (tmp_path / "assistant.json").write_text(json.dumps(bank))
    assert [r.about["text"] for r in audio.read(tmp_path)] == ["0", "1", "2", "3"]
    some = audio.read(tmp_path, 1)
    assert [(r.about["text"], r.pcm.tolist()) for r in some] == [("0", [0, 1, 2, 3, 4]), ("2", [20, 21, 22, 23, 24])]
    (tmp_path / "b.flac").unlink()
    with pytest.raises(FileNotFoundError, match=r"b\.flac of assistant\.json is missing; --files 2"):
        audio.read(tmp_path)
    assert len(audio.read(tmp_path, 1)) == 2


def test_draw_takes_from_the_tape_at_some_loudness() -> None:
    mx.random.seed(1)
    tape = mx.arange(5000).astype(mx.int16)
    rows = np.array(draw(tape, 4, 100)) * 32768
    assert np.ptp(rows[:, 1] - rows[:, 0]) > 0.05
    assert np.ptp(rows[:, 0]) > 100
    for row in rows:
        gain = row[1] - row[0]
        assert 0.7 <= gain <= 1.1
        np.testing.assert_allclose(row, gain * (row[0] / gain + np.arange(100)), atol=0.01)


# ---- runs


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two resolutions and two judges: seconds, not a minute."""
    monkeypatch.setattr(discriminators, "SPECTRA", ((256, 64),))
    monkeypatch.setattr(discriminators, "PERIODS", (3,))
    monkeypatch.setattr(losses, "RESOLUTIONS", ((64, 16, 10), (256, 64, 40)))


def tape() -> mx.array:
    return mx.array(audio.tape(audio.synthetic(6, RATE, seconds=0.3), 0, 8 * FRAME))


def test_phases() -> None:
    phases = [train.phase_at(progress) for progress in (0.0, 0.21, 0.23, 0.39, 0.41, 1.0)]
    assert phases == [PLAIN, PLAIN, QUANTIZED, QUANTIZED, JUDGED, JUDGED]


@pytest.mark.usefixtures("_short")
def test_training_lowers_the_loss() -> None:
    run = train.Run.new(TINY, SIZES, 0, channels=2)
    run.codec._warmup, run.codec._peak = 1, 1e-2
    data = tape()
    sound = [run.step(0.1, data)["sound"].item() for _ in range(40)]
    assert np.mean(sound[-5:]) < 0.8 * np.mean(sound[:5])
    terms = run.step(0.3, data)
    assert terms["commitment"].item() > 0
    assert terms["sound"].item() < 0.9 * np.mean(sound[:5])  # codebooks found by k-means lose little


@pytest.mark.usefixtures("_short")
def test_resumed_run_gives_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "REVIVE_STEPS", 2)
    data, whole = tape(), train.Run.new(TINY, SIZES, 3, channels=2)
    budget = Budget(steps=8)
    for progress in budget:
        if whole.codec.steps == 4:
            whole.save(tmp_path, budget)
        whole.step(progress, data)
    resumed = train.Run.new(TINY, SIZES, 4, channels=2)
    resumed.codec._seed, resumed.judges._seed = 3, 4  # as if begun by the same command
    used = resumed.resume(tmp_path)
    assert used["steps"] == 4
    assert resumed.started
    for progress in Budget(steps=8, used=used):
        resumed.step(progress, data)
    assert mx.array_equal(whole.codec.weights, resumed.codec.weights)
    assert mx.array_equal(whole.judges.weights, resumed.judges.weights)
    assert mx.array_equal(whole.coding.quantizer.centres, resumed.coding.quantizer.centres)


def test_distance_on_the_way_is_that_of_the_served_codec() -> None:
    codec, samples = busy_codec(), normal(2, 4 * FRAME, scale=0.2)
    run = train.Run.new(TINY, SIZES, 0, channels=2)
    run.coding = coding_of(codec)
    plain = log_mel_distance(run.coding.network.decode(codec.encode(samples)), samples, RATE)
    assert run.distance(samples) == pytest.approx(plain, rel=1e-4)
    run.started = True
    coded = log_mel_distance(codec.decode(codec.quantize(codec.encode(samples))), samples, RATE)
    assert run.distance(samples) == pytest.approx(coded, rel=1e-4)
    assert coded != pytest.approx(plain, rel=1e-3)


def test_finished_codec_has_latents_of_spread_one_and_the_same_codes(tmp_path: Path) -> None:
    coding, samples = coding_of(busy_codec()), normal(2, 6 * FRAME, scale=0.2)
    latents = coding.network.encode(samples)
    codec, spread = finished(coding, samples)
    assert spread == pytest.approx(float(np.array(latents).std()), rel=1e-5)
    assert float(np.array(codec.encode(samples)).std()) == pytest.approx(1, abs=2e-3)
    same = codec.quantize(codec.encode(samples)) == coding.quantizer.search(latents.reshape(-1, 6)).codes.T.reshape(
        2, 6, 4
    )
    assert same.mean().item() > 0.98  # float16 may move a close one
    codes = codec.quantize(codec.encode(samples))
    before = coding.network.decode(sum(coding.quantizer.centres[q][codes[..., q]] for q in range(4)))
    np.testing.assert_allclose(np.array(codec.decode(codes)), np.array(before), atol=5e-3)
    assert all(mx.array_equal(v, v.astype(mx.float16).astype(mx.float32)) for _, v in tree_flatten(codec.parameters()))
    save(codec, tmp_path / "codec.safetensors")
    stored = mx.load(str(tmp_path / "codec.safetensors"))
    assert stored[PREFIX + "decoder.layers.0.weight"].shape == (6, 16, 9)  # PyTorch's axes
    assert stored[PREFIX + "prvq.mus_list.3"].shape == (8, 6)
    back = load(tmp_path / "codec.safetensors", TINY)
    for (name, a), (other, b) in zip(tree_flatten(codec.parameters()), tree_flatten(back.parameters()), strict=True):
        assert name == other
        assert mx.array_equal(a, b)
    assert [p.name for p in tmp_path.iterdir()] == ["codec.safetensors"]


def test_measured_figures() -> None:
    codec = busy_codec()
    coding, held = coding_of(codec), audio.clips(audio.synthetic(3, RATE, seconds=0.2), FRAME)
    figures = measure(coding, codec, TINY, held)
    codes = codec.quantize(codec.encode(held.samples))
    assert figures["mel"] == pytest.approx(log_mel_distance(codec.decode(codes), held.samples, RATE), rel=1e-3)
    assert figures["codes_equal"] == 1
    assert figures["wave_difference"] < 1e-5
    assert figures["mel_8"] == pytest.approx(figures["mel"], rel=1e-5)  # it has four levels only
    assert set(figures) == {
        "mel", "mel_8", "mel_plain", "silence_rms", "silence_constant", "codes_equal", "wave_difference",
    }  # fmt: skip


def test_encoding_all_is_the_served_encoding_after_silence(tmp_path: Path) -> None:
    codec, recordings = busy_codec(), audio.synthetic(7, RATE, seconds=0.3)
    codes = encode.encode_all(codec, TINY, recordings)
    for recording, found in zip(recordings, codes, strict=True):
        clip = audio.clips([recording], FRAME)
        served = np.array(codec.quantize(codec.encode(clip.samples)))[0, audio.LEAD_FRAMES :]
        assert found.shape == (-(-len(recording.pcm) // FRAME), 4)
        assert (found == served).mean() > 0.999
    encode.write(tmp_path / "codes.npz", codec, recordings, codes)
    stored = np.load(tmp_path / "codes.npz")
    assert stored["lengths"].tolist() == [len(c) for c in codes]
    assert np.array_equal(stored["codes"], np.concatenate(codes))
    assert stored["codes"].dtype == np.uint8
    assert stored["split"].tolist()[4:6] == ["held", "train"]
    assert stored["text"][2] == "vowel 2"
    assert np.array_equal(stored["mus"], np.array(mx.stack(codec.prvq.mus_list)))
    assert np.array_equal(stored["silence"], np.array(codec.silence_codes()))


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "FRAMES_AT_ONCE", 60)
    recordings = audio.synthetic(9, RATE, seconds=0.4)
    batches = encode._batches(recordings, FRAME)
    assert sorted(i for batch in batches for i in batch) == list(range(9))
    longest = [max(-(-len(recordings[i].pcm) // FRAME) for i in batch) + audio.LEAD_FRAMES for batch in batches]
    assert all(len(batch) * frames_ <= 60 for batch, frames_ in zip(batches, longest, strict=True))
    assert len(batches) < 9


@pytest.mark.usefixtures("_short")
def test_the_command_with_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train._smoke_sizes()[0] == small_config().codec_config  # the other trainings go on with what it leaves
    monkeypatch.setattr(train, "_smoke_sizes", lambda: (TINY, Sizes(2, 5, (2, 5), first=50), 4))
    monkeypatch.setattr(sys, "argv", ["train", "--smoke", "--out", str(tmp_path)])
    train.main()
    figures = json.loads((tmp_path / "codec.json").read_text())
    assert figures["steps"] == 10
    assert figures["held"] == 2
    assert figures["codes_equal"] > 0.95
    assert figures["wave_difference"] < 1e-5
    lines = [json.loads(line) for line in (tmp_path / "codec.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "progress" in line]
    assert len(steps) == 10
    assert "commitment" not in steps[2]
    assert "commitment" in steps[3]
    assert "judges_real" in steps[4]
    assert (tmp_path / "codec.safetensors").is_file()
    monkeypatch.setattr(sys, "argv", ["train", "--smoke", "--resume", "--out", str(tmp_path)])
    train.main()  # nothing is left of its budget: it only finishes
    again = json.loads((tmp_path / "codec.json").read_text())
    assert again == pytest.approx(figures, rel=1e-6)


@pytest.mark.usefixtures("_short")
def test_rehearsal_compares_with_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here both are the CPU: bfloat16 passes as near enough, and a wrong kernel is named."""
    monkeypatch.setattr(train, "on_cpu", lambda function: function())
    log, data = Log(tmp_path / "log", 0.0), tape()
    assert train.rehearse(TINY, SIZES, data, log, 2)
    line = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert line["cpu"]["sound"] == pytest.approx(line["here"]["sound"], rel=1e-3)
    assert {"fooled", "alike", "judges_real", "judges_norm", "commitment", "norm"} <= set(line["here"])
    original, calls = train._first_figures, []

    def wrong_on_the_device(
        config: CodecConfig, sizes: Sizes, data: mx.array, channels: int, half: bool
    ) -> tuple[dict, dict]:
        calls.append((half, sizes.frames))
        plain, judged = original(config, sizes, data, channels, False)
        if len(calls) > 1 and half:
            raise RuntimeError("no plan for this convolution")
        return plain, judged | ({"fooled": 9.0} if len(calls) > 5 else {})

    monkeypatch.setattr(train, "_first_figures", wrong_on_the_device)
    assert not train.rehearse(TINY, SIZES, data, log, 2)
    assert calls == [(False, 4), (True, 4), (False, 4), (False, 4)]
    with pytest.raises(ArithmeticError, match="fooled is 9 here and"):
        train.rehearse(TINY, SIZES, data, log, 2)


def test_on_cpu_and_what_agrees() -> None:
    try:
        assert on_cpu(mx.default_device) == mx.cpu
    finally:
        mx.disable_compile()
    agree({"a": 1.01, "b": 0.0, "more": 5.0}, {"a": 1.0, "b": 1e-5})
    with pytest.raises(ArithmeticError, match=r"b is nan here and 1 on the CPU"):
        agree({"a": 1.0, "b": float("nan")}, {"a": 1.0, "b": 1.0})
    with pytest.raises(ArithmeticError, match=r"a is 1\.03 here"):
        agree({"a": 1.03}, {"a": 1.0})


@pytest.mark.usefixtures("_short")
def test_log_stops_a_run_that_diverges(tmp_path: Path) -> None:
    run = train.Run.new(TINY, SIZES, 0, channels=2)
    run.codec.edit(lambda coding: coding.network.decoder.layers[-1].update({"weight": mx.full((1, 4, 18), mx.nan)}))
    held = audio.clips(audio.synthetic(1, RATE, seconds=0.1), FRAME)
    with pytest.raises(ArithmeticError, match="is nan at"):
        train.train(run, tape(), held, Budget(steps=2), tmp_path, Log(tmp_path / "log", 0.0))
