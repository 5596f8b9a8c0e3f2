"""The machine: its GPUs and what kernels do on them, cores, memory, network interfaces, the disk of a folder.

Torch and kernels are imported where they are needed: where that fails, a check fails, and the others go on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fds.command_line.doctor import Finding, Level, Settings, run_together

DRIVER = Path("/proc/driver/nvidia/version")
GIB = 2**30


def devices(settings: Settings) -> Iterator[Finding]:
    """Find the GPUs that torch sees, and say so where there is one that it does not see."""
    import torch

    driver = _driver()
    if not torch.cuda.is_available():
        yield _no_gpu(driver, torch.version.cuda)
        return
    if driver:
        yield Finding("driver", f"NVIDIA {driver}")
    for i in range(torch.cuda.device_count()):
        yield _gpu(i)


def _driver() -> str:
    """Return the version of NVIDIA's driver; empty where it is not loaded, as inside some containers."""
    try:
        version = re.search(r"\b\d+\.\d+(\.\d+)?\b", DRIVER.read_text())
    except OSError:
        return ""
    return version[0] if version else "of unknown version"


def _no_gpu(driver: str, cuda: str | None) -> Finding:
    if not driver:
        return Finding("GPU", "none", advice="fds trains on the CPU")
    if cuda is None:
        advice = "this build of torch is for the CPU; take one for your GPU: https://pytorch.org/get-started"
        return Finding("GPU", f"NVIDIA's driver {driver} is loaded, and torch cannot use it", "problem", advice)
    advice = f"torch needs a driver for CUDA {cuda}; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
    return Finding("GPU", f"NVIDIA's driver {driver} is loaded, and torch sees no GPU", "problem", advice)


def _gpu(i: int) -> Finding:
    import torch

    about = torch.cuda.get_device_properties(i)
    free, total = torch.cuda.mem_get_info(i)
    capability = f"{about.major}.{about.minor}"
    text = f"{about.name}, {total / GIB:.0f} GiB ({free / GIB:.0f} free), compute capability {capability}"
    values = {"name": about.name, "total_bytes": total, "free_bytes": free, "capability": capability}
    if torch.version.hip is None and (about.major, about.minor) < (7, 0):
        advice = "Triton compiles for 7.0 and later: leave fds.triton_kernels() out"
        return Finding(f"GPU {i}", text, "note", advice, values)
    if torch.version.hip is None and about.major < 8:
        advice = "no bfloat16 in hardware: fds.precision(torch.float16) with fds.loss_scale()"
        return Finding(f"GPU {i}", text, "note", advice, values)
    if free < total / 2:
        return Finding(f"GPU {i}", text, "note", "other processes hold its memory: nvidia-smi names them", values)
    return Finding(f"GPU {i}", text, values=values)


CGROUP, MEMORY, SHARED = Path("/sys/fs/cgroup"), Path("/proc/meminfo"), Path("/dev/shm")
FILES = 1024  # that a process should be able to open


def host(settings: Settings) -> Iterator[Finding]:
    """Find cores, threads, memory, shared memory, and the limit of open files."""
    yield _threads()
    if MEMORY.exists():
        yield _memory()
    if SHARED.exists():
        yield _shared()
    yield from _open_files()


def _threads() -> Finding:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    allowed = cores if quota is None else min(cores, quota)
    threads = torch.get_num_threads()
    text = f"{cores} cores{f', of whose time {quota:g} are allowed' if quota else ''}; torch takes {threads} threads"
    values = {"cores": cores, "quota": quota, "threads": threads}
    if threads > max(allowed, 1):
        advice = f"more threads than cores wait for each other: export OMP_NUM_THREADS={max(1, int(allowed))}"
        return Finding("cores", text, "note", advice, values)
    return Finding("cores", text, values=values)


def _quota() -> float | None:
    """Return how many cores' time the container may use; None without a limit."""
    try:
        most, period = (CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if most == "max" else int(most) / int(period)


def _memory() -> Finding:
    from fds.tuning.search import memory_limit

    lines = (line.split(":") for line in MEMORY.read_text().splitlines())
    sizes = {name: int(rest.split()[0]) * 1024 for name, rest in lines if name in ("MemTotal", "MemAvailable")}
    total, available = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemTotal"])
    limit = memory_limit(CGROUP)
    text = f"{total / GIB:.1f} GiB, {available / GIB:.1f} available"
    values = {"total_bytes": total, "available_bytes": available, "limit_bytes": limit}
    if limit is not None and limit < total:
        advice = "the container is killed beyond it"
        return Finding("memory", f"{text}, limited to {limit / GIB:.1f}", "note", advice, values)
    return Finding("memory", text, values=values)


def _shared() -> Finding:
    size = os.statvfs(SHARED)
    total, free = size.f_frsize * size.f_blocks, size.f_frsize * size.f_bavail
    low = free < GIB
    advice = "loaders with workers, and NCCL between GPUs, pass data through it: docker run --shm-size=8g"
    text = f"{total / GIB:.1f} GiB, {free / GIB:.1f} free"
    return Finding("shared memory", text, "note" if low else "ok", advice * low, {"free_bytes": free})


def _open_files() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft != resource.RLIM_INFINITY and soft < FILES
    text = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    yield Finding("open files", text, "note" if low else "ok", "ulimit -n 65536" * low, {"limit": soft})


ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux's netdevice(7)


def network(settings: Settings) -> Iterator[Finding]:
    """Find the interfaces, and the one that gloo takes: that of GLOO_SOCKET_IFNAME, or of the host's own name."""
    interfaces = {name: address(name) for _, name in socket.if_nameindex()}
    shown = ", ".join(f"{name} {at}" if at else name for name, at in interfaces.items())
    values = {"addresses": interfaces}
    if sys.platform == "linux" and not any(interfaces.values()):
        yield Finding("interfaces", f"none with an address: {shown}", "problem", "ip link set lo up", values)
    else:
        yield Finding("interfaces", shown or "none", values=values)
    yield gloo_interface(interfaces, os.environ.get("GLOO_SOCKET_IFNAME", ""))


def gloo_interface(interfaces: dict[str, str], wanted: str) -> Finding:
    """Return the finding of the interface that gloo takes, given all (name -> IPv4 address) and the wanted names."""
    others = [name for name, at in interfaces.items() if at and not at.startswith("127.")]
    instead = f"export GLOO_SOCKET_IFNAME={others[0] if others else 'INTERFACE'}"
    if wanted:
        missing = [name for name in wanted.split(",") if name not in interfaces]
        if missing:
            advice = f"there is no such interface; {instead}, or unset it"
            return Finding("gloo", f"GLOO_SOCKET_IFNAME={wanted}", "problem", advice)
        return Finding("gloo", f"takes {wanted}, of GLOO_SOCKET_IFNAME")
    host = socket.gethostname()
    several = f"on several nodes: {instead} (and NCCL_SOCKET_IFNAME)"
    if not others:
        several = "other nodes cannot be reached: no interface but the loopback has an address"
    try:
        at = socket.gethostbyname(host)
    except OSError:
        return Finding("gloo", f"takes the loopback: the name {host} has no address", "note", several)
    name = next((name for name, ip in interfaces.items() if ip == at), "")
    if at.startswith("127."):
        return Finding("gloo", f"takes the loopback: {host} is {at}", advice=several)
    if not name:
        return Finding("gloo", f"{host} is {at}, which no interface has", "note", instead)
    return Finding("gloo", f"takes {name}: {host} is {at}")


def address(interface: str) -> str:
    """Return the IPv4 address of an interface; empty where it has none, and on other systems than Linux."""
    if sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            reply = fcntl.ioctl(s.fileno(), ADDRESS_OF, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(reply[20:24])


MIB = 2**20
PIECE, PIECES = 4 * MIB, 16
LEAST = 2**30  # bytes that should be free


def disk(settings: Settings) -> Iterator[Finding]:
    """Find the free space of the folder, and write and read a file in it, which is removed again."""
    where = str(settings.dir)
    try:
        free = shutil.disk_usage(settings.dir).free
    except OSError as error:
        yield Finding(
            where, f"cannot be used: {error.strerror}", "problem", "make it, or pass another: fds doctor --dir"
        )
        return
    low = free < LEAST
    advice = "a save with Adam and float32 takes 12 bytes a parameter: fds.save(..., keep=1), or another folder"
    yield Finding(where, f"{free / 2**30:,.1f} GiB free", "note" if low else "ok", advice * low, {"free_bytes": free})
    try:
        yield _speed(settings) if not settings.quick else _writable(settings)
    except OSError as error:
        advice = "saves fail there: pass a folder that you may write to"
        yield Finding("writing", f"failed: {error.strerror}", "problem", advice)


def _writable(settings: Settings) -> Finding:
    with tempfile.TemporaryFile(dir=settings.dir):
        return Finding("writing", "allowed")


def _speed(settings: Settings) -> Finding:
    piece, total = os.urandom(PIECE), PIECE * PIECES
    with tempfile.TemporaryFile(dir=settings.dir, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(PIECES):
            file.write(piece)
        os.fsync(file.fileno())
        wrote = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):  # so that it is the disk that is read, where the kernel agrees
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        same = all(file.read(PIECE) == piece for _ in range(PIECES))
        read = time.perf_counter() - start
    values = {"bytes": total, "write_bytes_per_s": total / wrote, "read_bytes_per_s": total / read}
    text = f"writes {total / wrote / MIB:,.0f} MiB/s with fsync, reads {total / read / MIB:,.0f} MiB/s"
    if not same:
        return Finding("speed", "what was read is not what was written", "problem", "do not save there", values)
    slow = total / wrote < 50 * MIB
    advice = "fds.save_async lets steps go on meanwhile; or save to a local disk"
    return Finding("speed", text, "note" if slow else "ok", advice * slow, values)


TRIAL_LIMIT = 120.0  # seconds; compiling takes a few


def kernels(settings: Settings) -> Iterator[Finding]:
    """Find which kernels run on every kind of device at hand, and run one of Triton's in a fresh process."""
    import torch

    from fds.kernels.language import is_there

    kinds = ["cuda"] * torch.cuda.is_available() + ["cpu"]
    for kind in kinds:
        yield from _chosen(kind)
    for kind in kinds:
        if is_there and not settings.quick:
            yield _trial(kind)


def _chosen(kind: str) -> Iterator[Finding]:
    """Find what runs for every kernel, and why; kernels of which the same is true are one finding."""
    from fds.kernels.choice import chosen, explanations

    kernels: dict[str, list[str]] = {}
    for kernel, text in explanations(kind).items():
        kernels.setdefault(text, []).append(kernel)
    for text, names in kernels.items():
        which = f"{', '.join(names)}: " if len(kernels) > 1 else ""
        is_left = kind == "cuda" and chosen(names[0], kind) == "reference"
        advice = "fds.triton_kernels() runs the kernels" if is_left else ""
        yield Finding(f"on {kind}", which + text, advice=advice, values={"kernels": names})


def _trial(kind: str) -> Finding:
    from fds.kernels import chosen

    interprets = kind == "cpu"
    what = "interpreter" if interprets else f"trial on {kind}"
    [ended] = run_together(
        "fds.command_line.doctor.trials",
        [{"TRITON_INTERPRET": "1" if interprets else "0"}],
        arguments=f"kernel {kind}",
        limit=TRIAL_LIMIT,
    )
    is_used = not interprets and chosen("rms_norm", kind) == "triton"
    level: Level = "problem" if is_used else "note"
    around = "compose with fds.reference_kernels()" if is_used else "leave fds.triton_kernels() out"
    if ended.code != 0:
        needed = "only tests of kernels need it" if interprets else around
        return Finding(what, f"a kernel does not run: {ended.reason}", level, needed)
    values = json.loads(ended.out)
    text = f"rms_norm and its gradients, {values['max_error']:.1e} from the reference"
    if values["max_error"] > values["bound"]:
        advice = f"more than rounding, {values['bound']:.1e}: {around}, and please report it"
        return Finding(what, text, level, advice, values)
    return Finding(what, text, values=values)
