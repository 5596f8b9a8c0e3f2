"""Which tests run on a GPU (`make gpu-tests`), and why the others do not."""

# What pytest runs on a GPU, in the order of what the rest stands on.
ON_A_GPU = [
    "tests/collectives/test_one_rank.py",
    "tests/kernels",
    "tests/laws",
    "tests/optim",
    "tests/transforms",
    "tests/nn",
    "tests/unit/step",
    "tests/unit/loss",
    "tests/unit/test_autodiff.py",
    "tests/storage/test_background.py",
    "tests/storage/test_resume.py",
    "tests/storage/test_round_trip.py",
    "tests/storage/test_sharing.py",
    "tests/storage/test_topologies.py",
    "tests/sharding",
    "tests/transports",
    "tests/pipeline",
    "tests/tensor_axis",
]
_OF_THE_HOST = "its subject is the host: text, files, plans, no arithmetic of the device"
_OF_THE_CPU = "its subject is the CPU, or a machine without a GPU"
_PROCESSES = "it starts processes, whose ranks meet over gloo and compute on the CPU"
_DRAWN_FOR_A_CPU = "bits, bytes or times that were recorded on a CPU"
_EMULATED = "it emulates a GPU on the CPU; test_cuda_graph_on_a_gpu.py asks a real one"
_ROUNDED = "its updates run on the host, which rounds otherwise than a GPU; test_law_11_on_a_gpu.py asks a real one"
# Of all other files, why not; a folder stands for those in it.
NOT_ON_A_GPU = {
    "tests/kernels/test_ahead_of_time.py": "it compiles for a GPU that is not there",
    "tests/kernels/test_benchmark.py": "the benchmark itself runs as a part of its own",
    "tests/kernels/test_choice.py": _OF_THE_CPU,
    "tests/kernels/test_evidence.py": _OF_THE_CPU,
    "tests/kernels/test_shared_memory.py": _OF_THE_CPU,
    "tests/laws/test_configurations.py": _PROCESSES,
    "tests/laws/test_law_10_plans.py": _OF_THE_HOST,
    "tests/laws/test_law_11_offload.py": _ROUNDED,
    "tests/laws/test_law_11_on_the_host.py": _EMULATED,
    "tests/laws/test_law_11_pieces.py": "its states live in files that are mapped into the host's memory",
    "tests/laws/test_law_11_residency.py": "its states live in files that are mapped into the host's memory",
    "tests/laws/test_law_17_captures.py": _EMULATED,
    "tests/laws/test_law_9_storage.py": _PROCESSES,
    "tests/laws/test_no_host_synchronisation.py": "it runs on `meta` tensors, everywhere alike",
    "tests/sharding/test_bytes.py": _DRAWN_FOR_A_CPU,
    "tests/sharding/test_gpt_on_real_ranks.py": _PROCESSES,
    "tests/sharding/test_weights_on_real_ranks.py": _PROCESSES,
    "tests/pipeline/test_real_ranks.py": _PROCESSES,
    "tests/unit/step/test_host_work.py": _DRAWN_FOR_A_CPU,
    "tests/nn/test_transformer_memory.py": _DRAWN_FOR_A_CPU,
    "tests/nn/test_sparse_self_attention.py": "in float64, on simulated ranks; not tried on a GPU",
    "tests/nn/test_block_select_attention.py": "in float64, and it trains on the CPU; kernels have tests of their own",
    "tests/hf": "stand-ins of a few float64 numbers; not tried on a GPU",
    "tests/nn/parallel": "bytes and bounds of torch's kernel for the CPU; it has not been tried on a GPU",
    "tests/sequence_axis": "in float64, which the ring computes by torch's kernel for the CPU; not tried on a GPU",
    "tests/transforms/test_batch_invariant.py": "bits of torch's operators for the CPU; it has not been tried on a GPU",
    "tests/transforms/test_checkpoint_memory.py": _DRAWN_FOR_A_CPU,
    "tests/transforms/test_checkpoint_store.py": _DRAWN_FOR_A_CPU,
    "tests/transforms/test_cuda_graph.py": _EMULATED,
    "tests/transforms/test_offload.py": _ROUNDED,
    "tests/unit": _OF_THE_HOST,
    "tests/storage": _OF_THE_HOST,
    "tests/collectives": "simulated ranks, whose sums are the CPU's, and real ones over gloo",
    "tests/benchmarks": _OF_THE_HOST,
    "tests/command_line": _OF_THE_HOST,
    "tests/compression": "files, and what was recorded of others on a CPU; kernels have tests of their own",
    "tests/adapters": "files, and products that are compared with a CPU's; not tried on a GPU",
    "tests/distill": "in float64, on simulated ranks; not tried on a GPU",
    "tests/profiling": "it counts the operators that run on a CPU",
    "tests/config": _DRAWN_FOR_A_CPU,
    "tests/data": _OF_THE_HOST,
    "tests/debugging": _OF_THE_HOST,
    "tests/display": _OF_THE_HOST,
    "tests/monitors": _OF_THE_HOST,
    "tests/timing": _OF_THE_HOST,
    "tests/reporting": _OF_THE_HOST,
    "tests/examples": _PROCESSES,
    "tests/fillers": "models of a few float64 numbers on simulated ranks; not tried on a GPU",
    "tests/fuzzing": _PROCESSES,
    "tests/house": _OF_THE_HOST,
    "tests/media": "its subject is the host: files and their memory",
    "tests/package": _OF_THE_HOST,
    "tests/peers": _PROCESSES,
    "tests/attention_layouts": _OF_THE_HOST,
    "tests/elastic": _OF_THE_HOST,
    "tests/trainer": _OF_THE_HOST,
    "tests/tuning": _OF_THE_HOST,
    "tests/plans": _OF_THE_HOST,
    "tests/schedules": _OF_THE_HOST,
}


def runs_on_a_gpu(path: str) -> bool:
    """Say whether a file of tests is among those that run on a GPU; the longest entry that names it decides."""
    names = [name for name in (*ON_A_GPU, *NOT_ON_A_GPU) if path == name or path.startswith(f"{name}/")]
    if not names:
        raise KeyError(path)
    return max(names, key=len) in ON_A_GPU
