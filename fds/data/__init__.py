"""Loaders whose batches are a function of a seed and a position, `state.calls`; files of tokens; data sets analysed."""

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

__all__ = [
    "Accumulated", "ArrayRecords", "BatchOrder", "Coordinate", "CurriculumSampler", "DistributedLoader", "MDSFolder",
    "Mixture", "PackedRows", "Packing", "PerSample", "RepeatingLoader", "SampleMetric", "ScaledRate", "SequenceLength",
    "TokenBatches", "TokenCounts", "TokenFile", "VocabularyRarity", "analyse", "batches_by_tokens", "import_metric",
    "mixture", "pack", "packed", "per_microbatch", "permute", "read_metric", "read_total", "write_tokens",
]  # fmt: skip
