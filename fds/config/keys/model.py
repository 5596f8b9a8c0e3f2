"""Keys that change the model while it is trained: quantization, pruning, sparse attention, layer drop, generation.

Source: `compression/config.py`, `runtime/config.py`, `runtime/eigenvalue.py`, `runtime/hybrid_engine.py` and
`runtime/progressive_layer_drop.py` of DeepSpeed 0.19.6; Zhang and He 2020, arXiv:2010.13369, for layers that are
dropped: a layer is kept with probability (1 - theta) * exp(-gamma * t) + theta in step t.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from fds import attention_layouts
from fds.attention_layouts import AttentionLayout
from fds.config.field import AUTO, keys
from fds.config.record import Config
from fds.config.rows import MissingKeyError, check_needed, check_order, contradiction, declare

_OF_ALL = frozenset({"mode", "block", "different_layout_per_head"})
_TWO_SIDED = frozenset({"attention", "horizontal_global_attention"})
_INDICES = frozenset({"global_block_indices", "global_block_end_indices"})
READS = {
    "dense": _OF_ALL,
    "fixed": _OF_ALL | _TWO_SIDED | {"num_local_blocks", "num_global_blocks", "num_different_global_patterns"},
    "variable": _OF_ALL | _TWO_SIDED | _INDICES | {"num_random_blocks", "local_window_blocks"},
    "bigbird": _OF_ALL | {"num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"},
    "bslongformer": _OF_ALL | _INDICES | {"num_sliding_window_blocks"},
    "local_sliding_window": _OF_ALL
    | {"num_sliding_window_blocks", "attention"},  # a class of 0.19.6, no mode of its JSON
}


class SparseAttentionConfig(Config):
    """`sparse_attention`: a pattern of blocks, `fixed` by default. It is a rule: a function of heads and blocks.

    `fds.hf.sparsify` and `fds.nn.SparseSelfAttention` take it; `fds.initialize` makes a model of transformers sparse by
    it.

    >>> SparseAttentionConfig(mode="bigbird", num_random_blocks=1)(heads=2, blocks=8)
    AttentionLayout(2 heads, 8 x 8 blocks of 16 tokens, 53% listed)
    """

    def __call__(self, heads: int, blocks: int, *, key: int = 0) -> AttentionLayout:
        """Return the layout of so many heads and blocks; random blocks follow from the key.

        Raises `AttentionLayoutError` for numbers that do not fit the pattern.
        """
        pattern = getattr(attention_layouts, self.mode)
        arguments = {name: self[name] for name in READS[self.mode]} | {"key": key}
        if self.mode == "local_sliding_window" and "attention" not in self.given:
            del arguments["attention"]  # as its class has it
        if not self.different_layout_per_head and "num_different_global_patterns" in arguments:
            arguments["num_different_global_patterns"] = 1  # documented as 4, beside one layout
        taken = inspect.signature(pattern).parameters
        return pattern(heads, blocks, **{name: value for name, value in arguments.items() if name in taken})


_TABLE = """
ModuleGroupConfig [part of shared_parameters.enabled]: The modules of a group.
    modules: tuple[str, ...]|str = "*" | regular expressions for names of modules; *: all that can be
    related_modules: tuple[tuple[str, ...], ...]|None = None | for each of `modules`, those that lose inputs where it
        loses outputs

KeptShareConfig: `params` of a group of pruning.
    dense_ratio: float|None = None; >= 0; <= 1 | share that is kept | part of shared_parameters.enabled

PruningGroupConfig(ModuleGroupConfig): A group of pruning, of any kind.
    params: KeptShareConfig | how much is kept

SparsePruningSharedConfig [prune_weights(=)]: `shared_parameters` of sparse pruning. The keys below `method` are for
        snip_momentum, which takes all linear layers and convolutions and has no groups.
    enabled: bool = False | make single weights zero | prune_weights(): one for each group
    schedule_offset: int = 1000; steps; >= 0; docs 0 | updates before it begins | prune_weights(offset=)
    method: Literal["l1", "topk", "snip_momentum"] = "l1" | how weights are ranked: l1, by size, once; topk, by scores
        that are learned; snip_momentum, in blocks, by sums of weight times gradient | (=)
    block_pattern: str = "4x1" | blocks that go as one (4x1), or how many of how many stay (2:4) |
        prune_weights(block=)
    dense_ratio: float = 0.1; > 0; <= 1 | share of weights that is kept at the end, 0.02 or more |
        prune_weights(density=)
    schedule_offset_end: int|None = None; steps; >= 0; no null | updates after which no more is pruned; absent:
        schedule_offset | prune_weights(end=)
    schedule_offset_stride: int = 1; steps; > 0 | updates from one pruning to the next | prune_weights(stride=)
    excluded_modules: tuple[str, ...] = () | modules that keep all weights: regular expressions for their names |
        part of method
    ! end

SparsePruningConfig: `sparse_pruning`.
    shared_parameters: SparsePruningSharedConfig | for all groups
    different_groups: dict[str, PruningGroupConfig] = {} | groups of modules, by name | part of
        shared_parameters.enabled
    ! shares

RowPruningSharedConfig [prune_rows|prune_channels(=)]: `shared_parameters` of row and channel pruning.
    enabled: bool = False | make whole outputs zero | prune_rows|prune_channels(): one for each group
    schedule_offset: int = 1000; steps; >= 0; docs 0 | updates before it begins | prune_rows|prune_channels(offset=)
    method: Literal["l1", "topk"] = "l1" | how weights are ranked: l1, by size, once; topk, by scores that are learned |
        (=)

RowPruningConfig: `row_pruning` and `channel_pruning`, which have the same keys.
    shared_parameters: RowPruningSharedConfig | for all groups
    = different_groups
    ! groups dense_ratio

HeadPruningSharedConfig [prune_heads(=)]: `shared_parameters` of head pruning.
    enabled: bool = False | make whole heads zero | prune_heads(): one for each group
    schedule_offset: int = 1000; steps; >= 0; docs 0 | updates before it begins | prune_heads(offset=)
    method: Literal["l1", "topk"] = "topk" | how heads are ranked: l1, by size, once; topk, by scores that are learned |
        (=)
    num_heads: int|None = None; heads; > 0 | heads of a layer before pruning | (=)
    ! needed enabled num_heads

HeadPruningConfig: `head_pruning`.
    shared_parameters: HeadPruningSharedConfig | for all groups
    = different_groups
    ! groups dense_ratio

MixedQuantizationConfig [quantize_weights(=)]: `fp16_mixed_quantize`: a weighted mean of weights and
        quantized weights, whose quantized share grows.
    enabled: bool = False | mix them, where bits fall | quantize_weights(mixing=)
    quantize_change_ratio: float = 0.001; >= 0 | how much the quantized share grows with a step |
        quantize_weights(mixing=)

WeightQuantizationSharedConfig [quantize_weights(=)]: `shared_parameters` of weight quantization.
    enabled: bool = False | train with quantized weights | quantize_weights(): one for each group, of the
        weights of its modules, which fds.initialize reads
    quantizer_kernel: bool = False | quantize in a fused kernel | n/a: which kernel computes a formula is fds's choice
    schedule_offset: int = 0; steps; >= 0 | updates before it begins | quantize_weights(offset=)
    quantize_groups: int = 1; > 0 | parts of a weight, each with a scale of its own | quantize_weights(groups=): "rows"
        of embeddings that are quantized where they are used
    quantize_verbose: bool = False | print when bits change | n/a: a step prints nothing
    quantization_type: Literal["symmetric", "asymmetric"] = "symmetric" | whether the range is about zero or from the
        least to the greatest value | quantize_weights(symmetric=)
    rounding: Literal["nearest", "stochastic"] = "nearest" | how values are rounded to the grid
    quantize_weight_in_forward: bool = False | quantize where a weight is used, not where it is updated; float32 needs
        this | quantize_weights(bits=): true, those at the end at once
    fp16_mixed_quantize: MixedQuantizationConfig | mix both weights for a while

WeightBitsConfig [quantize_weights(=)]: `params` of a group of weight quantization.
    start_bits: int|None = None; bits; > 0 | bits of a weight at first | quantize_weights(bits=)
    target_bits: int|None = None; bits; > 0 | bits of a weight at the end | quantize_weights(bits=)
    quantization_period: int = 1; steps; >= 0 | steps for the first bit to go; each later one takes twice |
        quantize_weights(period=)
    ! order target_bits start_bits

WeightQuantizationGroupConfig(ModuleGroupConfig): A group of weight quantization.
    params: WeightBitsConfig | bits, and how fast they go

WeightQuantizationConfig: `weight_quantization` of compression.
    shared_parameters: WeightQuantizationSharedConfig | for all groups
    different_groups: dict[str, WeightQuantizationGroupConfig] = {} | groups of modules, by name | part of
        shared_parameters.enabled
    ! groups start_bits target_bits

ActivationQuantizationSharedConfig [quantize_activations(=)]: `shared_parameters` of activation quantization.
    enabled: bool = False | train with quantized inputs of layers | quantize_activations(): one for each group
    quantization_type: Literal["symmetric", "asymmetric"] = "symmetric" | whether the range is about zero or from the
        least to the greatest value | quantize_activations(symmetric=)
    range_calibration: Literal["dynamic", "static"] = "dynamic"; docs "static" | take the range from each token, or from
        a running mean | quantize_activations(range=)
    schedule_offset: int = 1000; steps; >= 0; docs 0 | updates before it begins | quantize_activations(offset=)

ActivationBitsConfig: `params` of a group of activation quantization.
    bits: int|None = None; bits; > 0 | bits of an activation; 0.19.6 has 4 and 8 | quantize_activations(bits=)

ActivationQuantizationGroupConfig(ModuleGroupConfig): A group of activation quantization.
    params: ActivationBitsConfig | bits

ActivationQuantizationConfig: `activation_quantization` of compression.
    shared_parameters: ActivationQuantizationSharedConfig | for all groups
    different_groups: dict[str, ActivationQuantizationGroupConfig] = {} | groups of modules, by name | part of
        shared_parameters.enabled
    ! groups bits

LayerReductionConfig: `layer_reduction`: a student of fewer layers is initialized with layers of a teacher.
    enabled: bool = False | copy layers of a teacher into a student | `config.reduce_layers(params)`: before `step.init`
    keep_number_layer: int|None = None; layers; > 0 | layers of the student
    module_name_prefix: str|None = None | path of the list of layers, in both
    teacher_layer: tuple[int, ...]|None = None | which layer of the teacher each of the student's gets
    other_module_name: tuple[str, ...]|None = None | paths of further modules that are copied
    ! length keep_number_layer teacher_layer

CompressionConfig: `compression_training`.
    layer_reduction: LayerReductionConfig | fewer layers
    weight_quantization: WeightQuantizationConfig | fewer bits for weights
    activation_quantization: ActivationQuantizationConfig | fewer bits for what layers take
    sparse_pruning: SparsePruningConfig | fewer weights, anywhere or in blocks
    row_pruning: RowPruningConfig | fewer outputs of linear layers
    head_pruning: HeadPruningConfig | fewer heads of attention
    channel_pruning: RowPruningConfig | fewer channels of convolutions

EigenvalueConfig [`config.eigenvalues(loss, params, batch)`: fds.initialize calls it where bits fall]: `eigenvalue`: the
        curvature of the loss in each layer, which sets how fast its bits are reduced.
    enabled: bool = False | measure curvature by power iteration
    verbose: bool = False | print them | n/a: they are returned
    max_iter: int = 100; iterations; > 0 | iterations at most
    tol: float = 0.01; >= 0 | relative change of the eigenvalue at which iteration ends
    stability: float = 1e-6; >= 0 | added to what is divided by
    gas_boundary_resolution: int = 1; updates; > 0 | updates from one measurement to the next | n/a: it is measured
        where it is called
    layer_name: str = "bert.encoder.layer" | path of the list of layers
    layer_num: int = 0; layers; >= 0 | layers of that list that are measured

QuantizeTrainingConfig: `quantize_training`: mixture of quantization (MoQ). 0.19.6 reads no other keys, and refuses it
        if enabled.
    eigenvalue: EigenvalueConfig | curvature of layers

WeightQuantizationPlacedConfig [n/a: each of the two below has its own]: `weight_quantization` of the top level: weights
        that are stored quantized and not trained.
    enabled: bool = True | nothing, in 0.19.6: one of the two below asks | n/a: nothing reads it
    num_bits: int = 8; bits; > 0 | bits of a weight
    q_type: Literal["symmetric", "asymmetric"] = "symmetric" | whether the range is about zero
    q_groups: int = 1; > 0 | parts of a weight, each with a scale
    quantized_initialization: dict[str, Any] = {} | num_bits, group_size, group_dim, symmetric: of all weights, as stage
        3 makes them | not yet but for None, {}: weights that are quantized as they are made
    post_init_quant: dict[str, Any] = {} | the same by name of module, once the model is made | not yet but for None,
        {}: quantized weights for inference

SparseAttentionConfig [`config.sparse_attention(heads, blocks)`]:
    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"] = "fixed" | kind of
        pattern; dense computes every block, as attention without this section does | `fds.hf.sparsify(model,
        config.sparse_attention)`: fds.initialize does so
    block: int = 16; tokens; > 0 | side of a square block of the attention matrix
    different_layout_per_head: bool = False | lay out every head anew, not all as the first
    num_local_blocks: int = 4; blocks; > 0 | side of the local windows (fixed)
    num_global_blocks: int = 1; blocks; > 0 | blocks that see all and are seen by all: of each window (fixed), or the
        first ones (bigbird)
    attention: Literal["bidirectional", "unidirectional"] = "bidirectional" | whether tokens see later ones (fixed,
        variable; local_sliding_window, where they do not unless it is given)
    horizontal_global_attention: bool = False | global blocks also see all others, where attention is bidirectional
        (fixed, variable)
    num_different_global_patterns: int = 1; > 0; docs 4 | choices of the global blocks in a window that heads take in
        turn (fixed)
    num_random_blocks: int = 0; blocks; >= 0 | random blocks in each row of blocks (variable, bigbird)
    local_window_blocks: tuple[int, ...] = (4,); blocks | sides of the local windows, in order; the last one repeats
        (variable)
    global_block_indices: tuple[int, ...] = (0,) | blocks that see all and are seen by all, or where ranges of them
        start (variable, bslongformer)
    global_block_end_indices: tuple[int, ...]|None = None | where these ranges end, exclusive; null: a block each
        (variable, bslongformer)
    num_sliding_window_blocks: int = 3; blocks; > 0 | width of the band around the diagonal (bigbird, bslongformer,
        local_sliding_window)
    ! pattern

ProgressiveLayerDropConfig [layer_drop(=)]: `progressive_layer_drop`.
    enabled: bool = False | leave out layers at random | layer_drop(): the step skips layers, and the model is told
        nothing
    theta: float = 0.5; >= 0; <= 1 | probability of keeping a layer in the end: the last one
    gamma: float = 0.001; >= 0 | how fast it falls to that: the rate of an exponential, by step

HybridEngineConfig: `hybrid_engine`: the trained model also generates, with inference kernels.
    enabled: bool = False | generate with the parameters that are trained | not yet: generation between updates
    max_out_tokens: int = 512; tokens; > 0 | length of prompt and answer at most
    inference_tp_size: int = 1; ranks; > 0 | ranks that share a layer in generation
    release_inference_cache: bool = False | free the keys and values of attention before training goes on
    pin_parameters: bool = True | gather all layers of stage 3 once for an answer, not layer by layer
    tp_gather_partition_size: int = 8; layers; > 0 | layers that are gathered at once, to be shared
    enable_cuda_graph: bool = False | replay the kernels of a token as a graph
    ! graph if enable_cuda_graph
"""


def _check_groups(config: Any, *needed: str) -> None:
    check_needed(config, "shared_parameters.enabled", "different_groups")
    for name in config["different_groups"] if config["shared_parameters.enabled"] is True else ():
        paths = [f"different_groups.{name}.params.{parameter}" for parameter in needed]
        params = config["different_groups"][name]["params"]
        absent = [path for path, parameter in zip(paths, needed, strict=True) if params[parameter] is None]
        if absent:
            raise MissingKeyError(
                "a group lacks a parameter that its technique needs",
                got="true, and null",
                where=", ".join(["shared_parameters.enabled", *absent]),
                want=" and ".join(absent),
            )


def _check_end(config: Any) -> None:
    if config.method == "snip_momentum":
        check_order(config, "schedule_offset", "schedule_offset_end")


def _check_shares(config: Any) -> None:
    if config.shared_parameters.method != "snip_momentum":
        _check_groups(config, "dense_ratio")


def _check_graph(config: Any) -> None:
    for name, refused, what in (
        ("release_inference_cache", config.release_inference_cache is True, "needs the memory that is released"),
        ("inference_tp_size", config.inference_tp_size not in (1, AUTO), "is limited to one rank"),
    ):
        if refused:
            raise contradiction(config, f"a CUDA graph {what}", "enable_cuda_graph", name, want="one of them")


def _check_pattern(config: Any) -> None:
    if config.mode == AUTO:
        return
    if foreign := [name for name in keys(type(config)) if _is_foreign(config, name)]:
        want = f"mode {config.mode!r} reads {', '.join(sorted(READS[config.mode] - {'mode'}))}"
        raise contradiction(config, "a key of another mode", "mode", *foreign, want=want)
    for names, want in _impossible(config):
        if READS[config.mode].issuperset(names) and AUTO not in (config[name] for name in names):
            raise contradiction(config, "the pattern is impossible", *names, want=want)


def _is_foreign(config: Any, name: str) -> bool:
    key = keys(type(config))[name][1]
    harmless = (AUTO, key.default, key.documented)
    return name in config.given and name not in READS[config.mode] and getattr(config, name) not in harmless


def _impossible(config: Any) -> Iterator[tuple[list[str], str]]:
    """Yield (keys, what they must be) of conditions that are not met; they apply to modes that read the keys."""
    local, wide, patterns = (
        _number(config[f"num_{of}"]) for of in ("local_blocks", "global_blocks", "different_global_patterns")
    )
    if local % wide:
        yield ["num_local_blocks", "num_global_blocks"], "a multiple of num_global_blocks"
    usual = keys(type(config))["num_different_global_patterns"][1].of(config.defaults)
    if patterns not in (1, usual):  # documented as 4, beside one layout
        if config.different_layout_per_head is False:
            yield (["different_layout_per_head", "num_different_global_patterns"], "a layout per head, or one pattern")
        if patterns > local // wide:
            yield (
                ["num_local_blocks", "num_global_blocks", "num_different_global_patterns"],
                "at most num_local_blocks / num_global_blocks patterns",
            )
    if config.attention == "unidirectional" and config.horizontal_global_attention is True:
        yield ["attention", "horizontal_global_attention"], "bidirectional attention, or no horizontal blocks"
    starts, ends = config.global_block_indices, config.global_block_end_indices
    if isinstance(starts, tuple) and isinstance(ends, tuple) and not _ranges(starts, ends):
        yield ["global_block_indices", "global_block_end_indices"], "as many ends as starts, each after its start"


def _number(value: int | str) -> int:
    """Return the number, or 1 for "auto", which meets every condition."""
    return value if isinstance(value, int) else 1


def _ranges(starts: tuple[int, ...], ends: tuple[int, ...]) -> bool:
    return len(starts) == len(ends) and all(start < end for start, end in zip(starts, ends, strict=True))


declare(globals(), _TABLE)
