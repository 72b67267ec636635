"""What must work on a machine without MLX: importing the package, its errors, audio and text."""

import os
import subprocess
import sys

import pytest

BLOCK = "import sys; sys.modules['mlx'] = None\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter where importing mlx fails."""
    return subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "module",
    [
        "voicechat_core",
        "voicechat_core.audio",
        "voicechat_core.audio_files",
        "voicechat_core.audio_stream",
        "voicechat_core.catalogue",
        "voicechat_core.cli",
        "voicechat_core.events",
        "voicechat_core.framing",
        "voicechat_core.profile",
        "voicechat_core.hub",
        "voicechat_core.keys",
        "voicechat_core.quantization",
        "voicechat_core.tokenizer",
        "voicechat_core.tools",
        "voicechat_core.wire",
    ],
)
def test_imports(module: str) -> None:
    result = run(f"import {module}")
    assert (result.returncode, result.stderr) == (0, "")


def test_a_name_that_needs_mlx_says_what_to_install() -> None:
    result = run("import voicechat_core\ntry:\n  voicechat_core.load\nexcept ModuleNotFoundError as e:\n  print(e)")
    assert "voicechat-core[mlx]" in result.stdout


def test_the_command_says_it_in_one_line() -> None:
    code = "from voicechat_core import cli\nsys.argv = ['voicechat', 'synthesize', 'nowhere']\ncli.main()"
    result = run(code)
    assert result.returncode == 1
    assert result.stderr.startswith("voicechat: MLX is not installed")
    assert len(result.stderr.splitlines()) == 1


def test_what_is_published_can_be_listed() -> None:
    result = run("from voicechat_core import cli\nsys.argv = ['voicechat', 'list']\ncli.main()")
    assert (result.returncode, result.stderr) == (0, "")
    assert "NemotronLabs-VoiceChat-11B-4bit" in result.stdout


def test_exported_names() -> None:
    import voicechat_core

    for name in voicechat_core.__all__:
        assert getattr(voicechat_core, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        voicechat_core.nothing  # noqa: B018


@pytest.mark.parametrize(("before", "after"), [(None, "0"), ("1", "1")])
def test_float32_means_float32_unless_the_user_says_otherwise(before: str | None, after: str) -> None:
    """MLX's CUDA backend reads this variable at its first product."""
    environment = {key: value for key, value in os.environ.items() if key != "MLX_ENABLE_TF32"}
    environment |= {} if before is None else {"MLX_ENABLE_TF32": before}
    code = "import os, voicechat_core.voicechat; print(os.environ['MLX_ENABLE_TF32'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == after
