"""The only door: every check and every measurement is a session here. ``nox -l`` lists them."""

import shutil
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.sessions = ["tests", "client", "e2e", "parity"]
nox.options.default_venv_backend = "virtualenv"

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml("pyproject.toml")
PACKAGES = ("voicechat-core", "voicechat-server", "voicechat-client")
SUPPORTED = ("3.11", "3.12", "3.13")
SLOWER = ("--ignore=tests/parity", "--ignore=tests/property", "-m", "not slow")  # of parity, e2e and client
# Two processes take file by file, in their order: the tests of a file share its server. ``-- -n 0`` for one process.
PYTEST = ("pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
SPOKEN = ROOT / "tests" / "data" / "spoken.wav"
QUESTION = ROOT / "tests" / "data" / "small" / "plus_awb.wav"


def group(name: str) -> list[str]:
    """A dependency group of the workspace."""
    return nox.project.dependency_groups(PYPROJECT, name)


def install_packages(session: nox.Session, *extra: str, mlx: str = "mlx") -> None:
    """Our three packages, editable, with MLX (``cuda``: that build of it); and whatever else the session needs."""
    paths = [f"./packages/{name}" for name in PACKAGES]
    editable = [word for path in paths for word in ("-e", f"{path}[{mlx}]" if path.endswith("core") else path)]
    session.install(*editable, *extra)


@nox.session
def tests(session: nox.Session) -> None:
    """The fast suite: no weights, no network, no NVIDIA code; ``client`` has the client's."""
    install_packages(session, *group("test"))
    session.run(*PYTEST, "tests", *SLOWER, "--ignore=tests/e2e", "--ignore=tests/client", *session.posargs)


@nox.session
def training(session: nox.Session) -> None:
    """All of training's tests, those that run whole commands too; ``e2e`` runs the longest of them."""
    install_packages(session, *group("test"))
    session.run(*PYTEST, "tests/training", *session.posargs)


@nox.session
def parity(session: nox.Session) -> None:
    """NVIDIA's goldens against every network and the live session, mutations that must be seen, any chunk sizes."""
    install_packages(session, *group("test"))
    session.run(*PYTEST, "tests/parity", "tests/property", *session.posargs)
    for folder in sorted((ROOT / "golden" / "fixtures").iterdir()):
        session.run("voicechat", "verify", str(folder))


def small_checkpoint(session: nox.Session) -> Path:
    """A tiny one with random weights."""
    checkpoint = Path(session.create_tmp()) / "tiny"
    shutil.rmtree(checkpoint, ignore_errors=True)
    session.run("voicechat", "synthesize", str(checkpoint), "--seed", "0")
    return checkpoint


def send(session: nox.Session, recording: Path, checkpoint: str, *words: str) -> None:
    """A server process on a free port answers a spoken WAV that the client's command sends."""
    command = [str(Path(session.bin) / "voicechat-server"), "-m", checkpoint, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = next((line.split("ready on ")[1].strip() for line in server.stderr or () if "ready on" in line), "")
            session.run("voicechat-client", "send", str(recording), "--url", url, "--pace", "fast", *words)
        finally:
            server.terminate()
            server.communicate()
    if server.returncode:
        session.error(f"the server ended with {server.returncode}")


@nox.session
def e2e(session: nox.Session) -> None:
    """WAVs through a real server by the client's command: every pace, chunk, form of file and fault; a training."""
    install_packages(session, *group("test"))
    session.run(*PYTEST, "tests/e2e", "tests/training/test_make.py", *session.posargs)


@nox.session
def client(session: nox.Session) -> None:
    """The client's own tests, those of ten minutes too, where there is neither MLX nor the server."""
    session.install("-e", "./packages/voicechat-core", "-e", "./packages/voicechat-client", *group("test"))
    for module in ("mlx", "voicechat_server"):
        session.run("python", "-c", f"import {module}", success_codes=[1], silent=True)
    session.run(*PYTEST, "tests/client", "--confcutdir=tests/client", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """The three packages as wheels, installed from those alone: the server answers the client."""
    built = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(built, ignore_errors=True)
    session.run("pip", "wheel", "-q", "--no-deps", "-w", str(built), *(f"./packages/{name}" for name in PACKAGES))
    files = sorted(built.iterdir())
    session.install(*(f"{file}[mlx]" if "core" in file.name else str(file) for file in files))
    session.log(", ".join(file.name for file in files))
    session.run("pip", "check")
    checkpoint = small_checkpoint(session)
    send(session, SPOKEN, str(checkpoint), "--out", str(built / "answer.wav"), "--check", str(checkpoint))


@nox.session
def demo(session: nox.Session) -> None:
    """A server with the small checkpoint answers a question by a voice that it never heard: response.wav."""
    install_packages(session)
    send(session, QUESTION, "voicechat-small", "--out", str(ROOT / "response.wav"))


def install_training(session: nox.Session, mlx: str = "mlx") -> None:
    """Voices and judge, each file by its hash, and our packages. Flite and eSpeak NG are the system's."""
    session.install("--require-hashes", "-r", "training/requirements.txt")
    install_packages(session, mlx=mlx)


@nox.session
def train(session: nox.Session) -> None:
    """The small checkpoint from nothing but packages, on a GPU: ``-- STEP ...`` for some steps, ``-- --smoke``."""
    install_training(session, mlx="cuda" if shutil.which("nvidia-smi") else "mlx")
    session.run("python", "-m", "training.make", *session.posargs)


@nox.session
def evaluate(session: nox.Session) -> None:
    """The table of the model card, of the checkpoint that comes with the core: ``-- --limit N`` for a short run."""
    install_training(session)
    session.run("python", "-m", "training.evaluate", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Our session beside the peer's, in turns on a synthetic checkpoint: see tests/bench/README.md for options."""
    mlx = "cuda" if shutil.which("nvidia-smi") else "mlx"
    install_packages(session, mlx=mlx)
    ours = session.run("python", "-m", "pip", "freeze", silent=True) or ""
    # Both sides compute with the same MLX, and with what it brings on a GPU.
    same = [line for line in ours.splitlines() if line.startswith(("mlx", "nvidia-"))]
    python = peer_environment(session, same)
    session.run("python", "-m", "tests.bench.compare", "--peer-python", str(python), *session.posargs)


def peer_environment(session: nox.Session, mlx: list[str]) -> Path:
    """An environment of the peer's own, from PyPI: its interpreter."""
    folder = Path(session.create_tmp()).absolute() / "peer"
    python = folder / "bin" / "python"
    if not python.exists():
        session.run("python", "-m", "venv", str(folder))
    words = ["pip", "install", "-q", "--no-deps", "-r", "tests/bench/peer.txt", *mlx]
    session.run(str(python), "-m", *words, external=True)
    return python


@nox.session
def bench_context(session: nox.Session) -> None:
    """Five minutes of a live session on a small checkpoint, with all of the history and with a bounded one."""
    install_packages(session)
    checkpoint = small_checkpoint(session)
    for bound in ([], ["--tts-context-frames", "250"]):
        session.run("voicechat", "bench", "-m", str(checkpoint), "--minutes", "5", *bound, *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Sessions with random faults on a real server, which must end as it began: 30 minutes, or ``-- --minutes N``."""
    install_packages(session, *group("test"))
    session.run("python", "-m", "tests.soak", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, formatting, and the directions in which modules may import each other."""
    install_packages(session, *group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """A strict type check of the packages and of training/."""
    install_packages(session, *group("types"))
    session.run("mypy", *(f"packages/{name}/src" for name in PACKAGES), "training")


def _works(version: str) -> bool:
    """Whether this interpreter is here and runs: a version manager's shim may be on the path and do neither."""
    command = [f"python{version}", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return False
    return found.stdout.strip() == version


OTHERS = [v for v in SUPPORTED if v != f"{sys.version_info[0]}.{sys.version_info[1]}" and _works(v)]


@nox.session(python=OTHERS or False)
def compat(session: nox.Session) -> None:
    """The fast suite on each other supported Python that is present, and the quicker WAVs through a real server."""
    if not OTHERS:
        session.skip(f"no other Python of {', '.join(SUPPORTED)} is present")
    install_packages(session, *group("test"))
    session.run(*PYTEST, "tests", *SLOWER, "-q")


# MLX's oldest macOS; and the system's certificates, which pip uses and uv otherwise does not.
RESOLVE_ENV = {"MACOSX_DEPLOYMENT_TARGET": "14.0", "UV_NATIVE_TLS": "1", "UV_SYSTEM_CERTS": "1"}


@nox.session
def resolve(session: nox.Session) -> None:
    """Our packages and all that they need must resolve to wheels on the next Python, on Linux and on macOS."""
    # uv, because pip judges another platform's markers by the machine that it runs on.
    session.install("uv")
    wanted = [f"./packages/{name}" for name in PACKAGES]
    requirements = Path(session.create_tmp()) / "requirements.in"
    requirements.write_text("\n".join([f"voicechat-core[mlx] @ {(ROOT / wanted[0]).as_uri()}", *wanted[1:]]))
    # Our own packages are built here; everything else must be there as a wheel.
    options = ["-q", "--python-version", "3.14", "--only-binary", ":all:", "--no-header"]
    options += [word for name in PACKAGES for word in ("--no-binary", name)]
    for platform in ("x86_64-manylinux_2_35", "aarch64-manylinux_2_35", "aarch64-apple-darwin"):
        session.log(f"Python 3.14 on {platform}")
        target = Path(session.create_tmp()) / f"{platform}.txt"
        words = [*options, "--python-platform", platform, "-o", str(target), str(requirements)]
        session.run("uv", "pip", "compile", *words, env=RESOLVE_ENV)


@nox.session
def golden(session: nox.Session) -> None:
    """Remake the goldens (``-- small``: these) with NVIDIA's own code and compare; ``-- remake small`` writes them."""
    session.install("torch==2.13.0")
    session.install("--no-deps", "-r", "golden/requirements.txt")
    names = [word for word in session.posargs if word != "remake"]
    mode = [] if "remake" in session.posargs else ["--check"]
    session.run("python", "golden/generate.py", *names, *mode)
