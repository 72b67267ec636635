"""What the hub's cache holds, and how it is listed."""

import json
import os
from pathlib import Path

import pytest

from tests.core.fake_hub import CONFIG, FIRST, INDEX, NAME, SECOND, SHARDS
from voicechat_core import HubError, catalogue, hub
from voicechat_core.builtin import SMALL, builtin


def put(cache: Path, name: str, files: dict[str, bytes], commit: str = FIRST) -> Path:
    """Files as the cache holds them: blobs, and links to them."""
    folder = cache / f"models--{name.replace('/', '--')}" / "snapshots" / commit
    blobs = folder.parents[1] / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        blob = blobs / f"{content[:8].hex()}{len(content)}"
        blob.write_bytes(content)
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).symlink_to(blob)
    return folder


def test_an_empty_cache_is_not_an_error(cache: Path) -> None:
    assert catalogue.cached() == ()
    cache.mkdir()
    assert catalogue.cached() == ()
    rows = catalogue.listing()["families"][0]["checkpoints"]
    assert [row["here"] for row in rows] == ["complete", "no", "no", "no"]


def test_cached(cache: Path) -> None:
    whole = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors.index.json": INDEX} | SHARDS
    size = sum(map(len, whole.values()))
    four = put(cache, NAME, whole)
    put(cache, NAME, whole, SECOND)  # the same blobs: counted once
    eight = put(cache, NAME.replace("4bit", "8bit"), {"tokenizer.json": b"{}"})
    bf16 = NAME.replace("4bit", "bf16")
    (cache / f"models--{bf16.replace('/', '--')}" / "blobs").mkdir(parents=True)
    (cache / f"models--{bf16.replace('/', '--')}" / "blobs" / "x.incomplete").write_bytes(b"12345")
    mine = put(cache, "me/mine", {key: whole[key] for key in whole if key != "model-00002-of-00002.safetensors"})
    broken = put(cache, "me/broken-index", whole | {"model.safetensors.index.json": b"["})
    no_tokenizer = put(cache, "me/no-tokenizer", {key: whole[key] for key in whole if key != "tokenizer.json"})
    put(cache, "some/llama", whole | {"config.json": b'{"model_type": "llama"}'})
    put(cache, "some/broken", whole | {"config.json": b"{"})
    (cache / "models--a--file").write_text("not a directory")
    (cache / "models--too--many--parts").mkdir()
    (cache / "models--o--empty").mkdir()
    refs = four.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(FIRST)
    os.utime(four, (1, 1))  # older, but main's
    found = {entry.name: (entry.path, entry.bytes, entry.complete) for entry in catalogue.cached()}
    assert found == {
        NAME: (four, size, True),
        NAME.replace("4bit", "8bit"): (eight, 2, False),
        bf16: (None, 5, False),
        "me/mine": (mine, size - 60_000, False),
        "me/no-tokenizer": (no_tokenizer, size - 2, False),
        "me/broken-index": (broken, size - len(INDEX) + 1, False),
    }
    (refs / "main").write_bytes(b"\xff")  # unreadable: the newest
    assert {entry.path for entry in catalogue.cached() if entry.name == NAME} == {four.parent / SECOND}
    (four.parent / SECOND / "model-00001-of-00002.safetensors").unlink()  # not whole: the one that is
    assert {entry.path for entry in catalogue.cached() if entry.name == NAME} == {four}


def test_a_listing_that_the_cache_remembers_counts(cache: Path) -> None:
    """Another tool's snapshot: its list of files says that an optional one is missing."""
    folder = put(cache, "me/mine", {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors": b"1"})
    assert [entry.complete for entry in catalogue.cached()] == [True]
    names = ("config.json", "tokenizer.json", "model.safetensors", "rnnt_tokenizer/vocab.json", "README.md")
    files = {name: {"size": 1, "blob_id": "0"} for name in names}
    trees = folder.parents[1] / "trees"
    trees.mkdir()
    (trees / f"{FIRST}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    assert [entry.complete for entry in catalogue.cached()] == [False]
    with pytest.raises(
        HubError, match=r"the cached copy has no rnnt_tokenizer/vocab\.json, and no local directory of that name$"
    ):
        hub._from_cache("me/mine", False, RuntimeError())
    put(cache, "me/mine", {"rnnt_tokenizer/vocab.json": b"[]"})
    assert hub._from_cache("me/mine", False, RuntimeError()) == folder
    with pytest.raises(HubError, match=r"the cached copy has no README\.md, and no local"):
        hub._from_cache("me/mine", True, RuntimeError())


@pytest.mark.parametrize(
    ("said", "precision"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "4-bit"),
        ({"quantization_config": {"bits": 8, "group_size": 64}}, "8-bit"),
        ({"quantization": {"bits": 6}, "quantization_config": {"bits": 8}, "dtype": "bfloat16"}, "6-bit"),
        ({"quantization_config": {"quant_method": "other"}, "dtype": "bfloat16"}, "bf16"),
        ({"quantization": {"bits": "4"}, "quantization_config": [8]}, None),
        ({"dtype": "bfloat16"}, "bf16"),
        ({"dtype": "float16"}, "fp16"),
        ({"torch_dtype": "float32"}, "fp32"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "fp16"),
        ({"dtype": "int8"}, None),
        ({}, None),
    ],
)
def test_the_precision_that_a_config_says(cache: Path, said: dict[str, object], precision: str | None) -> None:
    put(cache, "me/mine", {"config.json": json.dumps({"model_type": "nemotron_voicechat"} | said).encode()})
    rows = catalogue.listing()["families"][0]["checkpoints"]
    assert {row["name"]: row["precision"] for row in rows}["me/mine"] == precision
    (line,) = [line for line in catalogue.listing_text(catalogue.listing()).splitlines() if "me/mine" in line]
    assert line.split()[1] == (precision or "unknown")


def test_listing_and_its_table(cache: Path) -> None:
    four = put(cache, NAME, {"config.json": CONFIG})
    mine = put(cache, "me/" + "long-" * 17 + "name", {"config.json": CONFIG[:-1] + b', "x": 1}'})
    other = put(cache, "me/dense", {"config.json": b'{"model_type": "nemotron_voicechat", "dtype": "bfloat16"}'})
    data = catalogue.listing()
    assert json.loads(json.dumps(data)) == data
    (family,) = data["families"]
    rows = family.pop("checkpoints")
    assert family == {"kind": "speech", "name": "NemotronLabs VoiceChat", "model_type": "nemotron_voicechat"}
    folder = builtin(SMALL)
    assert folder is not None
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert [tuple(row.values()) for row in rows] == [
        (SMALL, "8-bit", weights, "complete", str(folder)),
        ("mlx-community/NemotronLabs-VoiceChat-11B-bf16", "bf16", 22_190_000_000, "no", None),
        ("mlx-community/NemotronLabs-VoiceChat-11B-8bit", "8-bit", 13_900_000_000, "no", None),
        (NAME, "4-bit", 9_170_000_000, "incomplete", str(four)),
        ("me/dense", "bf16", 57, "incomplete", str(other)),
        ("me/" + "long-" * 17 + "name", "4-bit", len(CONFIG) + 8, "incomplete", str(mine)),
    ]
    lines = catalogue.listing_text(catalogue.listing()).splitlines()
    assert lines == [
        "NemotronLabs VoiceChat (speech, nemotron_voicechat)",
        "  checkpoint                                     precision        size  here",
        f"  voicechat-small                                8-bit        {weights / 1e6:.2f} MB  complete",
        "  mlx-community/NemotronLabs-VoiceChat-11B-bf16  bf16         22.19 GB  no",
        "  mlx-community/NemotronLabs-VoiceChat-11B-8bit  8-bit        13.90 GB  no",
        "  mlx-community/NemotronLabs-VoiceChat-11B-4bit  4-bit         9.17 GB  incomplete",
        "  me/dense                                       bf16          0.00 MB  incomplete",
        "  me/" + "long-" * 17 + "name",
        " " * 47 + "  4-bit         0.00 MB  incomplete",
    ]
    assert max(map(len, lines)) <= 100
