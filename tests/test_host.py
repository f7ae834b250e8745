"""What a process may use: read from the files of control groups, of both versions, and from `ulimit`."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from splash_jax import host

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
V1 = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A machine of 64 GiB and 16 processors whose files are under a folder; `fake(path, text)` makes one."""
    monkeypatch.setattr(host, "_physical", lambda: 64 * GIB)
    monkeypatch.setattr(host, "_rlimit", lambda name: [])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))

    def make(path: str, text: str) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path

    make("proc/self/status", "Name:\tpython\nVmSize:\t 4194304 kB\nRssAnon:\t 1048576 kB\nThreads:\t3\n")
    return make


def test_a_machine_without_groups(fake, tmp_path):
    assert host.memory(tmp_path) == host.Room(limit=64 * GIB, used=GIB, whose="this machine")
    assert host.memory(tmp_path).left == 63 * GIB
    assert host.processors(tmp_path) == 16
    assert host.threads(tmp_path).limit == sys.maxsize


def test_version_2_takes_the_least_of_a_group_and_those_above_it(fake):
    fake("proc/self/cgroup", "0::/a/b/c\n")
    fake("proc/self/mountinfo", "30 1 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n")
    for group, most in (("a/b/c", "max"), ("a/b", str(2 * GIB)), ("a", str(8 * GIB))):
        fake(f"sys/fs/cgroup/{group}/memory.max", f"{most}\n")
    fake("sys/fs/cgroup/a/b/cpu.max", "250000 100000\n")
    fake("sys/fs/cgroup/a/b/c/cpu.max", "max 100000\n")
    fake("sys/fs/cgroup/a/b/c/pids.max", "100\n")
    root = fake("sys/fs/cgroup/a/b/c/pids.current", "40\n")
    room = host.memory(root)
    assert (room.limit, room.used) == (2 * GIB, GIB) and room.whose == f"memory.max of {root}/sys/fs/cgroup/a/b"
    assert host.processors(root) == 3
    assert (host.threads(root).limit, host.threads(root).used) == (63, 3)


def test_version_1_without_a_limit_and_with_one(fake):
    fake("proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/\n0::/\n")
    mounts = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    mounts += "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    fake("proc/self/mountinfo", mounts + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n")
    root = fake("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n")
    fake("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "-1\n")
    fake("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n")
    assert host.memory(root).whose == "this machine" and host.processors(root) == 16
    fake("sys/fs/cgroup/memory/job/memory.limit_in_bytes", f"{3 * GIB}\n")
    fake("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "50000\n")
    assert host.memory(root).limit == 3 * GIB and host.processors(root) == 1


@pytest.mark.parametrize(("own", "top"), [("/docker/1f", "/docker/1f"), ("/", "/"), ("/../..", "/"), ("/x", "/y")])
def test_a_container_sees_its_group_at_the_mount(fake, own, top):
    fake("proc/self/cgroup", f"4:memory:{own}\n")
    fake("proc/self/mountinfo", f"35 31 0:32 {top} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n")
    root = fake("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{GIB + 5}\n")
    assert host.memory(root) == host.Room(
        limit=GIB + 5, used=GIB, whose=f"memory.limit_in_bytes of {root}/sys/fs/cgroup/memory"
    )
    assert host.memory(root).left == 5


def test_ulimits_count_all_that_is_mapped(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_rlimit", lambda name: [6 * GIB] if name == "RLIMIT_AS" else [])
    assert host.memory(tmp_path) == host.Room(limit=6 * GIB, used=4 * GIB, whose="ulimit -v")
    monkeypatch.setattr(host, "_rlimit", lambda name: [30])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert host.threads(tmp_path) == host.Room(limit=30, used=3, whose="ulimit -u")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert host.threads(tmp_path).limit == sys.maxsize


BUILD = """
from splash_jax import LLM, small_model
llm = LLM(small_model(), num_devices=4, device_memory_bytes=1 << 30, layouts=("tp",), compile_ahead=False,
          progress=False, max_num_seqs=1, skip_tokenizer_init=True)
"""


def build(before: str) -> str:
    """What building an engine of 4 GiB prints on stderr in a shell that has done `before`."""
    command = ["bash", "-c", f'{before} exec "$0" -c "$1"', sys.executable, BUILD]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "32"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr[-2000:]  # a Python error, no signal
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(("what", "size"), [("v", 3_000_000), ("d", 2_500_000)])
def test_an_engine_larger_than_its_shell_allows_is_refused(what, size):
    told = build(f"ulimit -{what} {size};")
    assert "4 CPU devices of" in told and f"left: {size * 1024} by ulimit -{what}, less" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("controller", "file", "value", "words"),
    [
        ("memory", "memory.limit_in_bytes", 1_610_612_736, "left: 1610612736 by memory.limit_in_bytes of"),
        ("pids", "pids.max", 60, "XLA starts about 80 threads (NPROC is 32), this process may have 60 by pids.max"),
    ],
)
def test_an_engine_in_a_group_that_is_too_small_is_refused_not_killed(controller, file, value, words):
    group = V1.with_name(controller) / f"splash_test_{os.getpid()}"
    try:
        group.mkdir()
        (group / file).write_text(str(value))
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made here: {error}")
    try:
        assert words in build(f"echo $$ > {group}/cgroup.procs;")
    finally:
        time.sleep(1)
        group.rmdir()
