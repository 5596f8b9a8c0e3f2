"""Progress, timers, monitors, logs of messages, profiles, saves and the loading of data.

Source: DeepSpeed 0.19.6, `nebula/` and `datastates/` for saves in the background.
"""

from __future__ import annotations

from fds.config.rows import declare

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
