"""Loaders whose batches are a function of a seed and a position, `state.calls`; files of tokens; data sets analysed."""

from typing import TYPE_CHECKING

from fds.lazy import lazily

if TYPE_CHECKING:  # by the table below: a loader waits neither for files nor for the rooms that an analysis needs
    from fds.data.analysis import analyse
    from fds.data.array_record import ArrayRecords
    from fds.data.curriculum import CurriculumSampler
    from fds.data.loaders import DistributedLoader, RepeatingLoader
    from fds.data.mds import MDSFolder
    from fds.data.metric_files import SampleMetric, import_metric, read_metric, read_total
    from fds.data.metrics import Accumulated, PerSample, SequenceLength, TokenCounts, VocabularyRarity
    from fds.data.mixtures import Mixture, mixture
    from fds.data.orders import BatchOrder, permute
    from fds.data.packing import PackedRows, Packing, pack, packed
    from fds.data.shares import Coordinate, per_microbatch
    from fds.data.token_batches import ScaledRate, TokenBatches, batches_by_tokens
    from fds.data.tokens import TokenFile, write_tokens

__getattr__, __dir__ = lazily(
    __name__,
    {
        "fds.data.analysis": "analyse",
        "fds.data.array_record": "ArrayRecords",
        "fds.data.curriculum": "CurriculumSampler",
        "fds.data.loaders": "DistributedLoader RepeatingLoader",
        "fds.data.mds": "MDSFolder",
        "fds.data.metric_files": "SampleMetric import_metric read_metric read_total",
        "fds.data.metrics": "Accumulated PerSample SequenceLength TokenCounts VocabularyRarity",
        "fds.data.mixtures": "Mixture mixture",
        "fds.data.orders": "BatchOrder permute",
        "fds.data.packing": "PackedRows Packing pack packed",
        "fds.data.shares": "Coordinate per_microbatch",
        "fds.data.token_batches": "ScaledRate TokenBatches batches_by_tokens",
        "fds.data.tokens": "TokenFile write_tokens",
    },
)

__all__ = [
    "Accumulated", "ArrayRecords", "BatchOrder", "Coordinate", "CurriculumSampler", "DistributedLoader", "MDSFolder",
    "Mixture", "PackedRows", "Packing", "PerSample", "RepeatingLoader", "SampleMetric", "ScaledRate", "SequenceLength",
    "TokenBatches", "TokenCounts", "TokenFile", "VocabularyRarity", "analyse", "batches_by_tokens", "import_metric",
    "mixture", "pack", "packed", "per_microbatch", "permute", "read_metric", "read_total", "write_tokens",
]  # fmt: skip
