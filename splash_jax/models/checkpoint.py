"""Safetensors checkpoints: every file is checked whole before a tensor of it is loaded.

Only headers are read when a checkpoint opens, so a damaged shard is found in milliseconds and not after
minutes of loading. Tensors are then read through memory maps: a slice costs its own bytes. Files that contradict
each other are refused where they leave two answers, and warned of where they leave one.
"""

import json
import logging
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import ml_dtypes
import numpy as np

from splash_jax.errors import CheckpointError

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SUPPORTED = tuple(np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16))

_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
}
_MAX_HEADER = 100_000_000  # the safetensors format's own limit
_AGAIN = "Download or copy it again."
_LISTED = 8
_PIECE = 1 << 22  # numbers of two tensors that are compared at a time

log = logging.getLogger("splash_jax")


@final
@dataclass(frozen=True, slots=True)
class _Tensor:
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # byte offset in the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@final
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of one checkpoint directory, none of them loaded. Unknown names raise CheckpointError."""

    path: Path
    _tensors: Mapping[str, _Tensor]
    _sizes: Mapping[Path, int]  # bytes of every file when it was checked

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Read and check the header of every weight file in the directory `path`.

        Takes `model.safetensors`, else `model.safetensors.index.json` and the shards it names, else the
        only `*.safetensors` file. The tensors are all that these files hold, whether the index names them or not.
        One that several shards hold is read in each, and refused unless its numbers are the same.
        """
        try:
            files, index = _weight_files(path)
            unread = sorted(file.name for file in path.glob("[!.]*.safetensors") if file not in files)
        except OSError as error:
            raise _unreadable(path, error) from None
        if unread:
            log.warning("%s: not read, since no index names them: %s.", path, some(unread))
        headers = {file: _read_header(file) for file in files}
        for name, shard in index.weights.items():
            if name not in headers[path / shard]:
                raise CheckpointError(f"{path / shard}: tensor {name!r} is not in it, but {INDEX} says so. {_AGAIN}")
        tensors: dict[str, _Tensor] = {}
        for header in headers.values():
            for name, tensor in header.items():
                first = tensors.setdefault(name, tensor)
                if first is not tensor and not _same(first, tensor):
                    raise CheckpointError(
                        f"{path}: tensor {name!r} is one thing in {first.file.name} and another in {tensor.file.name}."
                        " Remove the wrong one, or download both files again."
                    )
        checkpoint = cls(path, tensors, {file: file.stat().st_size for file in files})
        named = sum(tensors[name].nbytes for name in index.weights)
        if index.total_size not in (None, named, checkpoint.nbytes):
            log.warning("%s: total_size is %s, and the tensors take %d bytes.", path / INDEX, index.total_size, named)
        return checkpoint

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files, in order."""
        return tuple(self._sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together, as stored."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def names(self) -> tuple[str, ...]:
        """All tensor names, sorted."""
        return tuple(sorted(self._tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def dtype(self, name: str) -> np.dtype:
        """As stored; bfloat16 and the float8 kinds are those of ml_dtypes."""
        return self._find(name).dtype

    def file_of(self, name: str) -> Path:
        return self._find(name).file

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors hold the same numbers: read a piece at a time, until they differ."""
        return _same(self._find(name), self._find(other))

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """A copy of the tensor, or of `tensor[index]`, in its stored dtype.

        Only pages that the slice touches are read from disk: a slice of the first dimension costs its own
        bytes. Raises CheckpointError when the file has changed size since it was checked.
        """
        tensor = self._find(name)
        size, real = self._sizes[tensor.file], _size(tensor.file)
        if real != size:
            raise CheckpointError(
                f"{tensor.file}: it had {size} bytes when it was checked and has {real} now."
                " Leave the files alone while they load, then open the checkpoint again."
            )
        if not tensor.nbytes:
            return np.empty(tensor.shape, tensor.dtype)[index or ...]
        stored = np.memmap(tensor.file, tensor.dtype, mode="r", offset=tensor.start, shape=tensor.shape)
        return np.array(stored[index or ...])

    def check(self, expected: Mapping[str, tuple[int, ...]], ignore: Callable[[str], bool]) -> None:
        """Compare with the tensors a model needs; `ignore(name)` is true for names it may leave unread.

        Raises one CheckpointError that lists what is missing, unexpected, misshapen or of another dtype
        than float32, bfloat16 and float16.
        """
        here = {name: self._tensors[name] for name in expected if name in self._tensors}
        supported = ", ".join(map(str, SUPPORTED))
        faults = {
            "missing": sorted(expected.keys() - here.keys()),
            "unexpected": sorted(name for name in self._tensors if name not in expected and not ignore(name)),
            "misshapen": [
                f"{name} has {t.shape}, expected {tuple(expected[name])}"
                for name, t in sorted(here.items())
                if t.shape != tuple(expected[name])
            ],
            f"of an unsupported dtype (supported: {supported})": [
                f"{name} is {t.dtype}" for name, t in sorted(here.items()) if t.dtype not in SUPPORTED
            ],
        }
        lines = [f"  {len(names)} {what}: {some(names)}" for what, names in faults.items() if names]
        if lines:
            raise CheckpointError(
                f"the weights in {self.path} do not fit config.json:\n" + "\n".join(lines) + "\n"
                "Check that config.json and the weights belong together and that all files were copied."
            )

    def _find(self, name: str) -> _Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"checkpoint {self.path} has no tensor {name!r}. Ask for one of names().")
        return self._tensors[name]


def check_folder(path: Path) -> None:
    """Raise CheckpointError unless `path` is a folder with a config.json; says what to give where that shows."""
    if (path / CONFIG).exists():
        return
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(
            f"checkpoint {path} {found}. Give the folder that holds {CONFIG} and the weights; nothing is downloaded."
            ' The embedded model is splash_jax.small_model(), on the command line "small".'
        )
    snapshots = sorted(str(folder) for folder in path.glob("snapshots/*") if (folder / CONFIG).exists())
    hint = f"It is a hub's cache: give {' or '.join(snapshots)}." if snapshots else "Give the folder that holds it."
    raise CheckpointError(f"{path}: there is no {CONFIG} in it. {hint}")


def read_json(file: Path) -> dict[str, object]:
    """Parse a JSON object. Raises CheckpointError when it is missing, unreadable, damaged or no object."""
    text = _head(file, _size(file))
    if not text:
        raise CheckpointError(f"{file}: the file is empty (0 bytes), expected JSON. {_AGAIN}")
    refuse_pointer(file)
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:  # also of text that is not UTF-8
        raise CheckpointError(
            f"{file}: not valid JSON ({len(text)} bytes; {error}). Correct it, or copy it again."
        ) from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(parsed).__name__}. {_AGAIN}")
    return parsed


def refuse_pointer(file: Path) -> None:
    """Raise CheckpointError if `file` is the text that git-LFS leaves in its place, or cannot be read."""
    head = _head(file, 1024)
    if head.startswith(b"version https://git-lfs"):
        _, _, size = head.decode(errors="replace").partition("\nsize ")
        raise CheckpointError(
            f"{file}: {_size(file)} bytes, expected {size.strip() or 'more'}: it is a git-LFS pointer, not"
            " the file itself. Run `git lfs pull` in its directory, or download the file."
        )


@final
@dataclass(frozen=True, slots=True)
class _Index:
    weights: Mapping[str, str]  # which file holds which tensor
    total_size: object  # bytes of all tensors, None where it is not told


def _weight_files(path: Path) -> tuple[list[Path], _Index]:
    """The files to open, and what an index says of them; an empty one where there is none."""
    if not path.is_dir():
        found = "is not a directory" if path.exists() else "does not exist"
        raise CheckpointError(f"checkpoint {path} {found}. Give the directory that holds config.json and weights.")
    single, alone = path / SINGLE, _Index({}, None)
    if (path / INDEX).exists():
        index = _read_index(path)
        shards = sorted(set(index.weights.values()))
        missing = [shard for shard in shards if not (path / shard).exists()]
        if shards == [SINGLE] or not single.exists():
            if missing:
                raise CheckpointError(
                    f"{path}: {len(missing)} of the {len(shards)} shards that {INDEX} names are missing:"
                    f" {some(missing)}. Download or copy them."
                )
            return [path / shard for shard in shards], index
        if len(missing) < len(shards):
            raise CheckpointError(
                f"{path}: {SINGLE} is there, and so is {INDEX}, which names {some(shards)}."
                f" Keep the weights that are the model's: remove {SINGLE}, or the index and its files."
            )
        log.warning("%s: none of the files it names is there; %s is read.", path / INDEX, SINGLE)
    if single.exists():
        return [single], alone
    found = sorted(path.glob("[!.]*.safetensors"))  # macOS leaves a "._" file beside each
    if len(found) == 1:
        return found, alone
    kind = f"{len(found)} *.safetensors files but no {INDEX}" if found else "no weights"
    others = some(sorted(file.name for file in path.iterdir())) or "nothing"
    raise CheckpointError(
        f"{path}: {kind}. Looked for {SINGLE}, {INDEX} or one *.safetensors; found {others}."
        " Download the safetensors files, or convert the weights to safetensors."
    )


def _read_index(path: Path) -> _Index:
    parsed = read_json(path / INDEX)
    weight_map, about = parsed.get("weight_map"), parsed.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX}: weight_map is missing or empty. {_AGAIN}")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path / INDEX}: {shard!r} is not the name of a file beside it. {_AGAIN}")
    return _Index(weight_map, about.get("total_size") if isinstance(about, dict) else None)


def _read_header(file: Path) -> dict[str, _Tensor]:
    """Every tensor of a safetensors file whose size is exactly what its header says."""
    size = _size(file)
    refuse_pointer(file)
    if size < 8:
        raise CheckpointError(f"{file}: {size} bytes, expected at least 8: the file is cut off. {_AGAIN}")
    (length,) = struct.unpack("<Q", _head(file, 8))
    if length > _MAX_HEADER:
        raise CheckpointError(f"{file}: {size} bytes, but not of the safetensors format. {_AGAIN}")
    if 8 + length > size:
        raise CheckpointError(f"{file}: {size} bytes, expected at least {8 + length}: the file is cut off. {_AGAIN}")
    try:
        entries = json.loads(str(_head(file, 8 + length)[8:], "utf-8"))
        if not isinstance(entries, dict):
            raise ValueError(f"it holds a {type(entries).__name__}")
        entries.pop("__metadata__", None)
        spans = sorted((*entry["data_offsets"], name) for name, entry in entries.items())
        end = 0
        for start, stop, name in spans:
            if start != end or stop < start:
                raise ValueError(f"tensor {name!r} starts at byte {start}, the one before it ends at {end}")
            end = stop
        tensors = {name: _tensor(file, name, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is damaged ({size} bytes; {error}). {_AGAIN}") from None
    expected = 8 + length + end
    if size != expected:
        how = "the file is cut off" if size < expected else "something was appended"
        raise CheckpointError(f"{file}: {size} bytes, expected {expected}: {how}. {_AGAIN}")
    return tensors


def _tensor(file: Path, name: str, entry: Mapping[str, object], data: int) -> _Tensor:
    """One header entry; ValueError, TypeError or KeyError when it is not one. `data`: where tensors begin."""
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {code!r}")
    if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"tensor {name!r} has the shape {shape!r}")
    if not isinstance(offsets, list) or not all(isinstance(n, int) for n in offsets):
        raise ValueError(f"tensor {name!r} has the data_offsets {offsets!r}")
    tensor = _Tensor(file, np.dtype(_DTYPES[code]), tuple(shape), data + offsets[0])
    if tensor.nbytes != offsets[1] - offsets[0]:
        raise ValueError(f"tensor {name!r} of shape {shape} takes {tensor.nbytes} bytes, not {offsets[1] - offsets[0]}")
    return tensor


def _same(a: _Tensor, b: _Tensor) -> bool:
    """Whether two stored tensors hold the same numbers: bit for bit, or as float64 where their dtypes differ."""
    if a.shape != b.shape:
        return False
    count = math.prod(a.shape)
    for start in range(0, count, _PIECE):
        x, y = (
            np.fromfile(t.file, t.dtype, min(_PIECE, count - start), offset=t.start + start * t.dtype.itemsize)
            for t in (a, b)
        )
        if a.dtype != b.dtype:
            x, y = x.astype(np.float64), y.astype(np.float64)
        if x.tobytes() != y.tobytes():
            return False
    return True


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise _unreadable(file, error) from None


def _head(file: Path, count: int) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(count)
    except OSError as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{file}: cannot be read ({error.strerror}). Check that it exists and that you may read it.")


def some(names: Iterable[str]) -> str:
    """The first few of `names`, and how many more there are."""
    names = list(names)
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
