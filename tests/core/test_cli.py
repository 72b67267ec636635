"""The command as a person meets it: output, files, one line for each mistake."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from voicechat_core.hub import locate

SPOKEN = Path(__file__).parents[1] / "data" / "spoken.wav"
RUN = "from voicechat_core.cli import main; main()"


def voicechat(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.fixture(scope="module")
def answer(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], Path]:
    """The JSON and the WAV of one run."""
    path = tmp_path_factory.mktemp("answer") / "response.wav"
    words = ("-m", tiny_path, "--audio", SPOKEN, "--output-audio", path, "-p", "Be concise.", "--extra-seconds", "3")
    result = voicechat("generate", *words, "--seed", "1", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    return json.loads(result.stdout), path


def test_json_is_one_object_with_everything(answer: tuple[dict[str, object], Path]) -> None:
    data, _ = answer
    assert list(data) == [
        "transcript", "text", "function_text", "text_tokens", "function_tokens", "audio_codes", "frames", "sample_rate",
        "seed", "tts_prompt_steps", "tts_context_frames", "seconds",
    ]  # fmt: skip
    assert data["frames"] == 75  # 2.99 s and 3 s of silence: ceil(95840 / 1280)
    assert np.array(data["audio_codes"]).shape == (75, 31)
    assert len(data["text_tokens"]) == len(data["function_tokens"]) == 75  # type: ignore[arg-type]
    assert (data["sample_rate"], data["seed"], data["seconds"]) == (22050, 1, 6.0)


def test_streaming_gives_the_same_answer(
    answer: tuple[dict[str, object], Path], tiny_path: Path, tmp_path: Path
) -> None:
    """Ids, codes and texts equal; the WAV, too, from its seventh sample on, within two of PCM16's steps."""
    data, path = answer
    words = ("-m", tiny_path, "--audio", SPOKEN, "-p", "Be concise.", "--extra-seconds", "3", "--seed", "1", "--json")
    result = voicechat("generate", *words, "--stream", "--profile", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    streamed = json.loads(result.stdout)
    profile = streamed.pop("profile")
    assert streamed == data
    ours, theirs = (soundfile.read(p, dtype="int16")[0].astype(int) for p in (tmp_path / "response.wav", path))
    assert len(ours) == len(theirs)
    assert np.abs(ours - theirs)[6:].max() <= 2
    assert [frame["frame_index"] for frame in profile["per_frame"]] == list(range(75))
    assert profile["frames"] == 73
    stages = ["perception", "rnnt", "language", "tts", "codec"]
    assert all(list(frame["stages_with_waits_ms"]) == stages for frame in profile["per_frame"])


def test_the_profile_is_a_table_below_the_answer(tiny_path: Path, tmp_path: Path) -> None:
    words = ("-m", tiny_path, "--audio", SPOKEN, "--max-frames", "6", "--stream", "--profile")
    result = voicechat("generate", *words, "--tts-context-frames", "3", "--no-tts-prompt-steps", cwd=tmp_path)
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    table = lines[lines.index("") + 1 :]
    rows = ["ms a frame", "perception", "rnnt", "language", "tts", "codec", "total with waits", "total"]
    assert [line[:18].strip() for line in table[:8]] == rows
    assert all(float(cell) >= 0 for line in table[1:8] for cell in line[18:].split())


def test_a_profile_needs_a_stream(tiny_path: Path, tmp_path: Path) -> None:
    result = voicechat("generate", "-m", tiny_path, "--audio", SPOKEN, "--profile", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "voicechat: --profile times the frames of a live session: give --stream too\n"


def test_the_wav_is_pcm16_of_1764_samples_a_frame(answer: tuple[dict[str, object], Path], tiny_path: Path) -> None:
    _, path = answer
    info = soundfile.info(path)
    assert (info.samplerate, info.channels, info.subtype, info.frames) == (22050, 1, "PCM_16", 75 * 1764)
    assert path.stat().st_size == 44 + 2 * 75 * 1764


def test_text_output_and_the_default_file(tiny_path: Path, tmp_path: Path) -> None:
    result = voicechat("generate", "-m", tiny_path, "--audio", SPOKEN, cwd=tmp_path)
    assert result.returncode == 0
    user, assistant, *_, last = result.stdout.splitlines()
    assert user.startswith("user:      ")
    assert assistant.startswith("assistant: ")
    assert last == "response.wav: 38 frames, 3.04 s"
    assert all(c.isprintable() for line in result.stdout.splitlines() for c in line)
    assert soundfile.info(tmp_path / "response.wav").frames == 38 * 1764


def test_long_input_shows_progress(tiny_path: Path, tmp_path: Path) -> None:
    words = ("-m", tiny_path, "--audio", SPOKEN, "--extra-seconds", "9", "--output-audio", tmp_path / "r.wav")
    result = voicechat("generate", *words)
    assert result.stderr.splitlines() == ["125 of 150 positions", "150 of 150 positions"]


def silent_wav(path: Path, samples: int = 1280) -> Path:
    soundfile.write(path, np.zeros(samples, np.float32), 16000)
    return path


def one_line(result: subprocess.CompletedProcess[str], status: int = 1) -> str:
    """The message of a refused command: one line, no traceback, its status, nothing on stdout."""
    assert (result.returncode, result.stdout) == (status, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("voicechat: ")
    return line


def test_bad_audio_is_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    nan = tmp_path / "nan.wav"
    soundfile.write(nan, np.array([0, np.nan], np.float32), 16000, subtype="FLOAT")
    empty, text, absent = tmp_path / "empty.wav", tmp_path / "text.wav", tmp_path / "absent.wav"
    empty.touch()
    text.write_text("not audio")
    cut = silent_wav(tmp_path / "cut.wav")
    cut.write_bytes(cut.read_bytes()[:1000])
    for path in (nan, empty, text, absent, cut):
        line = one_line(voicechat("generate", "-m", "no-such-model", "--audio", path, cwd=tmp_path))
        assert str(path) in line
        assert "no-such-model" not in line


def test_an_output_that_cannot_be_written_is_found_first(tmp_path: Path) -> None:
    target = tmp_path / "no" / "such" / "r.wav"
    words = ("-m", "no-such-model", "--audio", "no-such-audio", "--output-audio", target)
    line = one_line(voicechat("generate", *words))
    assert str(target) in line
    line = one_line(voicechat("generate", *words[:-1], tmp_path))
    assert str(tmp_path) in line


def test_bad_checkpoints_take_one_line(tmp_path: Path) -> None:
    audio = silent_wav(tmp_path / "in.wav")
    for content in ({"model": {"stt": {}}}, {"model_type": "moshi"}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        line = one_line(voicechat("generate", "-m", tmp_path, "--audio", audio, cwd=tmp_path))
        assert str(tmp_path / "config.json") in line
        assert "convert first" in line or "moshi" in line


@pytest.mark.parametrize("option", [("--seed", "-1"), ("--extra-seconds", "-1"), ("--seed", "x"), ("--nothing",)])
def test_misuse_is_status_two(option: tuple[str, ...]) -> None:
    result = voicechat("generate", "-m", "m", "--audio", "a", *option)
    assert result.returncode == 2
    assert option[0] in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--extra-seconds", "inf"), "extra_decoding_seconds is inf"),
        (("--extra-seconds", "1e308"), "extra_decoding_seconds is 1e+308"),
        (("--seed", str(2**64)), f"seed is {2**64}"),
    ],
)
def test_an_option_out_of_range_is_found_before_anything_is_read(option: tuple[str, str], words: str) -> None:
    result = voicechat("generate", "-m", "no-such-model", "--audio", "no-such-audio", *option)
    assert words in one_line(result, status=2)


def test_more_seconds_than_the_model_has(tiny_path: Path, tmp_path: Path) -> None:
    audio = silent_wav(tmp_path / "in.wav")
    result = voicechat("generate", "-m", tiny_path, "--audio", audio, "--extra-seconds", "1e9", cwd=tmp_path)
    assert "max_position_embeddings is 131072" in one_line(result)


@pytest.mark.parametrize("link", ["same", "symlink", "hard link", "checkpoint"])
def test_an_answer_never_overwrites_its_input(tiny_path: Path, tmp_path: Path, link: str) -> None:
    audio, output = silent_wav(tmp_path / "in.wav"), tmp_path / "out.wav"
    if link == "symlink":
        output.symlink_to(audio)
    elif link == "hard link":
        output.hardlink_to(audio)
    else:
        output = audio if link == "same" else tiny_path / "model.safetensors"
    before = output.read_bytes()
    result = voicechat("generate", "-m", tiny_path, "--audio", audio, "--output-audio", output)
    assert "would overwrite its own input" in one_line(result, status=2)
    assert output.read_bytes() == before


def test_a_suffix_does_not_decide_what_a_file_is(tiny_path: Path, tmp_path: Path) -> None:
    raw = tmp_path / "in.raw"
    raw.write_bytes(SPOKEN.read_bytes())
    result = voicechat("generate", "-m", tiny_path, "--audio", raw, "--max-frames", "1", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_progress_that_nobody_can_read_costs_nothing(tiny_path: Path, tmp_path: Path) -> None:
    words = ["-m", tiny_path, "--audio", SPOKEN, "--extra-seconds", "9", "--output-audio", tmp_path / "r.wav"]
    command = [sys.executable, "-c", RUN, "generate", *map(str, words)]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, check=False)
    assert result.returncode == 0
    assert soundfile.info(tmp_path / "r.wav").frames == 150 * 1764


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_output_that_nobody_can_read_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, "synthesize", str(tmp_path / "new")]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("voicechat: standard output cannot be written")


def test_an_old_answer_survives_a_failed_run(tiny_path: Path, tmp_path: Path) -> None:
    old = silent_wav(tmp_path / "old.wav")
    before = old.read_bytes()
    one_line(voicechat("generate", "-m", tiny_path, "--audio", tmp_path / "absent.wav", "--output-audio", old))
    assert old.read_bytes() == before


def test_synthesize_then_generate(tmp_path: Path) -> None:
    made = voicechat("synthesize", tmp_path / "new", "--seed", "3", "--preset", "tiny")
    assert made.returncode == 0
    assert made.stdout.startswith(f"{tmp_path / 'new'}: tiny, seed 3, 1,")
    again = one_line(voicechat("synthesize", tmp_path / "new"))
    assert "exists already" in again
    assert "there are tiny, mid, deep" in one_line(voicechat("synthesize", tmp_path / "x", "--preset", "big"), status=2)


def test_help_and_version() -> None:
    assert voicechat("--version").stdout.strip().count(".") == 2
    shown = voicechat("--help").stdout
    for command in ("convert", "generate", "inspect", "list", "quantize", "synthesize", "verify"):
        assert command in shown


def test_a_streamed_wav_is_read(tiny_path: Path, tmp_path: Path) -> None:
    """As written to a pipe: sizes that were never filled in."""
    whole = SPOKEN.read_bytes()
    streamed = tmp_path / "streamed.wav"
    unknown = struct.pack("<I", 0xFFFFFFFF)
    streamed.write_bytes(whole[:4] + unknown + whole[8:40] + unknown + whole[44:])
    runs = [
        voicechat("generate", "-m", tiny_path, "--audio", path, "--json", "--output-audio", os.devnull)
        for path in (SPOKEN, streamed)
    ]
    assert runs[0].returncode == 0
    assert runs[0].stdout == runs[1].stdout


# ------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def packed(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 4-bit build made by the command, with what stays dense in bfloat16."""
    target = tmp_path_factory.mktemp("packed") / "4bit"
    result = voicechat("quantize", tiny_path, target, "--bits", "4", "--group-size", "32", "--dtype", "bfloat16")
    assert (result.returncode, result.stderr) == (
        0,
        "125 of 382 tensors\n250 of 382 tensors\n375 of 382 tensors\n382 of 382 tensors\n",
    )
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"{target}: 15 modules in 4 bits in groups of 32; 0.003 GB, from 0.006 GB")
    assert 2_000_000 < size < 3_000_000
    return target


def test_a_packed_build_answers_in_every_precision(packed: Path, tmp_path: Path) -> None:
    answers = {}
    for precision in ("auto", "bfloat16", "float32"):
        words = ("--audio", SPOKEN, "--precision", precision, "--json", "--output-audio", tmp_path / "r.wav")
        result = voicechat("generate", "-m", packed, *words)
        assert (result.returncode, result.stderr) == (0, "")
        answers[precision] = json.loads(result.stdout)
    # By themselves packed matrices give float32, as their scales are; told so, bfloat16.
    assert answers["auto"] != answers["bfloat16"] != answers["float32"] != answers["auto"]
    assert {len(answer["text_tokens"]) for answer in answers.values()} == {38}


def test_inspect_says_what_is_there_and_what_is_wrong(packed: Path, tmp_path: Path) -> None:
    shown = voicechat("inspect", packed)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "4 bits in groups of 32: 15 modules (llm 12, embed_tokens 1, lm_head 1, function_head 1)" in shown.stdout
    assert "precision auto is bfloat16 here" in shown.stdout
    data = json.loads(voicechat("inspect", packed, "--json").stdout)
    assert (data["passed"], data["weights"]["total"]["quantized"]) == (True, 15)
    broken = Path(shutil.copytree(packed, tmp_path / "broken"))
    (broken / "model.safetensors").unlink()
    shown = voicechat("inspect", broken)
    assert (shown.returncode, shown.stderr) == (1, "")
    assert f"{broken / 'model.safetensors'}: this shard is missing" in shown.stdout
    assert "no such directory" in one_line(voicechat("inspect", tmp_path / "absent"))


def test_list_names_the_published_checkpoints(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", RUN, "list"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert shown.stderr == ""
    own = sum(file.stat().st_size for file in locate("voicechat-small").glob("*.safetensors"))
    assert [line.split() for line in shown.stdout.splitlines()] == [
        ["NemotronLabs", "VoiceChat", "(speech,", "nemotron_voicechat)"],
        ["checkpoint", "precision", "size", "here"],
        ["voicechat-small", "8-bit", f"{own / 1e6:.2f}", "MB", "complete"],
        ["mlx-community/NemotronLabs-VoiceChat-11B-bf16", "bf16", "22.19", "GB", "no"],
        ["mlx-community/NemotronLabs-VoiceChat-11B-8bit", "8-bit", "13.90", "GB", "no"],
        ["mlx-community/NemotronLabs-VoiceChat-11B-4bit", "4-bit", "9.17", "GB", "no"],
    ]
    as_json = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, env=environment)
    here = [c["here"] for c in json.loads(as_json.stdout)["families"][0]["checkpoints"]]
    assert here == ["complete", "no", "no", "no"]


def test_a_hub_name_without_a_network_is_one_line(tmp_path: Path) -> None:
    name = "mlx-community/NemotronLabs-VoiceChat-11B-4bit"
    command = [sys.executable, "-c", RUN, "generate", "-m", name, "--audio", str(SPOKEN)]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    lacks = "there is no cached copy, and no local directory of that name"
    assert one_line(result) == f"voicechat: {name}: offline mode is on (HF_HUB_OFFLINE); {lacks}"
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".wav"] == []


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--bits", "5"), 2, "bits is 5; one of 4, 8 is needed"),
        (("--bits", "4", "--group-size", "48"), 2, "group_size is 48; one of 32, 64, 128 is needed"),
        (("--bits", "4", "--dtype", "int8"), 2, "dtype is 'int8'; one of float32, bfloat16 is needed"),
    ],
)
def test_quantize_refuses_what_it_cannot_do(
    tiny_path: Path, tmp_path: Path, words: tuple[str, ...], status: int, said: str
) -> None:
    assert said in one_line(voicechat("quantize", tiny_path, tmp_path / "new", *words), status)
    assert not (tmp_path / "new").exists()


def test_what_needs_no_source_is_refused_before_one_is_fetched(tmp_path: Path) -> None:
    for words in (("--bits", "4", "--group-size", "48"), ("--bits", "5"), ("--bits", "4", "--dtype", "x")):
        line = one_line(voicechat("quantize", "owner/name", tmp_path / "new", *words), 2)
        assert "owner/name" not in line
    assert "exists already" in one_line(voicechat("quantize", "owner/name", tmp_path, "--bits", "4"))
    assert "dtype is 'x'" in one_line(voicechat("convert", "owner/name", tmp_path / "new", "--dtype", "x"), 2)
    assert "exists already" in one_line(voicechat("convert", "owner/name", tmp_path, "--dtype", "float32"))


def test_convert_stores_in_another_format(tiny_path: Path, tmp_path: Path) -> None:
    made = voicechat("convert", tiny_path, tmp_path / "half", "--dtype", "bfloat16")
    assert made.returncode == 0
    assert made.stdout == f"{tmp_path / 'half'}: bfloat16; 0.003 GB, from 0.006 GB\n"
    assert "precision auto is bfloat16 here" in voicechat("inspect", tmp_path / "half").stdout


@pytest.mark.parametrize(
    "words",
    [
        ("synthesize",),
        ("quantize", "SRC", "--bits", "4", "--group-size", "32"),
        ("convert", "SRC", "--dtype", "float32"),
    ],
    ids=lambda words: words[0],
)
def test_home_is_expanded_in_what_is_written(words: tuple[str, ...], tiny_path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, *(str(tiny_path) if word == "SRC" else word for word in words), "~/new"]
    environment = {**os.environ, "HOME": str(tmp_path / "home")}
    made = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    assert made.stdout.startswith(f"{tmp_path / 'home' / 'new'}: ")
    assert (tmp_path / "home" / "new" / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


STOPPED = """
import os
from voicechat_core import synthetic
from voicechat_core.cli import main

def write_and_stop(directory, *others, write=synthetic.write_tensors):
    write(directory, *others)
    print(directory, (directory / "model.safetensors").stat().st_size, sep="\\n", flush=True)
    os.kill(os.getpid(), int(os.environ["SIGNAL"]))

synthetic.write_tensors = write_and_stop
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_run_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", STOPPED, "synthesize", str(tmp_path / "new")]
    environment = {**os.environ, "SIGNAL": str(int(number))}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    assert result.returncode == 128 + number
    draft, weights = result.stdout.splitlines()
    assert Path(draft).parent == tmp_path
    assert int(weights) > 6_000_000
    assert list(tmp_path.iterdir()) == []


def test_a_warning_is_one_line_that_says_so(packed: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(packed, tmp_path / "odd"))
    config = json.loads((path / "config.json").read_text())
    config["quantization"]["stt_model.nothing"] = True
    (path / "config.json").write_text(json.dumps(config))
    words = ("--audio", SPOKEN, "--max-frames", "1", "--output-audio", tmp_path / "r.wav")
    result = voicechat("generate", "-m", path, *words)
    differ = "config.json: quantization and quantization_config differ; the first is taken"
    more = "and 1 more, see voicechat inspect"
    assert (result.returncode, result.stderr) == (0, f"voicechat: warning: {path}: {differ}; {more}\n")


def test_quantize_never_writes_over_anything(tiny_path: Path, packed: Path, tmp_path: Path) -> None:
    line = one_line(voicechat("quantize", "no/such-source", tmp_path, "--bits", "4"))
    assert line == f"voicechat: {tmp_path}: exists already; nothing is written over it"
    assert "quantized already" in one_line(voicechat("quantize", packed, tmp_path / "again", "--bits", "8"))
    assert "no such directory" in one_line(voicechat("quantize", tmp_path / "absent", tmp_path / "x", "--bits", "8"))


def test_modules_that_stay_dense_are_named(tiny_path: Path, tmp_path: Path) -> None:
    result = voicechat("quantize", tiny_path, tmp_path / "new", "--bits", "8", "--group-size", "128")
    assert result.returncode == 0
    assert result.stdout.startswith(f"{tmp_path / 'new'}: 3 of 15 modules in 8 bits in groups of 128; ")
    *_, warning = result.stderr.splitlines()
    said = "voicechat: warning: left dense, since 128 does not divide their inputs: stt_model."
    assert warning.startswith(said)
    assert warning.count("stt_model.") == 12


def test_a_precision_that_does_not_exist_is_found_first() -> None:
    result = voicechat("generate", "-m", "no-such-model", "--audio", "no-such-audio", "--precision", "half")
    assert one_line(result, 2).endswith("precision is 'half'; one of auto, float32, bfloat16 is needed")


def test_a_stored_format(tmp_path: Path) -> None:
    made = voicechat("synthesize", tmp_path / "half", "--dtype", "bfloat16")
    assert made.stdout.endswith(" parameters in bfloat16\n")
    assert "precision auto is bfloat16 here" in voicechat("inspect", tmp_path / "half").stdout
    assert "dtype is 'float16'" in one_line(voicechat("synthesize", tmp_path / "x", "--dtype", "float16"), 2)
