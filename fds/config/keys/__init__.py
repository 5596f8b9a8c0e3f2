"""All keys of DeepSpeed's JSON, a table for each kind, as one record with the checks that involve several groups."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Self

from fds.config import reading
from fds.config.elasticity import BATCH, batch_sizes
from fds.config.field import Edition, Key, keys
from fds.config.keys import data, model, optimizer, step, zero
from fds.config.record import Config, walk
from fds.config.rows import declare
from fds.errors import ConfigError, ElasticityError, did_you_mean

_TABLE = """
Groups:
    batch: BatchConfig; flat | batch sizes
    optimizer: OptimizerConfig|None = None; no null | the optimizer
    scheduler: SchedulerConfig|None = None; no null | the learning rate's scheduler
    communication: CommunicationConfig; flat | gradients between ranks
    clipping: ClippingConfig; flat | the bound of the gradient's norm
    fp16: FP16Config | training in float16
    bf16: BF16Config; old bfloat16; null as absent | training in bfloat16
    amp: AmpConfig | mixed precision by Apex
    torch_autocast: TorchAutocastConfig | mixed precision by torch.autocast
    data_types: DataTypesConfig | dtypes of their own
    zero_optimization: ZeroConfig | sharding between data ranks
    zero_optimizers: OptimizersUnderZeroConfig; flat | which optimizers may stand under ZeRO
    aio: AioConfig; null as absent | asynchronous reads and writes
    activation_checkpointing: ActivationCheckpointingConfig | how activations wait
    pipeline: PipelineConfig | a pipeline's own keys
    checkpoint: CheckpointConfig | saves
    loading: LoadingConfig; flat | data sets and saves
    nebula: NebulaConfig | a service that saves in the background
    logging: LoggingConfig; flat | what the engine prints and times
    tensorboard: TensorBoardConfig | events for TensorBoard
    csv_monitor: CsvMonitorConfig | events as CSV
    wandb: WandbConfig | events for Weights & Biases
    comet: CometConfig | events for Comet
    comms_logger: CommsLoggerConfig | times and bytes of collectives
    flops_profiler: FlopsProfilerConfig | operations and times of modules
    autotuning: AutotuningConfig | a search for the fastest configuration
    elasticity: ElasticityConfig | batch sizes for many numbers of ranks
    sparse_attention: SparseAttentionConfig|None = None; no null | block-sparse attention
    data_efficiency: DataEfficiencyConfig | fewer samples and tokens
    curriculum_learning: CurriculumConfig | short sequences first
    progressive_layer_drop: ProgressiveLayerDropConfig | fewer layers at random
    compression_training: CompressionConfig | a smaller model by training
    quantize_training: QuantizeTrainingConfig; null as absent | fewer bits as training goes on
    eigenvalue: EigenvalueConfig | curvature of layers
    weight_quantization: WeightQuantizationPlacedConfig|None = None; no null | weights that are stored quantized
    parallel_sizes: ParallelSizesConfig; flat | how ranks are laid out
    tensor_parallel: TensorParallelConfig | layers shared among ranks
    expert_parallel: ExpertParallelConfig; null as absent | experts shared among ranks
    hybrid_engine: HybridEngineConfig | answers of the model while it is trained
    compile: CompileConfig | passes over a compiled model
    capturing: CapturingConfig; flat | the shape of what runs
"""


class Groups(Config):
    """Every key of the JSON. Keys at the top level are in groups (records) too."""

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
        step.check_one_precision(self)
        kind = self.optimizer.kind if self.optimizer is not None else None
        if kind in optimizer.COMPRESSED and self.zero_optimization.stage not in (0, reading.AUTO):
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
        sizes, elastic = [name for name in BATCH if name in self.batch.given], self.elasticity
        if sizes and elastic.enabled is True and elastic.ignore_non_elastic_batch_info is False:
            raise ElasticityError(
                "elasticity chooses the batch sizes, and some are given",
                where=", ".join(["elasticity.enabled", *sizes]),
                got=", ".join(f"{name}={self.batch[name]}" for name in sizes),
                want="none of them",
                hint='to overrule them: "ignore_non_elastic_batch_info": true in "elasticity"',
            )

    def resolve(
        self,
        *,
        world_size: int = 1,
        auto: Mapping[str, Any] | None = None,
        hidden_size: int | None = None,
        **others: Any,
    ) -> Self:
        """Return the configuration with all three batch sizes, and every `"auto"` filled in or left at its default.

        With `elasticity` the batch sizes are those of `fds.elastic.batches` on this number of data ranks, also where
        the result is resolved again, on another number of them.

        Args:
            world_size: number of data ranks.
            auto: JSON path -> value of keys that are `"auto"`; `fds.config.training_arguments` computes it from
                transformers' arguments.
            hidden_size: of the model, in elements, from which sizes of ZeRO's messages that are `"auto"` are computed.

        Raises `ConfigError` for batch sizes that do not multiply, and if the JSON has another value than `auto`;
        `ElasticityError` where elasticity has no batch for these ranks.
        """
        values = {**({} if hidden_size is None else reading.of_hidden_size(hidden_size)), **(auto or {})}
        self._check_paths(values)
        if self.elasticity.enabled is not False:
            filled = self.filled({path: value for path, value in values.items() if path not in BATCH})
            if filled.elasticity.enabled:
                return filled._elastic(world_size)
        values = reading.with_batch_size(self.batch.to_dict(), values, world_size)
        filled = self.filled(values)
        with self._hints_for_auto(values):
            return filled.with_keys(batch=filled.batch.resolve(world_size=world_size))

    def _elastic(self, world_size: int) -> Self:
        """Return the configuration with the elastic batch sizes, which overrule others from here on."""
        batch = self.batch.with_keys(**batch_sizes(self.elasticity, world_size))
        return self.with_keys(batch=batch, elasticity=self.elasticity.with_keys(ignore_non_elastic_batch_info=True))

    def filled(self, values: Mapping[str, Any]) -> Self:
        """Return the configuration with values, JSON path -> value, for every `"auto"`, or its default.

        Raises `ConfigError` if the JSON has another value.
        """
        data = reading.fill(self.to_dict(), values)
        with self._hints_for_auto(values):
            return type(self).from_dict(data, defaults=self.defaults)

    @contextlib.contextmanager
    def _hints_for_auto(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Say in a `ConfigError` which `"auto"` has no value, and how to pass one."""
        try:
            yield
        except ConfigError as error:
            raise reading.explained(error, self.to_dict(), values) from None

    def walk(self) -> Iterator[tuple[str, Any, Key, bool]]:
        """Yield (JSON path, value, key, whether it was given) of all keys, including parameters of the optimizer."""
        for entry in walk(self):
            yield entry
            path, value, *_ = entry
            if path == "optimizer" and value is not None and value.kind in optimizer.OPTIMIZERS:
                yield from walk(value.arguments, "optimizer.params.")
            if path == "scheduler" and value is not None and value.type in optimizer.SCHEDULERS:
                yield from walk(value.arguments, "scheduler.params.")

    def _check_paths(self, values: Mapping[str, Any]) -> None:
        paths = [path for path, *_ in self.walk()]
        for path in values:
            if path not in paths and path not in _parameters():
                raise ConfigError(
                    "there is no such key",
                    where=path,
                    got=repr(path),
                    want="the JSON path of a key",
                    hint=did_you_mean(path, paths),
                )


@functools.cache
def _parameters() -> frozenset[str]:
    return frozenset(
        f"{group}.params.{name}"
        for group, kinds in (("optimizer", optimizer.OPTIMIZERS), ("scheduler", optimizer.SCHEDULERS))
        for record in kinds.values()
        for name in keys(record)
    )


declare(globals(), _TABLE, data, model, optimizer, step, zero)
