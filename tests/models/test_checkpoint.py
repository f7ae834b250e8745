"""Checkpoints: what is read is what was written, and damage is found before a tensor is loaded."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from splash_jax.errors import CheckpointError
from splash_jax.models.checkpoint import INDEX, Checkpoint, read_json

TENSORS = {
    "embed": np.arange(40, dtype=np.float32).reshape(10, 4),
    "layer.half": np.linspace(-2, 2, 6, dtype=np.float16).reshape(2, 3),
    "layer.brain": np.linspace(-3, 3, 15).astype(ml_dtypes.bfloat16).reshape(5, 3),
    "layer.none": np.zeros((0, 3), np.float32),
    "one": np.array(7, np.float32),
}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A sound `model.safetensors`, written by the safetensors library."""
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    return file


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A sound checkpoint of two shards; the second holds a tensor more, "one", than the index names."""
    names = list(TENSORS)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for shard, inside in shards.items():
        save_file({name: TENSORS[name] for name in inside}, tmp_path / shard)
    weight_map = {name: shard for shard, inside in shards.items() for name in inside if name != "one"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def write_raw(file: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    return str(caught.value)


def test_everything_read_is_what_was_written(weights: Path):
    checkpoint = Checkpoint.open(weights.parent)
    assert checkpoint.names() == tuple(sorted(TENSORS))
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    for name, tensor in TENSORS.items():
        assert (checkpoint.shape(name), checkpoint.dtype(name)) == (tensor.shape, tensor.dtype)
        assert checkpoint.file_of(name) == weights
        got = checkpoint.read(name)
        assert (got.dtype, got.tobytes()) == (tensor.dtype, tensor.tobytes())
        assert type(got) is np.ndarray


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("embed", (slice(2, 5),)),
        ("embed", (slice(None), slice(1, 3))),
        ("embed", (slice(9, 99), slice(0, 4, 2))),
        ("layer.brain", (slice(1, 2), slice(None))),
        ("layer.none", (slice(0, 0), slice(0, 2))),
        ("one", ()),
    ],
)
def test_a_slice_is_that_part_of_the_tensor(weights: Path, name: str, index: tuple[slice, ...]):
    got, want = Checkpoint.open(weights.parent).read(name, index), TENSORS[name][index]
    assert (got.shape, got.dtype, got.tobytes()) == (want.shape, want.dtype, want.tobytes())


def rewrite_index(folder: Path, **changes: object) -> None:
    (folder / INDEX).write_text(json.dumps(json.loads((folder / INDEX).read_text()) | changes))


def test_the_tensors_are_those_that_the_shards_of_an_index_hold(sharded: Path):
    checkpoint = Checkpoint.open(sharded)
    assert checkpoint.names() == tuple(sorted(TENSORS))
    assert [file.name for file in checkpoint.files] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert checkpoint.file_of("layer.brain").name == "model-00002-of-00002.safetensors"
    np.testing.assert_array_equal(checkpoint.read("embed"), TENSORS["embed"])


def test_a_tensor_that_neither_the_index_nor_the_model_knows_is_refused(sharded: Path):
    known = {name: tensor.shape for name, tensor in TENSORS.items() if name != "one"}
    with pytest.raises(CheckpointError, match="  1 unexpected: one\n"):
        Checkpoint.open(sharded).check(known, ignore=lambda name: False)
    Checkpoint.open(sharded).check(known | {"one": ()}, ignore=lambda name: False)


COPIES = {
    "same": (TENSORS["embed"], True),
    "last number": (np.where(TENSORS["embed"] == 39, np.float32(40), TENSORS["embed"]), False),
    "same in another type": (TENSORS["embed"].astype(ml_dtypes.bfloat16), True),
    "other numbers in another type": (TENSORS["embed"].astype(np.float16) + np.float16(1), False),
    "shape": (TENSORS["embed"].reshape(4, 10), False),
}


@pytest.mark.parametrize("piece", [7, 1 << 20])
@pytest.mark.parametrize("kind", COPIES)
def test_a_tensor_in_two_shards_must_be_the_same(sharded: Path, monkeypatch, kind: str, piece: int):
    monkeypatch.setattr("splash_jax.models.checkpoint._PIECE", piece)
    copy, same = COPIES[kind]
    second = sharded / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {"embed": copy}, second)
    if same:
        np.testing.assert_array_equal(Checkpoint.open(sharded).read("embed"), TENSORS["embed"])
    else:
        assert refused(sharded) == (
            f"{sharded}: tensor 'embed' is one thing in model-00001-of-00002.safetensors and another in"
            " model-00002-of-00002.safetensors. Remove the wrong one, or download both files again."
        )


def test_a_single_file_beside_the_shards_of_an_index_is_refused(sharded: Path):
    save_file(TENSORS, sharded / "model.safetensors")
    assert refused(sharded) == (
        f"{sharded}: model.safetensors is there, and so is {INDEX}, which names model-00001-of-00002.safetensors,"
        " model-00002-of-00002.safetensors. Keep the weights that are the model's: remove model.safetensors, or the"
        " index and its files."
    )


def test_a_single_file_beside_an_index_whose_shards_are_gone_is_read(sharded: Path, caplog):
    for shard in sharded.glob("*-of-*"):
        shard.unlink()
    save_file(TENSORS, sharded / "model.safetensors")
    assert Checkpoint.open(sharded).file_of("embed").name == "model.safetensors"
    assert caplog.messages == [f"{sharded / INDEX}: none of the files it names is there; model.safetensors is read."]


def test_an_index_of_the_single_file_is_compared_with_it(weights: Path):
    index = weights.parent / INDEX
    index.write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}))
    assert Checkpoint.open(weights.parent).names() == tuple(sorted(TENSORS))
    rewrite_index(weights.parent, weight_map={"ghost": "model.safetensors"})
    assert "tensor 'ghost' is not in it" in refused(weights.parent)


def test_files_that_nobody_reads_are_named(weights: Path, caplog):
    save_file({"a": np.zeros(1, np.float32)}, weights.with_name("adapter_model.safetensors"))
    assert Checkpoint.open(weights.parent).names() == tuple(sorted(TENSORS))
    assert caplog.messages == [f"{weights.parent}: not read, since no index names them: adapter_model.safetensors."]


def test_a_total_size_that_is_wrong_is_said(sharded: Path, caplog):
    total = sum(tensor.nbytes for tensor in TENSORS.values())
    for right in (total, total - 4, None):  # with the tensor that the index does not name, and without
        rewrite_index(sharded, metadata={"total_size": right})
        Checkpoint.open(sharded)
    rewrite_index(sharded, metadata=None)
    Checkpoint.open(sharded)
    assert not caplog.messages
    rewrite_index(sharded, metadata={"total_size": 7})
    Checkpoint.open(sharded)
    assert caplog.messages == [f"{sharded / INDEX}: total_size is 7, and the tensors take {total - 4} bytes."]


def test_a_lone_safetensors_file_of_another_name_will_do(weights: Path):
    other = weights.rename(weights.with_name("weights.safetensors"))
    assert Checkpoint.open(other.parent).file_of("embed") == other


def test_an_unknown_tensor_is_named(weights: Path):
    with pytest.raises(CheckpointError, match=r"has no tensor 'lm_head'. Ask for one of names\(\)"):
        Checkpoint.open(weights.parent).read("lm_head")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 14000000\n"

# What happens to a file of n bytes, what is said about it, and what to do.
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str, str]] = {
    "zero length": (lambda b: b"", "0 bytes, expected at least 8: the file is cut off", "copy it again"),
    "4 bytes left": (lambda b: b[:4], "4 bytes, expected at least 8: the file is cut off", "copy it again"),
    "8 bytes left": (
        lambda b: b[:8],
        "8 bytes, expected at least {header}: the file is cut off",
        "copy it again",
    ),
    "half": (
        lambda b: b[: len(b) // 2],
        "{half} bytes, expected [^:]*({header}|{n}): the file is cut off",
        "copy it again",
    ),
    "1 byte short": (lambda b: b[:-1], "{short} bytes, expected {n}: the file is cut off", "copy it again"),
    "half the data": (lambda b: b[:-100], "{cut} bytes, expected {n}: the file is cut off", "copy it again"),
    "appended": (lambda b: b + b"xyz", "{more} bytes, expected {n}: something was appended", "copy it again"),
    "pointer": (
        lambda b: LFS,
        f"{len(LFS)} bytes, expected 14000000: it is a git-LFS pointer",
        "Run `git lfs pull`",
    ),
    "short pointer": (
        lambda b: LFS[:30],
        "30 bytes, expected more: it is a git-LFS pointer",
        "Run `git lfs pull`",
    ),
    "web page": (
        lambda b: b"<!DOCTYPE html>\n" * 9,
        "144 bytes, but not of the safetensors",
        "Download or copy it",
    ),
    "header": (
        lambda b: b[:8] + b"?" + b[9:],
        r"the header is damaged \({n} bytes; Expecting",
        "copy it again",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("shard", [False, True])
def test_a_damaged_file_is_named_with_its_sizes(request, damage: str, shard: bool):
    if shard:
        file = request.getfixturevalue("sharded") / "model-00001-of-00002.safetensors"
    else:
        file = request.getfixturevalue("weights")
    sound = file.read_bytes()
    n, header = len(sound), 8 + struct.unpack("<Q", sound[:8])[0]
    change, words, advice = DAMAGE[damage]
    file.write_bytes(change(sound))
    sizes = {"n": n, "header": header, "half": n // 2, "short": n - 1, "cut": n - 100, "more": n + 3}
    message = refused(file.parent)
    assert re.match(re.escape(f"{file}: ") + words.format(**sizes), message), message
    assert advice in message


def entry(shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ([1], "the header is damaged .*it holds a list"),
        ({"a": 1}, "the header is damaged .*not subscriptable"),
        ({"a": {"dtype": "F32"}}, "the header is damaged .*data_offsets"),
        ({"a": entry(dtype="F7")}, "tensor 'a' has the unknown dtype 'F7'"),
        ({"a": entry(shape=[-2])}, r"tensor 'a' has the shape \[-2\]"),
        ({"a": entry(shape=[3])}, r"tensor 'a' of shape \[3\] takes 12 bytes, not 8"),
        ({"a": entry(offsets=[0, 8.0])}, r"tensor 'a' has the data_offsets \[0, 8.0\]"),
        ({"a": entry(offsets=[4, 8], shape=[1])}, "tensor 'a' starts at byte 4, the one before it ends at 0"),
        (
            {"a": entry(), "b": entry(offsets=[4, 12])},
            "tensor 'b' starts at byte 4, the one before it ends at 8",
        ),
        (b"\xff\xfe{}", "the header is damaged .*utf-8"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, header: object, words: str):
    write_raw(tmp_path / "model.safetensors", header, bytes(12))
    assert re.search(words, refused(tmp_path))


def test_a_file_that_changes_after_the_check_is_refused(weights: Path):
    checkpoint = Checkpoint.open(weights.parent)
    size = weights.stat().st_size
    os.truncate(weights, size - 1)
    with pytest.raises(CheckpointError, match=f"had {size} bytes when it was checked and has {size - 1} now. Leave"):
        checkpoint.read("embed")
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read \(No such file or directory\)"):
        checkpoint.read("embed")


@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_a_file_that_may_not_be_read_is_named(request, monkeypatch: pytest.MonkeyPatch, name: str):
    path = request.getfixturevalue("sharded" if name == INDEX else "weights")
    file = path / name if name == INDEX else path
    file.chmod(0)
    if os.access(file, os.R_OK):  # root reads everything: let opening fail as it does for others

        def denied(self: Path, *args: object) -> None:
            raise PermissionError(13, "Permission denied", str(self))

        monkeypatch.setattr(Path, "open", denied)
    message = refused(file.parent)
    assert message == f"{file}: cannot be read (Permission denied). Check that it exists and that you may read it."


def test_a_directory_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def denied(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_dir", denied)
    assert refused(tmp_path).startswith(f"{tmp_path}: cannot be read (Permission denied). Check")


def test_no_directory_no_weights_or_no_index(tmp_path: Path):
    assert "does not exist. Give the directory that holds config.json" in refused(tmp_path / "absent")
    assert ": no weights. Looked for model.safetensors, " in refused(tmp_path)
    assert "found nothing. Download the safetensors files, or convert" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "found pytorch_model.bin. Download" in refused(tmp_path)
    assert "is not a directory. Give the directory" in refused(tmp_path / "pytorch_model.bin")
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert f"2 *.safetensors files but no {INDEX}. Looked for" in refused(tmp_path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", r"not valid JSON \(1 bytes; .*\). Correct it, or copy it again"),
        ("", r"the file is empty \(0 bytes\), expected JSON. Download or copy it again"),
        ("[]", "expected a JSON object, found list"),
        ("{}", "weight_map is missing or empty. Download or copy it again"),
        ('{"weight_map": {}}', "weight_map is missing or empty"),
        ('{"weight_map": null}', "weight_map is missing or empty"),
        ('{"weight_map": ["a"]}', "weight_map is missing or empty"),
        ('{"weight_map": {"a": 1}}', "1 is not the name of a file beside it. Download or copy it again"),
        (
            '{"weight_map": {"a": "../model.safetensors"}}',
            "'../model.safetensors' is not the name of a file beside",
        ),
    ],
)
def test_a_bad_index_is_named(sharded: Path, index: str, words: str):
    (sharded / INDEX).write_text(index)
    assert re.match(re.escape(f"{sharded / INDEX}: ") + words, refused(sharded))


def test_an_index_that_does_not_fit_its_shards_is_refused(sharded: Path):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00002-of-00002.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    assert f"00002.safetensors: tensor 'ghost' is not in it, but {INDEX} says so. Download or" in refused(sharded)
    (sharded / "model-00001-of-00002.safetensors").unlink()
    message = refused(sharded)
    assert f"1 of the 2 shards that {INDEX} names are missing: model-00001-of-00002.safetensors. " in message
    assert message.endswith("Download or copy them.")


SHAPES = {name: tensor.shape for name, tensor in TENSORS.items()}


def test_a_fitting_model_passes_the_check(weights: Path):
    checkpoint = Checkpoint.open(weights.parent)
    checkpoint.check(SHAPES, ignore=lambda name: False)
    some = {name: shape for name, shape in SHAPES.items() if name != "one"}
    checkpoint.check(some, ignore=lambda name: name == "one")


def test_the_check_lists_everything_at_once(tmp_path: Path):
    stored = {f"extra{i}": np.zeros(1, np.float32) for i in range(9)} | {"a": np.zeros((2, 3), np.float32)}
    save_file(stored | {"b": np.zeros(2, np.float64), "c": np.zeros(2, np.int8)}, tmp_path / "model.safetensors")
    want = {"a": (3, 2), "b": (2,), "c": (2,), "gone": (1,)}
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path).check(want, ignore=lambda name: name == "extra0")
    assert str(caught.value).splitlines() == [
        f"the weights in {tmp_path} do not fit config.json:",
        "  1 missing: gone",
        "  8 unexpected: " + ", ".join(f"extra{i}" for i in range(1, 9)),
        "  1 misshapen: a has (2, 3), expected (3, 2)",
        "  2 of an unsupported dtype (supported: float32, bfloat16, float16): b is float64, c is int8",
        "Check that config.json and the weights belong together and that all files were copied.",
    ]


def test_long_lists_are_cut_and_counted(tmp_path: Path):
    save_file({f"x{i:02}": np.zeros(1, np.float32) for i in range(20)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"  20 unexpected: x00, .*, x07 and 12 more\n"):
        Checkpoint.open(tmp_path).check({}, ignore=lambda name: False)


@pytest.mark.parametrize("name", ["ds3_base", "ds3_yarn_mtp", "ds3_bf16_sharded"])
def test_oracle_checkpoints_read_as_the_safetensors_library_reads_them(oracles: Path, name: str):
    checkpoint = Checkpoint.open(oracles / name)
    want = {}
    for file in sorted((oracles / name).glob("*.safetensors")):
        want |= load_file(file)
    checkpoint.check({name: tensor.shape for name, tensor in want.items()}, ignore=lambda name: False)
    for key, tensor in want.items():
        np.testing.assert_array_equal(checkpoint.read(key), tensor)
    if name == "ds3_bf16_sharded":
        assert checkpoint.dtype("lm_head.weight") == ml_dtypes.bfloat16
        assert checkpoint.dtype("model.layers.1.mlp.gate.weight") == np.float32


def test_json_nested_without_end_is_damage(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"not valid JSON .* Correct it, or copy it again"):
        read_json(tmp_path / "config.json")
