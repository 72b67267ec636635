"""Checkpoints by name, with the real huggingface_hub against a hub of our own; a local path never asks anyone."""

import errno
import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.core.fake_hub import CONFIG, FIRST, INDEX, NAME, SECOND, SHARDS, FakeHub, Repository, running
from voicechat_core import InputError, hub, load
from voicechat_core.hub_cache import quiet
from voicechat_core.hub_errors import explained

SMALL = {
    "config.json": CONFIG, "model.safetensors.index.json": INDEX, "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{} ", "special_tokens_map.json": b"{}  ", "rnnt_tokenizer/vocab.json": b"[]",
}  # fmt: skip
NOTICES = {
    "LICENCE": b"lb", "LICENSE": b"l", "LICENSE-codec": b"lc", "NOTICE.txt": b"n", "README.md": b"r",
    "other.json": b"o", "rnnt_tokenizer/tokenizer.model": b"t", "terms.txt": b"tt",
}  # fmt: skip
NEVER = {
    "pytorch_model.bin": b"p", "consolidated.safetensors": b"c", "model-00003-of-00002.safetensors": b"m",
    "weights.pt": b"w", "docs/model.safetensors": b"dm", "my-model.safetensors": b"mm",
    "docs/LICENSE": b"dl", "docs/README.md": b"dr", "sample.wav": b"s",
}  # fmt: skip
FILES = SMALL | SHARDS | NOTICES | NEVER
RUN = """
import json, signal, sys
import os
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever who started the tests does with it
from voicechat_core import catalogue, hub
hub.REQUEST_SECONDS = float(os.environ.get("SECONDS", hub.REQUEST_SECONDS))
for function, args, options in json.loads(sys.argv[1]):
    try:
        value = getattr(hub if function == "locate" else catalogue, function)(*args, **options)
        print(json.dumps({"value": value if isinstance(value, dict) else str(value)}))
    except hub.HubError as error:
        print(json.dumps({"error": str(error), "cause": type(error.__cause__).__name__}))
"""


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    with running() as server:
        yield server


def environment(endpoint: str, home: Path, **more: str) -> dict[str, str]:
    """Without what this machine says of proxies, tokens and caches."""
    ours = {k: v for k, v in os.environ.items() if not re.match(r"HF_|HUGGING|TRANSFORMERS_|.*_proxy$", k, re.I)}
    ours |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HOME": str(home), "NO_PROXY": "*"}
    return ours | {"HF_HUB_DISABLE_TELEMETRY": "1"} | more  # else the library asks once a day who is calling


def start(code: str, *args: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *args]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, **{"stderr": subprocess.PIPE, **options})


def call(env: dict[str, str], *steps: tuple[str, list[str], dict[str, bool]]) -> tuple[list[dict[str, Any]], str]:
    """What each call of ``voicechat_core.hub`` gave, in one fresh process, and what that process said on stderr."""
    out, err = start(RUN, json.dumps(steps), env=env).communicate(timeout=60)
    return [json.loads(line) for line in out.splitlines()], err


def located(name: str = NAME, **options: bool) -> tuple[str, list[str], dict[str, bool]]:
    return "locate", [name], options


def snapshot(home: Path, name: str = NAME, commit: str = FIRST) -> Path:
    return home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / commit


def fetched(requests: list[str], name: str = NAME, commit: str = FIRST) -> list[str]:
    """The files that were asked for whole, in order; that each was of this repository and commit is asserted."""
    files = [request for request in requests if request.startswith("GET ") and "/api/" not in request]
    found = [re.fullmatch(f"GET /{name}/(?:resolve|elsewhere)/{commit}/(.+)", request) for request in files]
    assert None not in found, files
    return [file[1] for file in found if file]


# ---- paths


@pytest.mark.parametrize(
    "text",
    ["name", "./owner/name", "../name", "/owner/name", "owner/name/", "a/b/c", "owner/name.git", "owner/na--me",
     "owner/na..me", "owner/.name", "owner/name-", "-owner/name", "owner/na me", "öwner/name", "owner/" + "n" * 97,
     "owner\\name", "owner/name\n", "owner/na\0me", "https://huggingface.co/owner/name"],
)  # fmt: skip
def test_what_is_no_name_of_the_hub_is_a_path(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_ask", lambda name: pytest.fail(f"asked for {name}"))
    assert hub.locate(text) == Path(text)
    assert hub.locate(Path("owner/name")) == Path("owner/name")


@pytest.mark.parametrize("wrong", ["", None, 3, b"owner/name"])
def test_what_is_no_name_at_all(wrong: Any) -> None:
    said = f"checkpoint is {wrong!r}; a directory, voicechat-small or a name on the hub (owner/name) is needed"
    for function in (hub.locate, load):
        with pytest.raises(InputError, match=f"^{re.escape(said)}$"):
            function(wrong)


def test_names_are_those_that_the_library_allows() -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    parts = ["a", "A9", "a-b", "a.b", "a_b", "_a", "a_", "a--b", "a..b", ".a", "a.", "-a", "a-", "a.git", "a b", "é",
             "n" * 96, "n" * 97, "a.gitx", ""]  # fmt: skip
    for name in [f"{owner}/{part}" for owner in parts for part in parts]:
        try:
            validate_repo_id(name)
            allowed = True
        except HFValidationError:
            allowed = False
        assert (hub.HUB_NAME.fullmatch(name) is not None) == allowed, name


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.locate("~/checkpoint") == hub.locate(Path("~/checkpoint")) == tmp_path / "checkpoint"
    assert hub.locate("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")


def test_a_local_directory_with_a_hub_name_asks_nobody(fake: FakeHub, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "dangling").symlink_to("nowhere")
    code = (
        f"import sys; from voicechat_core import hub; print(hub.locate({NAME!r}), hub.locate('owner/dangling'))\n"
        "print([name for name in ('huggingface_hub', 'httpx2', 'tqdm', 'rich', 'mlx') if name in sys.modules])"
    )
    out, err = start(code, env=environment(fake.url, tmp_path), cwd=tmp_path).communicate(timeout=60)
    assert out.splitlines() == [f"{NAME} owner/dangling", "[]"]
    assert (err, fake.asked()) == ("", [])


# ---- downloads


def test_downloaded_once(fake: FakeHub, tmp_path: Path) -> None:
    """Exactly what is needed, in order; then one question and no download; offline not even the question."""
    fake.repositories[NAME] = Repository({FIRST: FILES})
    env, folder = environment(fake.url, tmp_path), snapshot(tmp_path)
    results, said = call(env, located())
    requests = fake.asked()
    assert results == [{"value": str(folder)}]
    assert fetched(requests) == [*SMALL, *SHARDS]
    assert (len(requests), requests[0]) == (1 + 2 * 8, f"GET /api/models/{NAME}")
    assert said == f"{NAME}: downloading 2 files, 0.12 MB\n"
    held = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert held == SMALL | SHARDS
    assert (folder.parents[1] / "refs" / "main").read_text() == FIRST

    before = folder.stat().st_mtime_ns
    results, said = call(env, located(), ("listing", [], {}))
    assert (results[0], said) == ({"value": str(folder)}, "")
    assert fake.asked() == [f"GET /api/models/{NAME}"]
    _own, bf16, eight, four = results[1]["value"]["families"][0]["checkpoints"]
    assert (bf16["here"], eight["here"], four["here"], four["path"]) == ("no", "no", "complete", str(folder))

    offline = env | {"HF_HUB_OFFLINE": "1"}
    assert call(offline, located(), located(notices=True)) == ([{"value": str(folder)}] * 2, "")
    assert (fake.asked(), folder.stat().st_mtime_ns) == ([], before)

    assert call(env, located(notices=True)) == ([{"value": str(folder)}], "")
    assert fetched(fake.asked()) == sorted(NOTICES)


def test_a_build_of_a_hub_name_has_its_licence_and_notices(fake: FakeHub, tiny_path: Path, tmp_path: Path) -> None:
    held = {path.name: path.read_bytes() for path in tiny_path.iterdir()}
    fake.repositories[NAME] = Repository({FIRST: held | NOTICES | NEVER})
    words = ["convert", NAME, str(tmp_path / "half"), "--dtype", "bfloat16"]
    process = start("from voicechat_core.cli import main; main()", *words, env=environment(fake.url, tmp_path))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    found = {str(path.relative_to(tmp_path / "half")) for path in (tmp_path / "half").rglob("*") if path.is_file()}
    assert found == {*held, *NOTICES}
    assert (tmp_path / "half" / "LICENSE").read_bytes() == b"l"


def test_a_branch_that_moves_between_the_steps(fake: FakeHub, tmp_path: Path) -> None:
    """One commit for all; the next call takes the new one, and of it only the files that changed."""
    commits = {FIRST: FILES, SECOND: FILES | {"tokenizer.json": b"{ }"}}
    fake.repositories[NAME] = Repository(commits, moves_to=SECOND, large_files_elsewhere=True)
    results, said = call(environment(fake.url, tmp_path), located(), located())
    assert [step["value"] for step in results] == [str(snapshot(tmp_path)), str(snapshot(tmp_path, commit=SECOND))]
    requests = fake.asked()
    second = requests.index(f"GET /api/models/{NAME}", 1)
    assert fetched(requests[:second]) == [*SMALL, *SHARDS]
    assert [request.split("/")[3] for request in requests[:second] if "GET" in request][-2:] == ["elsewhere"] * 2
    assert fetched(requests[second:], commit=SECOND) == ["tokenizer.json"]
    assert (snapshot(tmp_path) / "tokenizer.json").read_bytes() == b"{}"
    assert (snapshot(tmp_path, commit=SECOND) / "tokenizer.json").read_bytes() == b"{ }"
    assert said == f"{NAME}: downloading 2 files, 0.12 MB\n"  # once: the second time they were only linked


def test_which_weights(fake: FakeHub, tmp_path: Path) -> None:
    """Without an index every model*.safetensors; from an index plain names only; none at all is refused."""
    both = {"config.json": CONFIG, "tokenizer.json": b"{}"}
    single = both | {"model.safetensors": b"1", "model-more.safetensors": b"2"} | NEVER
    del single["model-00003-of-00002.safetensors"]  # it would promise two others
    names = ["a.safetensors", "../b.safetensors", "c/d.safetensors", "", "..", "e.bin", 5, "\\f.safetensors"]
    index = json.dumps({"weight_map": {f"w{n}": name for n, name in enumerate(names)}}).encode()
    outside = both | {"model.safetensors.index.json": index, "a.safetensors": b"3", "e.bin": b"4"}
    broken = both | {"model.safetensors.index.json": b"{", "model.safetensors": b"5"}
    lost = {name: content for name, content in FILES.items() if name != "model-00002-of-00002.safetensors"}
    repositories = {"o/single": single, "o/outside": outside, "o/broken": broken, "o/lost": lost, "o/none": SMALL}
    for name, files in repositories.items():
        fake.repositories[name] = Repository({FIRST: files})
    results, _ = call(environment(fake.url, tmp_path), *map(located, repositories))
    requests = fake.asked()
    got = {name: fetched([r for r in requests if f"/{name}/" in r], name) for name in repositories}
    assert got["o/single"] == ["config.json", "tokenizer.json", "model-more.safetensors", "model.safetensors"]
    small = ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert got["o/outside"] == [*small, "a.safetensors"]
    assert got["o/broken"] == small  # the loader says what is wrong
    assert got["o/lost"] == got["o/none"] == [*SMALL]
    lacks = "not a whole checkpoint: the repository has no"
    assert [step.get("error") for step in results] == [
        None, None, None, f"o/lost: {lacks} model-00002-of-00002.safetensors",
        f"o/none: {lacks} model-00001-of-00002.safetensors, model-00002-of-00002.safetensors",
    ]  # fmt: skip


def test_a_lost_connection_is_taken_up_again(fake: FakeHub, tmp_path: Path) -> None:
    shard, large = "model-00001-of-00002.safetensors", bytes(range(251)) * 88_000  # the library writes 10 MiB at a time
    fake.repositories[NAME] = Repository({FIRST: FILES | {shard: large}}, drops={shard: 1})
    elsewhere = tmp_path / "elsewhere" / "hub"
    results, said = call(environment(fake.url, tmp_path, HF_HUB_CACHE=str(elsewhere)), located(), ("cached", [], {}))
    folder = snapshot(elsewhere.parent)
    assert results[0] == {"value": str(folder)}
    assert f"path={folder!r}" in results[1]["value"]
    assert fetched(fake.asked())[-3:] == [shard, f"{shard} bytes={10 << 20}-", "model-00002-of-00002.safetensors"]
    assert (folder / shard).read_bytes() == large
    assert said == f"{NAME}: downloading 2 files, 22.15 MB\n"


def test_a_terminal_sees_bars_only_for_a_download(fake: FakeHub, tmp_path: Path) -> None:
    fake.repositories[NAME] = Repository({FIRST: FILES})
    seen = [on_a_terminal(environment(fake.url, tmp_path)) for _ in range(2)]
    assert f"{NAME}: downloading 2 files, 0.12 MB" in seen[0]
    assert seen[0].count("100%") >= 2
    assert "60.0k/60.0k" in seen[0]
    assert "config.json" not in seen[0]
    assert "logged in" not in seen[0]
    assert seen[1] == ""


def on_a_terminal(env: dict[str, str]) -> str:
    """What a call shows on stderr where that is a terminal."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 120))
    process = start(RUN, json.dumps([located()]), env=env, stderr=slave)
    os.close(slave)
    shown = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            chunk = b""
        if not chunk:
            break
        shown += chunk
    os.close(master)
    process.communicate(timeout=60)
    assert process.returncode == 0
    return shown.decode()


def test_an_interrupt_ends_the_download_at_once(fake: FakeHub, tmp_path: Path) -> None:
    shard = "model-00001-of-00002.safetensors"
    fake.repositories[NAME] = Repository({FIRST: FILES}, stalls=shard)
    process = start(RUN, json.dumps([located()]), env=environment(fake.url, tmp_path))
    assert fake.stalled.wait(30)
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=8)
    finally:
        process.kill()
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert "HubError" not in said
    assert not (snapshot(tmp_path) / shard).exists()
    assert list(tmp_path.rglob("*.incomplete")) == []


# ---- refusals

REFUSING = {
    "o/unauthorised": Repository({}, answer=(401, {})),
    "o/login": Repository({}, answer=(401, {"X-Error-Message": "Invalid credentials in Authorization header"})),
    "o/gated": Repository({}, answer=(403, {"X-Error-Code": "GatedRepo"})),
    "o/gated-files": Repository({FIRST: FILES}, file_answer=(403, {"X-Error-Code": "GatedRepo"})),
    "o/forbidden": Repository({FIRST: FILES}, file_answer=(403, {"X-Error-Message": "not yours"})),
    "o/busy": Repository({}, answer=(503, {"X-Error-Message": "back soon"})),
    "o/portal": Repository({FIRST: FILES}, body=b"<html>log in to this hotel</html>"),
    "o/other": Repository({FIRST: {"README.md": b"no checkpoint"}}),
    "o/llama": Repository({FIRST: FILES | {"config.json": b'{"model_type": "llama"}'}}),
    "o/failing": Repository({FIRST: FILES}, drops={"model-00001-of-00002.safetensors": 1}, then_fails=True),
}


def test_refusals(fake: FakeHub, tmp_path: Path) -> None:
    """One line each that names the repository and says what to do; the hub's error is the cause."""
    fake.repositories |= REFUSING
    results, said = call(environment(fake.url, tmp_path), *map(located, ["o/missing", *REFUSING]))
    errors = dict(zip(["missing", *(name.removeprefix("o/") for name in REFUSING)], results, strict=True))
    nowhere = "no such repository on the hub, or a private one"
    none = "; there is no cached copy, and no local directory of that name"
    login, page = "log in with `hf auth login`", f"accept its licence at {fake.url}/o"
    invalid = "the hub does not accept this login (Invalid credentials in Authorization header)"
    assert {name: step["error"].removeprefix(f"o/{name}: ") for name, step in errors.items()} == {
        "missing": f"{nowhere}: if it is yours, {login}{none}",
        "unauthorised": f"{nowhere}: if it is yours, {login}{none}",
        "login": f"{invalid}: log in again with `hf auth login`{none}",
        "gated": f"gated: {page}/gated, then {login}{none}",
        "gated-files": f"gated: {page}/gated-files, then {login}",
        "forbidden": "the hub answered 403 (not yours): log in with `hf auth login` as somebody who may read it",
        "busy": f"the hub answered 503 (back soon); try again later{none}",
        "portal": f"it could not be fetched (JSONDecodeError: Expecting value: line 1 column 1 (char 0)){none}",
        "other": "not a checkpoint: the repository has no config.json",
        "llama": "model_type is 'llama'; only 'nemotron_voicechat' is supported",
        "failing": "the hub answered 500; try again later",
    }
    assert all(step["error"].startswith("o/") and "\n" not in step["error"] for step in results)
    causes = {name: step["cause"] for name, step in errors.items()}
    assert (causes["missing"], causes["gated-files"]) == ("RepositoryNotFoundError", "GatedRepoError")
    assert (causes["busy"], causes["failing"], causes["llama"]) == ("HfHubHTTPError", "HfHubHTTPError", "ConfigError")
    assert said == "o/failing: downloading 2 files, 0.12 MB\n"
    assert not any("safetensors" in file and "index" not in file for file in fetched_of(fake, "o/llama"))
    assert fetched_of(fake, "o/other") == []
    failing = snapshot(tmp_path, "o/failing")
    assert [path.name for path in failing.glob("*.safetensors")] == []
    assert not (failing.parents[1] / "refs" / "main").exists()


def fetched_of(fake: FakeHub, name: str) -> list[str]:
    return fetched([request for request in fake.requests if f"/{name}/" in request], name)


def test_no_network(fake: FakeHub, tmp_path: Path) -> None:
    """A whole copy is used, and said to be if that was not asked for; otherwise it is said what is missing, and why."""
    fake.repositories |= {NAME: Repository({FIRST: FILES}), "o/partial": Repository({FIRST: FILES})}
    online = environment(fake.url, tmp_path)
    call(online, located(), located("o/partial"))
    for path in snapshot(tmp_path, "o/partial").glob("*.safetensors"):
        path.resolve().unlink()
    fake.asked()
    steps = [located(), located("o/partial"), located("o/none")]
    lost = "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors"
    for env, why, cause in (
        (online | {"HF_HUB_OFFLINE": "1"}, r"offline mode is on \(HF_HUB_OFFLINE\)", "OfflineModeIsEnabled"),
        (
            environment("http://127.0.0.1:1", tmp_path),
            r"the hub cannot be reached \(ConnectError: .*\)",
            "ConnectError",
        ),
    ):
        (whole, partial, none), said = call(env, *steps)
        assert whole == {"value": str(snapshot(tmp_path))}
        told = f"{NAME}: {why}; the cached copy is used\n" if cause == "ConnectError" else ""
        assert re.fullmatch(told, said)
        assert re.fullmatch(
            f"o/partial: {why}; the cached copy has no {lost}, and no local directory of that name", partial["error"]
        )
        assert re.fullmatch(
            f"o/none: {why}; there is no cached copy, and no local directory of that name", none["error"]
        )
        assert partial["cause"] == none["cause"] == cause
    assert fake.asked() == []


def test_a_hub_that_does_not_answer(fake: FakeHub, tmp_path: Path) -> None:
    fake.repositories["o/silent"] = Repository({}, silent=True)
    ((step,), _) = call(environment(fake.url, tmp_path, SECONDS="0.3"), located("o/silent"))
    assert step["error"].startswith("o/silent: the hub cannot be reached (ReadTimeout: ")


def test_the_hub_is_given_ten_seconds_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own default is for ever."""
    asked: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, name, **how: asked.append((name, how)))
    hub._ask("o/n")
    assert hub.REQUEST_SECONDS == 10
    monkeypatch.setattr(hub, "REQUEST_SECONDS", 0.3)
    hub._ask("o/n")
    assert asked == [("o/n", {"files_metadata": True, "timeout": seconds}) for seconds in (10, 0.3)]


@pytest.mark.parametrize(("level", "inside"), [(logging.WARNING, logging.ERROR), (logging.INFO, logging.INFO)])
def test_warnings_are_not_shown_unless_asked_for(level: int, inside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("huggingface_hub")
    monkeypatch.setattr(logger, "level", level)
    with quiet():
        assert logger.level == inside
        warnings.warn("the disk is nearly full", stacklevel=1)  # an error in these tests, where it is let through
    assert logger.level == level


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full: {cache} cannot take the download"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full: {cache} cannot take the download"),
        (RuntimeError("Xet: No space left on device"), "the disk is full: {cache} cannot take the download"),
        (
            PermissionError(errno.EACCES, "denied", "/c"),
            "it could not be fetched (PermissionError: [Errno 13] denied: '/c')",
        ),
        (RuntimeError("two\nlines"), "it could not be fetched (RuntimeError: two lines)"),
    ],
)
def test_failures_of_the_disk_and_others(error: Exception, said: str, cache: Path) -> None:
    assert explained("o/n", error) == f"o/n: {said.format(cache=cache)}"
