"""Machines of every kind, from faked /proc, /sys and driver."""

import time

import pytest

from blockdraft.machine import nvml
from blockdraft.machine.cards import MIB
from blockdraft.machine.machine import may_have_gpu, read_machine
from blockdraft.machine.remedies import driver_advice
from tests.machine.fake_nvml import FakeCard, FakeNvml

GIB = 1 << 30
SPARK = FakeCard("NVIDIA GB10", (12, 1), uuid="GPU-spark")
H200 = FakeCard("NVIDIA H200", (9, 0), 143_771, 120_000, "GPU-h200")
RTX_4090 = FakeCard("NVIDIA GeForce RTX 4090", (8, 9), 24_564, 24_000, "GPU-4090")


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path):
    """A bare machine with 64 GiB, half of it free, and an NVIDIA driver."""
    meminfo = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n"
    write(tmp_path, {"proc/meminfo": meminfo, "dev/nvidiactl": "", "proc/self/cgroup": "0::/\n"})
    return tmp_path


@pytest.fixture(autouse=True)
def all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def driver(*cards, smi="", **options):
    module = FakeNvml(*cards, **options)
    return lambda visible: nvml.query(visible, load=lambda: module, run=lambda fields: smi)


def not_installed():
    raise ImportError


def no_library():
    return FakeNvml(init=12)


# ---- cards


def test_a_card_with_its_own_memory(root):
    machine = read_machine(root, driver(H200))
    (gpu,) = machine.gpus
    assert (gpu.name, gpu.capability, gpu.driver) == ("NVIDIA H200", (9, 0), "580.95.05")
    assert (gpu.memory_bytes, gpu.free_bytes) == (143_771 * MIB, 120_000 * MIB)
    assert (machine.gpu_bytes, machine.gpu_free_bytes) == (gpu.memory_bytes, gpu.free_bytes)
    assert (gpu.is_unified, gpu.card.key, machine.cuda, machine.gpu_error) == (False, "h200", "13.0", None)
    assert (machine.memory_bytes, machine.total_bytes) == (32 * GIB, 64 * GIB)


@pytest.mark.parametrize(("number", "text"), [(12080, "12.8"), (13010, "13.1"), (11040, "11.4")])
def test_the_drivers_newest_cuda(root, number, text):
    assert read_machine(root, driver(H200, cuda=number)).cuda == text


def test_a_unified_card_whose_driver_does_not_say_its_memory(root):
    (gpu,) = read_machine(root, driver(SPARK)).gpus
    assert (gpu.is_unified, gpu.memory_bytes, gpu.free_bytes) == (True, 64 * GIB, 32 * GIB)


def test_an_unknown_card_without_a_memory_of_its_own_shares_the_machines(root):
    (gpu,) = read_machine(root, driver(FakeCard("NVIDIA N1X", (12, 1)))).gpus
    assert (gpu.is_unified, gpu.memory_bytes, gpu.card) == (True, 64 * GIB, None)


def test_a_capability_that_the_driver_does_not_say_is_the_tables(root):
    answer = driver(FakeCard("NVIDIA A100-SXM4-40GB", None, 40_960), FakeCard("Quadro X", None, 1024))
    first, second = read_machine(root, answer).gpus
    assert (first.capability, first.card.key, second.capability) == ((8, 0), "a100-40gb", (0, 0))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["NVIDIA H200", "NVIDIA GeForce RTX 4090"]),
        ("1", ["NVIDIA GeForce RTX 4090"]),
        ("1,0", ["NVIDIA GeForce RTX 4090", "NVIDIA H200"]),
        ("GPU-4090", ["NVIDIA GeForce RTX 4090"]),
        ("0,-1,1", ["NVIDIA H200"]),
        ("7", []),
        ("", []),
    ],
)
@pytest.mark.parametrize("way", ["library", "nvidia-smi"])
def test_only_cards_that_cuda_may_see(root, monkeypatch, visible, expected, way):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    smi = "0, GPU-h200, NVIDIA H200, 9.0, 143771, 1, 5\n"
    smi += "1, GPU-4090, NVIDIA GeForce RTX 4090, 8.9, 24564, 1, 5\n"
    answer = driver(H200, RTX_4090, smi=smi, init=0 if way == "library" else 18)
    assert [gpu.name for gpu in read_machine(root, answer).gpus] == expected


@pytest.mark.parametrize("load", [not_installed, no_library])
def test_nvidia_smi_speaks_where_the_library_does_not(root, load):
    smi = "0, GPU-1, NVIDIA GB10, 12.1, [N/A], [N/A], 580.95.05\n"
    smi += "1, GPU-2, NVIDIA H200, 9.0, 143771, 120000, 580.95.05\n"
    machine = read_machine(root, lambda visible: nvml.query(visible, load, lambda fields: smi))
    spark, h200 = machine.gpus
    assert (spark.capability, spark.is_unified) == ((12, 1), True)
    assert (h200.memory_bytes, h200.free_bytes) == (143_771 * MIB, 120_000 * MIB)
    assert machine.gpu_error is None


@pytest.mark.parametrize("smi", ["", "No devices were found\n", "0, too, few\n", "Failed to initialize NVML"])
@pytest.mark.parametrize("code", [*nvml.ERRORS, 99])
def test_a_driver_that_does_not_answer_is_named(root, smi, code):
    machine = read_machine(root, driver(H200, init=code, smi=smi))
    assert machine.gpus == ()
    assert machine.gpu_error == nvml.ERRORS.get(code, "nvmlInit fails with code 99")


def test_a_missing_package_is_named_with_the_remedy(root):
    machine = read_machine(root, lambda visible: nvml.query(visible, not_installed, lambda fields: ""))
    assert (machine.gpus, machine.gpu_error) == ((), nvml.NO_PACKAGE)
    assert driver_advice(machine) == "pip install nvidia-ml-py"


def test_the_double_has_the_functions_of_the_real_module():
    real = pytest.importorskip("pynvml")
    names = [name for name in dir(FakeNvml) if name.startswith("nvml")]
    assert [name for name in names if not hasattr(real, name)] == []
    assert real.NVMLError(18).value == 18


def test_a_library_too_old_for_a_question_leaves_it_open(root):
    missing = ("nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetUUID")
    machine = read_machine(root, driver(H200, missing=missing))
    assert (machine.cuda, machine.gpus[0].name) == (None, "NVIDIA H200")


def test_nvidia_smi_is_not_asked_where_the_library_answers(root):
    def refuse(fields):
        raise AssertionError

    empty = nvml.query("", load=lambda: FakeNvml(H200), run=refuse)
    assert (empty.devices, empty.error) == ((), None)


def test_the_library_is_closed_again(root):
    module = FakeNvml(H200)
    nvml.query(None, lambda: module)
    assert not module.is_open


def test_without_a_driver_nobody_is_asked(root):
    (root / "dev/nvidiactl").unlink()

    def query(visible):
        raise AssertionError

    machine = read_machine(root, query)
    assert (machine.gpus, machine.gpu_bytes, machine.gpu_error) == ((), 0, None)
    assert not may_have_gpu(root)


def test_a_driver_of_amd_is_no_nvidia_card(root):
    (root / "dev/nvidiactl").unlink()
    write(root, {"dev/kfd": ""})
    assert may_have_gpu(root)
    assert read_machine(root, driver(H200)).gpus == ()


# ---- limits


def test_no_limits_are_none(root):
    write(root, {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/cpu.max": "max 100000\n"})
    limits = read_machine(root, driver()).limits
    assert (limits.memory_bytes, limits.cpus, limits.container) == (None, None, None)


def test_a_container_of_cgroup_2(root):
    write(
        root,
        {
            ".dockerenv": "",
            "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
        },
    )
    machine = read_machine(root, driver())
    assert (machine.limits.memory_bytes, machine.limits.cpus) == (8 * GIB, 1.5)
    assert machine.memory_bytes == 6 * GIB, "file caches can be dropped"
    assert machine.limits.container == "docker"


def test_the_tightest_of_nested_groups_counts(root):
    write(
        root,
        {
            "proc/self/cgroup": "0::/user.slice/mine\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/user.slice/memory.current": "0\n",
            "sys/fs/cgroup/user.slice/mine/memory.max": f"{16 * GIB}\n",
            "sys/fs/cgroup/user.slice/mine/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
        },
    )
    machine = read_machine(root, driver())
    assert (machine.memory_bytes, machine.limits.memory_bytes, machine.limits.cpus) == (4 * GIB, 4 * GIB, 4.0)


@pytest.mark.parametrize("inside", ["", "docker/0123/"])
def test_a_container_of_cgroup_1(root, inside):
    write(
        root,
        {
            "proc/self/cgroup": "4:memory:/docker/0123\n3:cpu,cpuacct:/docker/0123\n",
            "proc/1/cgroup": "4:memory:/kubepods/burstable/0123\n",
            f"sys/fs/cgroup/memory/{inside}memory.limit_in_bytes": f"{2 * GIB}\n",
            f"sys/fs/cgroup/memory/{inside}memory.usage_in_bytes": f"{GIB}\n",
            f"sys/fs/cgroup/memory/{inside}memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n",
            f"sys/fs/cgroup/cpu,cpuacct/{inside}cpu.cfs_quota_us": "200000\n",
            f"sys/fs/cgroup/cpu,cpuacct/{inside}cpu.cfs_period_us": "100000\n",
        },
    )
    machine = read_machine(root, driver())
    assert (machine.memory_bytes, machine.limits.cpus) == (GIB + GIB // 2, 2.0)
    assert machine.limits.container == "kubernetes"


def test_cgroup_1_writes_no_limit_as_a_number(root):
    write(
        root,
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    machine = read_machine(root, driver())
    assert (machine.limits.memory_bytes, machine.limits.cpus, machine.memory_bytes) == (None, None, 32 * GIB)


def test_ulimits(root):
    head = f"{'Limit':<26}{'Soft Limit':<21}{'Hard Limit':<21}Units\n"
    rows = [("Max open files", "1024", "4096"), ("Max locked memory", "unlimited", "unlimited")]
    rows.append(("Max address space", "8589934592", "unlimited"))
    text = head + "".join(f"{name:<26}{soft:<21}{hard:<21}x\n" for name, soft, hard in rows)
    write(root, {"proc/self/limits": text})
    limits = read_machine(root, driver()).limits
    assert (limits.open_files, limits.locked_bytes, limits.address_bytes) == (1024, None, 8 * GIB)


# ---- the rest


def test_processors_by_name_or_by_number(root):
    write(root, {"proc/cpuinfo": "model name\t: AMD EPYC 9654\nflags\t\t: fpu avx2 avx512_bf16\n"})
    cpu = read_machine(root, driver()).cpu
    assert (cpu.name, "avx512_bf16" in cpu.features) == ("AMD EPYC 9654", True)
    write(root, {"proc/cpuinfo": "Features\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"})
    cpu = read_machine(root, driver()).cpu
    assert (cpu.name, cpu.features) == ("Neoverse V2", {"fp", "asimd"})


def test_an_empty_root_still_is_a_machine(tmp_path):
    machine = read_machine(tmp_path, driver())
    assert machine.memory_bytes > 0
    assert (machine.kernel, machine.limits.shm_bytes, machine.cpu.features) == ("", None, frozenset())


def test_this_machine_is_read_fast():
    seconds = []
    for _ in range(3):
        begun_s = time.perf_counter()
        machine = read_machine()
        seconds.append(time.perf_counter() - begun_s)
    assert min(seconds) < 0.2
    assert 0 < machine.memory_bytes <= machine.total_bytes
    assert machine.cpu.name
    assert machine.kernel
