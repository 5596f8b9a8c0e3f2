"""Which data are trained on and in which order, searches for batch sizes, and what of a run is reported and saved.

In 0.19.6 each technique of data efficiency has its own switch (`curriculum_learning.enabled`,
`dynamic_batching.enabled`, `random_ltd.enabled`); the switches of the groups around them are read but not used.
`CurriculumConfig` is the legacy section, which shortens sequences. Required keys of a schedule have no default in
0.19.6; here it is null.

Source: DeepSpeed 0.19.6, `runtime/data_pipeline/`; `nebula/` and `datastates/` for saves in the background.
"""

from __future__ import annotations

from typing import Any, Literal

from fds.config.rows import MissingKeyError, check_needed, check_order, contradiction, declare

ScheduleType = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]
OF_SCHEDULES = {  # in 0.19.6; `custom` is a function of the program
    "fixed_linear": ("schedule_config.total_curriculum_step", "schedule_config.difficulty_step"),
    "fixed_root": (
        "schedule_config.total_curriculum_step",
        "schedule_config.difficulty_step",
        "schedule_config.root_degree",
    ),
    "fixed_discrete": ("schedule_config.difficulty", "schedule_config.max_step"),
}
_REQUIRED = ("max_train_batch_size", "micro_batch_sizes")
_VERSIONS = (0.1, 0.2)

_TABLE = """
@sampler: `fds.data.CurriculumSampler`
@batches: `fds.data.batches_by_tokens`
@switches: n/a: the switches of the techniques below it decide, in 0.19.6 too

CurriculumScheduleConfig [schedules.fixed_linear|schedules.fixed_root(=)]: How the difficulty grows with the step;
        which keys are used depends on `schedule_type`.
    total_curriculum_step: int|None = None; steps; > 0 | when the greatest difficulty is reached: fixed_linear,
        fixed_root | (total=)
    difficulty_step: int|None = None; > 0 | difficulties are rounded down to multiples of this: fixed_linear,
        fixed_root | (=)
    root_degree: int|None = None; > 0 | 2 grows like the square root, 3 like the cube root, 1 linearly: fixed_root |
        schedules.fixed_root(degree=)
    difficulty: tuple[int, ...]|None = None | one difficulty for each stretch of steps: fixed_discrete |
        schedules.fixed_discrete(difficulties=)
    max_step: tuple[int, ...]|None = None; steps | last step of each stretch but the last, which has no end:
        fixed_discrete | schedules.fixed_discrete(ends=)
    ! intervals

CurriculumConfig [schedules.fixed_linear|schedules.fixed_root(=)]: `curriculum_learning`, as it was before data
        efficiency: training starts with short sequences.
    enabled: bool = False | tell the model at each step how long sequences may be | curriculum(): the step cuts the
        batch, and the model is told nothing
    curriculum_type: str|None = None | what is made easier; only 'seqlen' does anything | curriculum(how=)
    min_difficulty: int|None = None; tokens; > 0 | length at the first step | (least=)
    max_difficulty: int|None = None; tokens; > 0 | length from the end of the schedule on |
        schedules.fixed_linear|schedules.fixed_root|schedules.stay_at(greatest=)
    schedule_type: ScheduleType|None = None | how lengths grow from the least to the greatest | curriculum(schedule=):
        which of them; `custom` is a function of the program
    schedule_config: CurriculumScheduleConfig | the numbers of the schedule
    ! order min_difficulty max_difficulty
    ! schedule

CurriculumMetricConfig [@sampler]: One metric of difficulty: files written by the analysis of
        the data, and a schedule.
    index_to_sample_path: str|None = None | file of the samples in the order of difficulty
    index_to_metric_path: str|None = None | file of the difficulties in that order
    difficulty_type: Literal["value", "percentile"]|None = None | whether difficulties are values of the measure or
        hundredths of all samples
    clustering_type: Literal["schedule_based", "single_cluster"]|None = None | draw from clusters that grow by the
        schedule, or from all, which the program then eases
    min_difficulty: int|None = None | greatest difficulty that is let through at first
    max_difficulty: int|None = None | greatest difficulty from the end of the schedule on
    schedule_type: ScheduleType|None = None | how the difficulty grows from the least to the greatest
    = schedule_config
    ! order min_difficulty max_difficulty

CurriculumSamplingConfig: `curriculum_learning` of data sampling: batches are drawn from the samples that all metrics
        allow.
    enabled: bool = False | draw easy samples first | `fds.data.CurriculumSampler`: of the loader of
        `initialize(training_data=)`
    data_cluster_path: str|None = None | folder for the indices of samples of like difficulty |
        `fds.data.CurriculumSampler(folder=)`: of several metrics
    curriculum_metrics: dict[str, CurriculumMetricConfig] = {} | measures of difficulty, by name
    ! needed enabled curriculum_metrics

DynamicBatchingConfig [@batches]: `dynamic_batching` of data sampling: batches with about the same number of tokens,
        not of rows.
    enabled: bool = False | fill batches by tokens | @batches
    max_tokens: int|None = None; tokens; > 0 | tokens that a microbatch may have at most |
        `fds.data.batches_by_tokens(max_tokens=)`: padding counts
    min_batch_size: int = 1; rows; >= 0 | rows that a microbatch must have at least |
        `fds.data.batches_by_tokens(min_rows=)`
    max_batch_size: int|None = None; rows; > 0; no null | rows that a microbatch may have at most |
        `fds.data.batches_by_tokens(max_rows=)`
    lr_scaling_method: Literal["linear", "sqrt", "none"] = "linear" | how the learning rate follows the rows of a
        batch | `fds.data.TokenBatches.rate(method=)`: for a base of `train_batch_size` rows
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = "dataloader" | in which order samples are
        packed: as they come, shuffled, or short ones first | `fds.data.batches_by_tokens(order=)`
    metrics_path: str|None = None | folder of the lengths of samples, measured there if it is empty |
        `fds.data.analyse(out=)`: the metric `seqlen`, in the files of fds
    verbose: bool = False | print each batch | n/a: a step prints nothing
    ! order min_batch_size max_batch_size
    ! needed enabled max_tokens

DataSamplingConfig: `data_sampling`: how batches are drawn from the data set.
    enabled: bool = False | draw batches by what is below | @switches
    num_epochs: int = 1000; epochs; > 0 | how often the data set is gone through at most | n/a: one iteration of
        the loader is an epoch, and the program says how many
    num_workers: int = 0; processes; >= 0 | processes of a rank that load samples |
        `fds.data.DistributedLoader(num_workers=)`: where one of the two below is on
    pin_memory: bool = False | load into page-locked memory | `fds.data.DistributedLoader(pin_memory=)`: likewise
    curriculum_learning: CurriculumSamplingConfig | easy samples first
    dynamic_batching: DynamicBatchingConfig | batches of about as many tokens

TokensScheduleConfig [schedules.fixed_linear(=)]: The numbers of the schedule of kept tokens.
    require_steps: int|None = None; steps; > 0 | when all tokens are kept | (total=)
    seq_per_step: int|None = None; tokens; > 0 | kept tokens are rounded down to multiples of this | (difficulty_step=)

KeptTokensConfig [schedules.fixed_linear(=)]: `random_ltd_schedule`: how many tokens of a sequence the dropping layers
        compute.
    min_value: int|None = None; tokens; > 0 | kept at the first step | (least=)
    max_value: int|None = None; tokens; > 0 | kept at the end: the length of sequences | (greatest=)
    schedule_type: Literal["fixed_linear"]|None = None | how they grow from the least to all | n/a: there is one kind
    schedule_config: TokensScheduleConfig | the numbers of the schedule
    ! order min_value max_value

LayerTokenRateConfig [n/a: the scheduler says how long it takes, in steps in which no token is dropped]:
        `layer_token_lr_schedule`: a learning rate by computed tokens, not by steps. 0.19.6 refuses it.
    enabled: bool = False | let the learning rate follow tokens | schedules.by_layer_tokens(): around the scheduler's
    total_layer_tokens: int|None = None; tokens; > 0 | tokens of all layers in all of the run
    warmup_type: str|None = None | shape of the warm-up
    warmup_layer_tokens: int|None = None; tokens; >= 0 | tokens of all layers in the warm-up

RandomLtdConfig [random_ltd(=)]: `random_ltd`: most layers compute a random subset of the tokens, which grows to all of
        them.
    enabled: bool = False | drop tokens at random in some layers | random_ltd()
    total_layer_num: int|None = None; layers; > 0 | layers of the model | schedules.by_layer_tokens(total=)
    random_ltd_layer_num: int|None = None; layers; > 0 | layers that drop tokens | n/a: as many as
        `random_ltd_layer_id` has
    random_ltd_layer_id: tuple[int, ...]|None = None | which layers those are: the numbers in their modules' names |
        (layers=): the last part of a name, and all of it
    model_mask_name: str|None = None | argument of a layer that is its attention mask | n/a: arguments are known by
        their names and shapes
    model_type: Literal["encoder", "decoder"]|None = None | whether masks are gathered by token or cut to the kept
        length | n/a: masks are gathered, which is right for both
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"]|None = None | which of rows and tokens is the first
        dim of what layers pass on | (order=)
    random_ltd_schedule: KeptTokensConfig | how many tokens are kept, by step
    layer_token_lr_schedule: LayerTokenRateConfig | a learning rate by tokens
    ! length random_ltd_layer_num random_ltd_layer_id
    ! order random_ltd_layer_num total_layer_num
    ! kept_tokens

DataRoutingConfig: `data_routing`: which tokens go through which layers.
    enabled: bool = False | route tokens by what is below | @switches
    random_ltd: RandomLtdConfig | random layerwise token dropping

DataEfficiencyConfig: `data_efficiency`: less data for the same loss.
    enabled: bool = False | use what is below | @switches
    seed: int = 1234 | of what is drawn at random in sampling | `fds.data.CurriculumSampler(key=)`: and of batches by
        tokens
    data_sampling: DataSamplingConfig | how batches are drawn
    data_routing: DataRoutingConfig | which tokens layers compute

ModelInfoConfig [part of autotuning.enabled]: `autotuning.model_info`: properties of the model, which would otherwise be
        measured by a run.
    profile: bool = False | run once only to find out what follows, and the memory of activations
    num_params: int|None = None; elements; >= 0 | parameters of the whole model; null: count
    hidden_size: int|None = None; elements; > 0 | width of the model, from which bucket sizes follow
    num_layers: int|None = None; layers; > 0 | layers of the model

AutotuningConfig: `autotuning`: the experiments, and which settings they try.
    enabled: bool = False | run experiments, to find the fastest settings | `fds tune`: a run by itself is
        one experiment
    fast: bool = True | try ZeRO stages and microbatch sizes only, no buckets
    results_dir: str = "autotuning_results" | directory for what the experiments measured
    exps_dir: str = "autotuning_exps" | directory for the settings of each experiment
    overwrite: bool = True; docs False | run again what has a result, instead of reading it
    start_profile_step: int = 3; steps; >= 0; old start_step | step at which an experiment starts its clock, after some
        to warm up
    end_profile_step: int = 5; steps; >= 0; old end_step | step at which it stops its clock
    metric: Literal["throughput", "latency", "flops"] = "throughput" | what ranks experiments: samples a second, seconds
        a step, or FLOPs a second and GPU
    metric_path: str|None = None | file for what an experiment measured; null: in the working directory
    tuner_type: Literal["gridsearch", "random", "model_based"] = "gridsearch"; docs "model_based" | which experiment is
        next: in order, at random, or by a fitted model of cost
    tuner_early_stopping: int = 5; experiments; >= 0 | experiments without a better one after which the search ends
    tuner_num_trials: int = 50; experiments; >= 0 | most experiments in one search
    arg_mappings: dict[str, str]|None = None | key of this JSON -> option of the script that sets the same; experiments
        set both
    model_info: ModelInfoConfig|None = None | what is known of the model; null: a run finds out
    model_info_path: str|None = None | file for what that run finds out; null: in the working directory
    mp_size: int = 1; ranks; > 0 | ranks that share one copy of the model
    max_train_batch_size: int|None = None; rows; > 0 | largest whole batch of an update to try; null: no bound
    min_train_batch_size: int = 1; rows; > 0 | least whole batch of an update to try
    max_train_micro_batch_size_per_gpu: int = 1024; rows; > 0 | largest microbatch to try
    min_train_micro_batch_size_per_gpu: int = 1; rows; > 0 | least microbatch to try
    num_tuning_micro_batch_sizes: int = 3; sizes; > 0 | microbatch sizes to try between the bounds
    ! order start_profile_step end_profile_step if enabled
    ! order min_train_batch_size max_train_batch_size if enabled
    ! order min_train_micro_batch_size_per_gpu max_train_micro_batch_size_per_gpu if enabled

ElasticityConfig: `elasticity`: the batch sizes and numbers of GPUs that are searched.
    enabled: bool = False | choose the batch sizes so that many numbers of GPUs fit |
        accumulate|pipeline(num_microbatches=): on this number of ranks; `fds.elastic.batches(config)` has them all
    max_train_batch_size: int = 2000; rows; > 0 | largest whole batch of an update
    micro_batch_sizes: tuple[int, ...] = (2, 4, 6); rows | rows that a GPU may compute at once
    min_gpus: int = 1; GPUs; >= 1 | fewest GPUs that must fit
    max_gpus: int = 10000; GPUs; >= 1 | most GPUs that must fit
    min_time: int = 0; minutes; >= 0 | running time before the job may be scaled; 0: not known |
        `fds.elastic.batches(config).config.min_time`: for a scheduler; 0.19.6 does not use it
    prefer_larger_batch: bool = True; old prefer_large_batch | of batches that as many numbers of GPUs divide, take the
        largest, not the least
    ignore_non_elastic_batch_info: bool = False | overrule batch sizes given outside this section; else they are refused
    version: float = 0.2; >= 0.1; <= 0.2 | how to search: 0.1 counts GPUs; 0.2 counts nodes and knows model parallelism
    num_gpus_per_node: int = 1; GPUs; >= 1 | GPUs of a node, which come and go together
    model_parallel_size: int = 1; GPUs; >= 1 | GPUs that share one copy of the model
    ! required if enabled
    ! sizes if enabled
    ! gpus if enabled
"""


def _check_intervals(config: Any) -> None:
    levels, ends = config.difficulty, config.max_step
    if isinstance(levels, tuple) and isinstance(ends, tuple) and len(levels) != len(ends) + 1:
        raise contradiction(
            config,
            "intervals of steps and their ends do not match",
            "difficulty",
            "max_step",
            want="one difficulty more than ends: the last interval has no end",
        )
    if isinstance(ends, tuple) and list(ends) != sorted(ends):
        raise contradiction(config, "the ends of intervals decrease", "max_step", want="increasing steps")


def _check_schedule(config: Any) -> None:
    needed = OF_SCHEDULES.get(config.schedule_type, ())
    check_needed(config, "enabled", "min_difficulty", "max_difficulty", "schedule_type", *needed)


def _check_kept_tokens(config: Any) -> None:
    numbers = ("min_value", "max_value", "schedule_config.require_steps", "schedule_config.seq_per_step")
    check_needed(config, "enabled", "random_ltd_layer_id", *(f"random_ltd_schedule.{name}" for name in numbers))
    if config.enabled:
        check_needed(config, "layer_token_lr_schedule.enabled", "total_layer_num")


def _check_required(config: Any) -> None:
    if missing := [name for name in _REQUIRED if name not in config.given]:
        names = " and ".join(missing)
        raise MissingKeyError(
            "elasticity has no sizes to search",
            where=", ".join(["enabled", *missing]),
            got=f"enabled=True without {names}",
            want=f"{names}, given explicitly",
        )


def _check_sizes(config: Any) -> None:
    most, sizes = config.max_train_batch_size, config.micro_batch_sizes
    if not isinstance(sizes, tuple):  # "auto"
        return
    if not sizes or min(sizes) < 1:
        want = "a list of at least one number, each at least 1"
        raise contradiction(config, "microbatches need sizes of at least 1", "micro_batch_sizes", want=want)
    if isinstance(most, int) and max(sizes) > most:
        want = f"each of micro_batch_sizes at most {most}"
        raise contradiction(config, "a microbatch is larger than the batch", *_REQUIRED, want=want)


def _check_gpus(config: Any) -> None:
    check_order(config, "min_gpus", "max_gpus")
    version, node, model = config.version, config.num_gpus_per_node, config.model_parallel_size
    if isinstance(version, float) and version not in _VERSIONS:
        want = " or ".join(map(str, _VERSIONS))
        raise contradiction(config, "there is no such version", "version", want=want)
    if not isinstance(model, int):  # "auto"
        return
    if version == _VERSIONS[0] and model > 1:
        names = "version", "model_parallel_size"
        raise contradiction(config, "this version does not support model parallelism", *names, want="version 0.2")
    if isinstance(node, int) and node % model:
        names = "num_gpus_per_node", "model_parallel_size"
        want = "a model_parallel_size that divides num_gpus_per_node"
        raise contradiction(config, "copies of the model do not fill a node", *names, want=want)


declare(globals(), _TABLE)


declare(
    globals(),
    """
ThroughputTimerConfig [n/a: a step prints nothing, it returns metrics]: `timers.throughput`: how the samples per second
        of a progress line are measured.
    enabled: bool = True | whether to time updates, for the rate in the progress line
    synchronized: bool = True | whether to wait for the device before a clock is read: exact, but slower

TimersConfig: `timers`: timers that run by default.
    throughput: ThroughputTimerConfig | the clock of samples per second

LoggingConfig: Keys of the top level on what the engine prints and measures.
    steps_per_print: int|float|None = None; steps; > 0; <= Infinity; docs 10 | updates between two lines of progress;
        null or Infinity: no such line | `config.monitor(mesh)`: by fds.monitors.Console(every=)
    wall_clock_breakdown: bool = False | measure how long forward, backward, reduction and update take, of every step |
        `config.timed(mesh)`: of the calls that steps_per_print names, or of all
    memory_breakdown: bool = False | measure how much memory is in use before and after the parts of a step |
        `config.memory_breakdown(mesh)`: of the calls that steps_per_print names, or of all
    dump_state: bool = False | print what the engine knows after it has started | `config.dump_state(state, step)`: as
        `fds.initialize` does with the first state
    log_level: Literal["debug", "info", "warning", "error", "critical", "DEBUG", "INFO", "WARNING", "ERROR",
        "CRITICAL"]|None = None | least severe message that is printed; null leaves it as it is | n/a: nothing is
        logged: what must be said is raised or warned of
    timers: TimersConfig | clocks that run unless they are switched off

TensorBoardConfig: `tensorboard`: write metrics as TensorBoard events.
    enabled: bool = False | write metrics as TensorBoard events, on rank 0 | `config.monitor(mesh)`
    output_path: str|None = ""; docs None; no null | directory of all jobs; empty: one below the working directory
    job_name: str = "DeepSpeedJobName" | directory of this job, below output_path

CsvMonitorConfig: `csv_monitor`: write metrics as CSV, a file for each.
    enabled: bool = False | append metrics to CSV files, one a metric, on rank 0 | `config.monitor(mesh)`
    = output_path, job_name

WandbConfig: `wandb`: send metrics to Weights & Biases.
    enabled: bool = False | send metrics to Weights & Biases, from rank 0 | `config.monitor(mesh)`
    group: str|None = None | what runs are grouped by there
    team: str|None = None | account that the run belongs to; null: the user's own
    project: str = "deepspeed" | project that the run is filed under

CometConfig: `comet`: send metrics to Comet. What is null here, its own files and environment variables may say.
    enabled: bool = False | send metrics to Comet, from rank 0 | `config.monitor(mesh)`
    samples_log_interval: int = 100; samples; > 0 | samples of training between two values of a metric that are sent
    project: str|None = None | project that the experiment is filed under
    workspace: str|None = None | account that the project belongs to
    api_key: str|None = None | secret that proves who sends; better kept out of a file
    experiment_name: str|None = None | title that people see
    experiment_key: str|None = None | identifier of an experiment, 32 to 50 letters and digits
    online: bool|None = None; docs True | send at once (null does so too), or keep on disk to be sent later
    mode: Literal["get", "create", "get_or_create"]|None = None; docs "get_or_create" | continue the experiment of
        experiment_key, start another, or whichever is possible (null)

CommsLoggerConfig: `comms_logger`: log the time and bandwidth of collectives.
    enabled: bool = False | time every collective, waiting for it, and sum up by kind and message size |
        `config.messages(mesh)`: it waits for nothing
    verbose: bool = False | print each collective as it ends, not only their sums
    prof_all: bool = True | log collectives of every kind
    debug: bool = False | add the calling function to the name of each
    prof_ops: tuple[str, ...] = () | names of the kinds to log, where prof_all is false

FlopsProfilerConfig [profiled(=)]: `flops_profiler`: count the work of one step, module by module.
    enabled: bool = False | count operations, parameters and time of one step, by module | (): on rank 0
    recompute_fwd_factor: float = 0.0; >= 0 | forwards that backward computes again: 1 where all activations are
        checkpointed | n/a: what backward computes again is counted, not assumed
    profile_step: int = 1; steps; >= 0 | the step that is profiled; some before it should warm up | (at=)
    module_depth: int = -1; levels; >= -1 | levels of nested modules that are told of; -1: all | (depth=): -1 is None
    top_modules: int = 1; modules; >= 0 | most expensive modules that are named at each level | (top=)
    detailed: bool = True | print the profile of every module, not only the sums
    output_file: str|None = None | file to write the profile to; null: print it | (file=)

WriterConfig [n/a: fds.save and fds.save_async have one writer, past the kernel's cache where they can]:
        `checkpoint.writer`: DeepSpeed's fast writer.
    type: Literal["mock", "python", "fast", "MOCK", "PYTHON", "FAST"] = "FAST" | which writer
    decoupled: bool = False | write while training goes on | `fds.save_async(dir, state, step)`
    io_buffer_size: int = 67_108_864; bytes; > 0 | size of its buffer
    io_buffer_double: bool = True | have two of them
    show_statistics: bool = False | print what it did
    data_parallel: Literal["replica", "socket", "machine", "REPLICA", "SOCKET", "MACHINE"]|None = None | which ranks
        share the writing | n/a: all ranks that hold a part write it
    io_multiplier: float = 1 | writers per rank

ParallelWriteConfig: `checkpoint.parallel_write`: which ranks of a pipeline write what.
    pipeline_stage: bool = False | spread a stage's layers over its data ranks | n/a: every rank writes its own share

CheckpointConfig: `checkpoint`: saving and loading.
    tag_validation: Literal["Ignore", "Warn", "Fail", "ignore", "warn", "fail", "IGNORE", "WARN", "FAIL"] = "WARN" |
        what to do where ranks name different tags | `fds.save(dir, state, step, tag_validation=...)`: in lower case;
        fds fails unless told
    checkpoint_serialization: bool = True | pickle it as torch does | n/a: tensors are safetensors, the rest is JSON
    load_universal: bool = False | load one that was made universal | `fds.load(dir, step, params)`: every save is;
        fds.import_deepspeed reads DeepSpeed's
    use_node_local_storage: bool = False | write to disks that ranks do not share | `fds.save(dir, state, step,
        local=True)`
    parallel_write: ParallelWriteConfig | who writes what of a pipeline
    writer: WriterConfig|None = None | DeepSpeed's fast writer

NebulaConfig: `nebula`: Azure's service for saves in the background.
    enabled: bool = False | save in the background | `fds.save_async(...)`: to any file system
    persistent_storage_path: str|None = None | folder of saves | `fds.save_async(path, ...)`
    persistent_time_interval: int = 100; seconds; > 0 | time from one save that lasts to the next |
        `fds.save_async(...)`: the program decides when
    num_of_version_in_retention: int = 2; saves; > 0 | saves that are kept | `fds.save_async(..., keep=)`
    nebula_load_path: str|None = None | folder to go on from; null: that of saves | `fds.load(path, ...)`
    enable_nebula_load: bool = True | load what the service wrote, not torch.save | n/a: `fds.load` sees what a save is

LoadingConfig: Keys of the top level on data loading and background saves.
    datastates_ckpt: bool|dict[str, Any]|None = False | save in the background by DataStates; an object, with
        host_cache_size in GiB, or true | `fds.save_async(...)`: the state waits in the memory of the run, or in a copy
        of it
    dataloader_drop_last: bool = False | leave out the last batch of an epoch where it is short |
        `fds.data.DistributedLoader(last=)`: drop, or wrap, which fills it up
""",
)
