"""What a process may use: the machine's, within the limits of every group that it is in."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quill.server.machine.resources import available_bytes, lower_priority, num_cores
from tests.server.process import ROOT, serve_command, wait_until
from tests.server.tiny_bundle import TinyBundle

GB = 2**30
MEMINFO = f"MemTotal: {16 * 2**20} kB\nMemAvailable:   {8 * 2**20} kB\n"


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """As a process of these groups sees it: 8 GB are available."""
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups}.items():
        write(root / name, text)
    for name, text in files.items():
        write(root / "sys/fs/cgroup" / name, text)
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def memory_2(group: str, limit: object, used: int, files: int) -> dict[str, str]:
    return {
        f"{group}/memory.max": f"{limit}\n",
        f"{group}/memory.current": f"{used}\n",
        f"{group}/memory.stat": f"anon 5\nfile {files + 7}\ninactive_file {files}\n",
    }


def memory_1(group: str, limit: int, used: int, files: int) -> dict[str, str]:
    return {
        f"memory/{group}/memory.limit_in_bytes": f"{limit}\n",
        f"memory/{group}/memory.usage_in_bytes": f"{used}\n",
        f"memory/{group}/memory.stat": f"inactive_file 1\ntotal_inactive_file {files}\n",
    }


def test_this_machine_has_memory_and_cores() -> None:
    assert 2**20 < available_bytes() < 2**50
    assert 1 <= num_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize("groups", ["", "0::/\n", "0::/system.slice/quill.service\n", "0::/..\n"])
def test_without_limits_the_machine_counts(tmp_path: Path, groups: str) -> None:
    root = machine(tmp_path, groups, memory_2("system.slice", "max", GB, 0))
    assert available_bytes(root) == 8 * GB
    assert num_cores(root) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("groups", "group"),
    [
        ("0::/\n", "."),  # a container with a view of its own
        ("0::/system.slice/quill.service\n", "system.slice/quill.service"),
        ("0::/system.slice/quill.service\n", "system.slice"),  # a group that it is in
        ("1:cpu:/x\n0::/quill\n", "unified/quill"),
    ],
)
def test_limit_of_every_group_counts(tmp_path: Path, groups: str, group: str) -> None:
    root = machine(tmp_path, groups, memory_2(group, 3 * GB // 2, GB, GB // 4))
    assert available_bytes(root) == 3 * GB // 2 - GB + GB // 4


@pytest.mark.parametrize(
    ("groups", "group"),
    [
        ("4:memory:/docker/abc\n0::/\n", "docker/abc"),
        ("4:memory:/docker/abc\n0::/\n", "docker"),
        ("4:memory:/docker/abc\n", "."),  # a container that sees only its own as the top
        ("4:hugetlb,memory:/quill\n", "quill"),
    ],
)
def test_limit_of_the_first_version_counts(tmp_path: Path, groups: str, group: str) -> None:
    root = machine(tmp_path, groups, memory_1(group, 3 * GB // 2, GB, GB // 4))
    assert available_bytes(root) == 3 * GB // 2 - GB + GB // 4


def test_smallest_of_several_limits_counts(tmp_path: Path) -> None:
    inner, outer = memory_2("a/b", 4 * GB, 0, 0), memory_2("a", 5 * GB, 3 * GB, 0)
    high = {"a/b/memory.high": f"{3 * GB}\n"}
    root = machine(tmp_path, "0::/a/b\n", inner | outer)
    assert available_bytes(root) == 2 * GB
    (root / "sys/fs/cgroup/a/memory.current").write_text("0\n")
    assert available_bytes(root) == 4 * GB
    assert available_bytes(machine(root, "0::/a/b\n", high)) == 3 * GB


def test_limit_that_is_used_up_leaves_nothing(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, "0::/a\n", memory_2("a", GB, 2 * GB, 0))) == 0


def quota_1(quota: str) -> dict[str, str]:
    return {"cpu/a/cpu.cfs_quota_us": f"{quota}\n", "cpu/a/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "100000 100000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "300000 200000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "50000 100000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "200000 100000\n"}, 2),
        ("2:cpu,cpuacct:/a\n", quota_1("100000"), 1),
        ("2:cpu,cpuacct:/a\n", quota_1("-1"), 64),
    ],
)
def test_quota_of_every_group_counts(
    tmp_path: Path, groups: str, files: dict[str, str], cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert num_cores(machine(tmp_path, groups, files)) == cores


def test_process_that_is_kept_to_one_core_has_one() -> None:
    script = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    script += "from quill.server.machine.resources import num_cores; print(num_cores())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "1\n"


def own_group(controller: str) -> Path:
    """Where Linux has this process's group."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if controller in controllers.split(","):
            return Path("/sys/fs/cgroup", controller, path.lstrip("/"))
    return Path("/sys/fs/cgroup", lines[-1][2].lstrip("/"))


def planned(bundle: Path, *before: str) -> tuple[float, int]:
    """Gigabytes of KV cache, and threads, of a real server; `before`: its command."""
    command = [*before, *serve_command(bundle, ("--precision", "fp32"))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if found := re.search(r"KV cache (\S+) GB, .* (\d+) threads", line):
                return float(found[1]), int(found[2])
            assert "Serving at" not in line, said
        raise AssertionError(said)
    finally:
        process.kill()
        process.communicate()


def test_server_plans_within_its_group(tiny_bundle: TinyBundle, tmp_path: Path) -> None:
    """A real server in a mount namespace, in which the limits are files of ours."""
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("mount namespaces can't be made here")
    write(tmp_path / "meminfo", MEMINFO)  # what others take meanwhile doesn't count
    groups = tmp_path / "groups"
    mount = f"mount --bind {tmp_path}/meminfo /proc/meminfo"
    alone = ("unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh")
    assert planned(tiny_bundle.directory, *alone)[0] == 2.0
    memory, cpu = own_group("memory"), own_group("cpu")
    limits = {
        memory / "memory.max": 3 * GB // 2,
        memory / "memory.current": GB // 10,
        memory / "memory.limit_in_bytes": 3 * GB // 2,
        memory / "memory.usage_in_bytes": GB // 10,
        cpu / "cpu.max": "100000 100000",
        cpu / "cpu.cfs_quota_us": 100_000,
        cpu / "cpu.cfs_period_us": 100_000,
    }
    for path, limit in limits.items():
        write(groups / path.relative_to("/sys/fs/cgroup"), f"{limit}\n")
    mount += f' && mount --bind {groups} /sys/fs/cgroup && exec "$@"'
    # Half of 1.4 GB, less what the model takes.
    assert planned(tiny_bundle.directory, "unshare", "-m", "sh", "-c", mount, "sh") == (0.7, 1)


def test_server_plans_within_a_real_quota(tiny_bundle: TinyBundle) -> None:
    """Made only beside groups that are the system's own: what is within another's is its own."""
    top = own_group("cpu")
    if top not in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        pytest.skip(f"this process is in somebody's group already: {top}")
    group = top / f"quill-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"groups can't be made here: {error}")
    try:
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_quota_us").write_text("100000")
        elif (group / "cpu.max").exists():
            (group / "cpu.max").write_text("100000 100000")
        else:
            pytest.skip("groups have no quotas here")
        join = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        assert planned(tiny_bundle.directory, "sh", "-c", join, "sh")[1] == 1
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is of whole processes here")
def test_only_the_thread_itself_waits_for_others() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    with ThreadPoolExecutor(1, initializer=lower_priority, initargs=(3,)) as nice:
        assert nice.submit(niceness).result() == min(19, before + 3)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(niceness).result() == before
    assert niceness() == before
