"""Read from the environment which launcher started the ranks, and which rank this is."""

from __future__ import annotations

import functools
import importlib.util
import re
import socket
from collections.abc import Mapping

import attrs

from fds.errors import MeshError

PORT = 29500  # torchrun's own

# Launcher -> variables of the rank, the number of ranks, the rank on the node. MPI comes before Slurm, which may have
# started mpirun's own processes on the nodes; torchrun comes before both, since it runs under them.
STARTERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
# Launcher -> variables that identify a job, equal on all of its ranks.
JOBS = {
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "Open MPI": ("PMIX_NAMESPACE",),
    "PMI": ("PMI_JOBID",),
    "Slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
}
HINTS = {
    "Open MPI": "mpirun -x MASTER_ADDR=<host of rank 0>, or install mpi4py, which finds it",
    "PMI": "mpiexec -genv MASTER_ADDR <host of rank 0>, or install mpi4py, which finds it",
}
ON_THIS_NODE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")  # number of ranks on this node


@attrs.frozen
class Launch:
    """One rank among those that were started together."""

    rank: int
    world_size: int
    local_rank: int
    address: str = ""  # host of rank 0; empty for one rank
    port: int = PORT
    job: str = attrs.field(default="", eq=False)  # identifies the job, if the launcher says


def launched(environ: Mapping[str, str]) -> Launch | None:
    """Read torchrun's, MPI's or Slurm's variables; None if no launcher started this process.

    Raises `MeshError` for an incomplete environment.
    """
    for starter, (rank, size, local) in STARTERS.items():
        if (rank not in environ and size not in environ) or _of_another(environ, starter):
            continue
        if rank not in environ or size not in environ:
            has, lacks = (rank, size) if rank in environ else (size, rank)
            raise MeshError(
                f"the environment says {has} and not {lacks}",
                where=starter,
                got=f"{has}={environ[has]}",
                want="both, or neither for one process",
                hint=f"start with {starter}, or unset {has}",
            )
        if starter == "Slurm" and "SLURM_STEP_NUM_TASKS" in environ:
            size = "SLURM_STEP_NUM_TASKS"  # in salloc's own shell SLURM_NTASKS is that of future steps
        number, count = _integer(environ, rank), _integer(environ, size)
        if not 0 <= number < count:
            raise MeshError(
                "the rank is not among the ranks",
                where=starter,
                got=f"{rank}={number}, {size}={count}",
                want=f"0 to {count - 1}",
            )
        at = _integer(environ, local) if local in environ else 0
        if count == 1:
            return Launch(number, count, at)
        job = ".".join(environ.get(name, "") for name in JOBS[starter])
        return Launch(number, count, at, *_address(environ, starter, number, count), job.strip("."))
    return None


def _of_another(environ: Mapping[str, str], starter: str) -> bool:
    """Return whether this starter's variables describe something else than this process.

    Slurm sets them for batch scripts and salloc's shell too, which are not ranks. The variables that srun sets for MPI
    (--mpi=pmi2) lack the rank on the node, which Slurm's own variables have.
    """
    in_a_step = "SLURM_STEP_ID" in environ
    return not in_a_step if starter == "Slurm" else starter == "PMI" and in_a_step and "MPI_LOCALRANKID" not in environ


def on_one_node(environ: Mapping[str, str], world_size: int) -> bool:
    """Return whether all ranks run on this node, according to the launcher; the same on all ranks.

    >>> on_one_node({"LOCAL_WORLD_SIZE": "4"}, 4), on_one_node({"LOCAL_WORLD_SIZE": "4"}, 8)
    (True, False)
    """
    return str(world_size) in (environ.get(name) for name in ON_THIS_NODE)


def _address(environ: Mapping[str, str], starter: str, rank: int, world_size: int) -> tuple[str, int]:
    """Return the host and port at which rank 0 waits for the others."""
    port = _integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else PORT
    if not 0 < port < 2**16:
        raise MeshError("no such port", where="MASTER_PORT", got=str(port), want="1 to 65535")
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"], port
    if starter == "Slurm":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
        if nodes:  # jobs may share a node, so the port depends on the number of the job
            job = _integer(environ, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environ else 0
            return first_host(nodes), port if "MASTER_PORT" in environ or not job else 20_000 + job % 10_000
    if starter in HINTS:
        if importlib.util.find_spec("mpi4py") is not None:
            return _share_address(rank)
        if on_one_node(environ, world_size):
            return "127.0.0.1", port
    raise MeshError(
        "the address of rank 0 is not known",
        where=starter,
        got="no MASTER_ADDR in the environment",
        want="MASTER_ADDR=<host of rank 0>",
        hint=HINTS.get(starter, ""),
    )


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_host("gpu[007-012,020],login1")
    'gpu007'
    """
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


@functools.cache  # every mesh reads the environment, and ranks need not make meshes at the same time
def _share_address(rank: int) -> tuple[str, int]:
    """Find a free port on rank 0, and broadcast its address by MPI."""
    from mpi4py import MPI  # type: ignore[import-not-found] (optional: only where it is installed)

    address = None
    if rank == 0:
        with socket.socket() as s:
            s.bind(("", 0))
            address = (socket.gethostname(), s.getsockname()[1])
    return MPI.COMM_WORLD.bcast(address, root=0)


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise MeshError("not a number in the environment", where=name, got=repr(environ[name]), want="an int") from None
