"""All groups of DeepSpeed's JSON as one record, with the checks that involve several groups."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Self

import attrs

from fds.config import auto as auto_values
from fds.config.field import Edition, Key, key, keys
from fds.config.keys import optimizer, scheduler
from fds.config.keys.activation_checkpointing import ActivationCheckpointingConfig
from fds.config.keys.autotuning import AutotuningConfig
from fds.config.keys.background_saves import LoadingConfig, NebulaConfig
from fds.config.keys.batch import BatchConfig
from fds.config.keys.communication import ClippingConfig, CommunicationConfig
from fds.config.keys.compile import CapturingConfig, CompileConfig
from fds.config.keys.compression import CompressionConfig
from fds.config.keys.curriculum import CurriculumConfig
from fds.config.keys.data_efficiency import DataEfficiencyConfig
from fds.config.keys.elasticity import ElasticityConfig
from fds.config.keys.hybrid_engine import HybridEngineConfig
from fds.config.keys.offload import AioConfig
from fds.config.keys.optimizer import OptimizerConfig
from fds.config.keys.parallelism import ExpertParallelConfig, ParallelSizesConfig, TensorParallelConfig
from fds.config.keys.pipeline import PipelineConfig
from fds.config.keys.precision import (
    AmpConfig,
    BF16Config,
    DataTypesConfig,
    FP16Config,
    TorchAutocastConfig,
    check_one_precision,
)
from fds.config.keys.progressive_layer_drop import ProgressiveLayerDropConfig
from fds.config.keys.quantize_training import EigenvalueConfig, QuantizeTrainingConfig, WeightQuantizationPlacedConfig
from fds.config.keys.reporting import (
    CometConfig,
    CommsLoggerConfig,
    CsvMonitorConfig,
    FlopsProfilerConfig,
    LoggingConfig,
    TensorBoardConfig,
    WandbConfig,
)
from fds.config.keys.saving import CheckpointConfig
from fds.config.keys.scheduler import SchedulerConfig
from fds.config.keys.sparse_attention import SparseAttentionConfig
from fds.config.keys.zero import OptimizersUnderZeroConfig, ZeroConfig
from fds.config.record import Config, walk
from fds.errors import ConfigError, did_you_mean


@attrs.frozen
class Groups(Config):
    """Every key of the JSON. Keys at the top level are in groups (records) too."""

    batch: BatchConfig = key(BatchConfig, "batch sizes", flat=True)
    optimizer: OptimizerConfig | None = key(None, "the optimizer", null=False)
    scheduler: SchedulerConfig | None = key(None, "the learning rate's scheduler", null=False)
    communication: CommunicationConfig = key(CommunicationConfig, "gradients between ranks", flat=True)
    clipping: ClippingConfig = key(ClippingConfig, "the bound of the gradient's norm", flat=True)
    fp16: FP16Config = key(FP16Config, "training in float16")
    bf16: BF16Config = key(BF16Config, "training in bfloat16", old=("bfloat16",), null=True)
    amp: AmpConfig = key(AmpConfig, "mixed precision by Apex")
    torch_autocast: TorchAutocastConfig = key(TorchAutocastConfig, "mixed precision by torch.autocast")
    data_types: DataTypesConfig = key(DataTypesConfig, "dtypes of their own")
    zero_optimization: ZeroConfig = key(ZeroConfig, "sharding between data ranks")
    zero_optimizers: OptimizersUnderZeroConfig = key(
        OptimizersUnderZeroConfig, "which optimizers may stand under ZeRO", flat=True
    )
    aio: AioConfig = key(AioConfig, "asynchronous reads and writes", null=True)
    activation_checkpointing: ActivationCheckpointingConfig = key(ActivationCheckpointingConfig, "how activations wait")
    pipeline: PipelineConfig = key(PipelineConfig, "a pipeline's own keys")
    checkpoint: CheckpointConfig = key(CheckpointConfig, "saves")
    loading: LoadingConfig = key(LoadingConfig, "data sets and saves", flat=True)
    nebula: NebulaConfig = key(NebulaConfig, "a service that saves in the background")
    logging: LoggingConfig = key(LoggingConfig, "what the engine prints and times", flat=True)
    tensorboard: TensorBoardConfig = key(TensorBoardConfig, "events for TensorBoard")
    csv_monitor: CsvMonitorConfig = key(CsvMonitorConfig, "events as CSV")
    wandb: WandbConfig = key(WandbConfig, "events for Weights & Biases")
    comet: CometConfig = key(CometConfig, "events for Comet")
    comms_logger: CommsLoggerConfig = key(CommsLoggerConfig, "times and bytes of collectives")
    flops_profiler: FlopsProfilerConfig = key(FlopsProfilerConfig, "operations and times of modules")
    autotuning: AutotuningConfig = key(AutotuningConfig, "a search for the fastest configuration")
    elasticity: ElasticityConfig = key(ElasticityConfig, "batch sizes for many numbers of ranks")
    sparse_attention: SparseAttentionConfig | None = key(None, "block-sparse attention", null=False)
    data_efficiency: DataEfficiencyConfig = key(DataEfficiencyConfig, "fewer samples and tokens")
    curriculum_learning: CurriculumConfig = key(CurriculumConfig, "short sequences first")
    progressive_layer_drop: ProgressiveLayerDropConfig = key(ProgressiveLayerDropConfig, "fewer layers at random")
    compression_training: CompressionConfig = key(CompressionConfig, "a smaller model by training")
    quantize_training: QuantizeTrainingConfig = key(QuantizeTrainingConfig, "fewer bits as training goes on", null=True)
    eigenvalue: EigenvalueConfig = key(EigenvalueConfig, "curvature of layers")
    weight_quantization: WeightQuantizationPlacedConfig | None = key(
        None, "weights that are stored quantized", null=False
    )
    parallel_sizes: ParallelSizesConfig = key(ParallelSizesConfig, "how ranks are laid out", flat=True)
    tensor_parallel: TensorParallelConfig = key(TensorParallelConfig, "layers shared among ranks")
    expert_parallel: ExpertParallelConfig = key(ExpertParallelConfig, "experts shared among ranks", null=True)
    hybrid_engine: HybridEngineConfig = key(HybridEngineConfig, "answers of the model while it is trained")
    compile: CompileConfig = key(CompileConfig, "passes over a compiled model")
    capturing: CapturingConfig = key(CapturingConfig, "the shape of what runs", flat=True)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, defaults: Edition = "0.19.6") -> Self:
        """Return the configuration of a JSON object. Raises `ConfigError` with the JSON path."""
        zero = data.get("zero_optimization") if isinstance(data, Mapping) else None
        if isinstance(zero, bool):  # the oldest spelling
            warnings.warn(
                'a boolean "zero_optimization" is an old spelling: write {"stage": 1}', FutureWarning, stacklevel=3
            )
            size = {}
            if "allgather_size" in data:
                warnings.warn(
                    "'allgather_size' is an old spelling: write 'zero_optimization.allgather_bucket_size'",
                    FutureWarning,
                    stacklevel=3,
                )
                size = {"allgather_bucket_size": data["allgather_size"]}
            data = {name: value for name, value in data.items() if name != "allgather_size"}
            data["zero_optimization"] = {"stage": int(zero), **size}
        return super().from_dict(data, defaults=defaults)

    def check(self) -> None:
        """Raise `ConfigError` for keys of different groups that contradict each other."""
        check_one_precision(self)
        kind = self.optimizer.kind if self.optimizer is not None else None
        compressed = issubclass(optimizer.PARAMETERS.get(str(kind), Config), optimizer.CompressedConfig)
        if compressed and self.zero_optimization.stage not in (0, auto_values.AUTO):
            raise ConfigError(
                "this optimizer cannot be used with ZeRO",
                where="optimizer.type, zero_optimization.stage",
                got=f"{kind}, {self.zero_optimization.stage}",
                want="stage 0",
            )
        if self.communication.gradient_allreduce_op == "sum" and self.zero_optimization.stage == 3:
            raise ConfigError(
                "stage 3 averages gradients",
                where="gradient_allreduce_op, zero_optimization.stage",
                got="sum, 3",
                want="mean",
            )

    def resolve(
        self,
        *,
        world_size: int = 1,
        auto: Mapping[str, Any] | None = None,
        hidden_size: int | None = None,
        **known: Any,
    ) -> Self:
        """Return the configuration with all three batch sizes, and every `"auto"` filled in or left at its default.

        Args:
            world_size: number of data ranks.
            auto: JSON path -> value of keys that are `"auto"`; `fds.config.training_arguments` computes it from
                transformers' arguments.
            hidden_size: of the model, in elements, from which sizes of ZeRO's messages that are `"auto"` are computed.

        Raises `ConfigError` for batch sizes that do not multiply, and if the JSON has another value than `auto`.
        """
        values = {**({} if hidden_size is None else auto_values.of_hidden_size(hidden_size)), **(auto or {})}
        self._check_paths(values)
        values = auto_values.with_batch_size(self.batch.to_dict(), values, world_size)
        filled = self.filled(values)
        with self._hints_for_auto(values):
            return filled.with_keys(batch=filled.batch.resolve(world_size=world_size))

    def filled(self, values: Mapping[str, Any]) -> Self:
        """Return the configuration with values, JSON path -> value, for every `"auto"`, or its default.

        Raises `ConfigError` if the JSON has another value.
        """
        data = auto_values.fill(self.to_dict(), values)
        with self._hints_for_auto(values):
            return type(self).from_dict(data, defaults=self.defaults)

    @contextlib.contextmanager
    def _hints_for_auto(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Say in a `ConfigError` which `"auto"` has no value, and how to pass one."""
        try:
            yield
        except ConfigError as error:
            raise auto_values.explained(error, self.to_dict(), values) from None

    def walk(self) -> Iterator[tuple[str, Any, Key, bool]]:
        """Yield (JSON path, value, key, whether it was given) of all keys, including parameters of the optimizer."""
        for entry in walk(self):
            yield entry
            path, value, *_ = entry
            if path == "optimizer" and value is not None and value.kind in optimizer.PARAMETERS:
                yield from walk(value.arguments, "optimizer.params.")
            if path == "scheduler" and value is not None and value.type in scheduler.PARAMETERS:
                yield from walk(value.arguments, "scheduler.params.")

    def _check_paths(self, values: Mapping[str, Any]) -> None:
        known = [path for path, *_ in self.walk()]
        for path in values:
            if path not in known and path not in _parameters():
                raise ConfigError(
                    "there is no such key",
                    where=path,
                    got=repr(path),
                    want="the JSON path of a key",
                    hint=did_you_mean(path, known),
                )


@functools.cache
def _parameters() -> frozenset[str]:
    """Return the paths of the parameters of all optimizers and schedulers."""
    return frozenset(
        f"{group}.params.{name}"
        for group, kinds in (("optimizer", optimizer.PARAMETERS), ("scheduler", scheduler.PARAMETERS))
        for record in kinds.values()
        for name in keys(record)
    )
