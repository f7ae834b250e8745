"""Text that people hand over, and files that they ask for."""

import gzip
import os
import stat
import threading
from pathlib import Path

import pytest

from splash_jax.errors import ConfigError
from splash_jax.files import check_target, open_text, read_text, write_csv, write_text, written
from splash_jax.models.checkpoint import read_json

MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "packed"])
@pytest.mark.parametrize("raw", [b"a\nb \n", b"a\r\nb \r\n", b"a\rb \r", MARK + b"a\nb \n"])
def test_a_byte_order_mark_and_every_end_of_line_are_no_text(tmp_path, raw, pack):
    file = tmp_path / "named.anything"
    file.write_bytes(pack(raw))
    assert read_text(file) == "a\nb \n"
    with open_text(file) as lines:
        assert list(lines) == ["a\n", "b \n"]


def test_what_only_splitlines_takes_for_an_end_of_line_is_text(tmp_path):
    line = " a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\ufeffj\t"
    (tmp_path / "a.txt").write_text(f"{line}\n", encoding="utf-8")
    with open_text(tmp_path / "a.txt") as lines:
        assert list(lines) == [f"{line}\n"]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("a".encode("utf-16"), r"a\.txt is UTF-16, as its first bytes say, not UTF-8; save it as UTF-8"),
        ("a".encode("utf-32"), "is UTF-32, as its first bytes say"),
        (gzip.compress("a".encode("utf-16")), "is UTF-16, as its first bytes say"),
        (b"caf\xe9", r"is not UTF-8 text \(byte 3\); convert it first"),
        (MARK + b"x\n" * 50_000 + b"\xff", r"is not UTF-8 text \(byte 100003\)"),
        (gzip.compress(os.urandom(99))[:-20], "is a damaged gzip file .*; copy it again"),
        (gzip.compress(b"a" * 99)[:-8] + bytes(8), "is a damaged gzip file .*; copy it again"),
    ],
)
def test_what_is_no_text_is_refused_with_the_next_step(tmp_path, raw, words):
    (tmp_path / "a.txt").write_bytes(raw)
    with pytest.raises(ConfigError, match=words), open_text(tmp_path / "a.txt") as lines:
        list(lines)
    with pytest.raises(ConfigError, match=words):
        read_text(tmp_path / "a.txt")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.txt: cannot be read: No such file"):
        read_text(tmp_path / "nowhere.txt")
    with pytest.raises(ConfigError, match=r": cannot be read: Is a directory"):
        read_text(tmp_path)


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path):
    file = tmp_path / "out.json"
    write_text(file, "old")
    file.chmod(0o640)
    with pytest.raises(ValueError, match="disk"), written(file) as made:
        made.write_text("half")
        raise ValueError("disk")
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["out.json"]
    write_text(file, "new")
    assert file.read_text() == "new" and stat.S_IMODE(file.stat().st_mode) == 0o640
    link = tmp_path / "link.json"
    link.symlink_to(file)
    write_text(link, "through the link")
    assert link.is_symlink() and file.read_text() == "through the link"
    write_csv(tmp_path / "t.csv", ("a", "b"), [{"a": 1, "b": "x,y"}, {"a": 2}])
    assert (tmp_path / "t.csv").read_text() == 'a,b\n1,"x,y"\n2,\n'
    assert sorted(os.listdir(tmp_path)) == ["link.json", "out.json", "t.csv"]


def test_a_device_is_written_in_place():
    check_target(Path("/dev/null"))
    with written(Path("/dev/null")) as made:
        assert made == Path("/dev/null")
    write_text(Path("/dev/null"), "gone")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(OSError, match="No space left"):
        write_text(Path("/dev/full"), "too much")


def test_a_target_is_tried_before_the_run_and_nothing_stays(tmp_path):
    check_target(None)
    check_target(tmp_path / "new.json")
    assert os.listdir(tmp_path) == []
    (tmp_path / "a").write_text("kept")
    check_target(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "kept"
    for path, words in (
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "no" / "a.json", "there is no folder .*no; make it first"),
        (tmp_path / "a" / "b.json", "there is no folder"),
        (tmp_path / ("n" * 300), r"may not be written \(File name too long\); choose another file"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_target(path)


def test_a_folder_that_is_gone_takes_no_file(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match=r"a\.json may not be written \(No such file or directory\)"):
        check_target(Path("a.json"))


def test_a_config_with_a_byte_order_mark_is_read_like_one_without(tmp_path):
    (tmp_path / "config.json").write_text('\ufeff{"model_type": "a\u2028b"}\r\n', encoding="utf-8")
    assert read_json(tmp_path / "config.json") == {"model_type": "a\u2028b"}


def test_a_pipe_is_written_in_place_and_not_opened_before(tmp_path: Path):
    """A named one, whose reader would leave at an end of file, and an anonymous one by its number."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    found: list[str] = []
    reader.start()
    check_target(pipe)
    write_text(pipe, "named")
    reader.join(20)
    read, write = os.pipe()
    check_target(Path(f"/dev/fd/{write}"))
    write_text(Path(f"/dev/fd/{write}"), "anonymous")
    os.close(write)
    with os.fdopen(read) as end:
        assert (found, end.read()) == (["named"], "anonymous")
