"""Decisions: what fds does where DeepSpeed's documentation and code differ, and where fds differs from both.

Source: DeepSpeed 0.19.6, measured. Defaults that differ in the documentation are with their keys (`Key.documented`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs


@attrs.frozen
class Contradiction:
    """A difference between DeepSpeed's documentation and its code.

    Attributes:
        topic: what it is about.
        documented: what the documentation, or an earlier source, says.
        code: what 0.19.6 does.
        here: what fds does.
        test: the test that checks it, `path::name`.
    """

    topic: str
    documented: str
    code: str
    here: str
    test: str


@attrs.frozen
class ListedDifference:
    """A defect of DeepSpeed that fds does not have.

    Attributes:
        deepspeed: what it does.
        here: what fds does.
        test: the test that checks it, `path::name`; it would fail if fds did the same as DeepSpeed.
    """

    deepspeed: str
    here: str
    test: str


_CONTRADICTIONS = """
order of instructions in `TrainSchedule` | forward: receive the activation, then send the gradient; backward: send the
    activation, then receive the gradient | the other way round in both, since March 2023 | a plan says what is
    computed, and its messages follow from that; DeepSpeed's own order, by edition, is `from fds.plans.deepspeed import
    in_ticks` | plans/test_against_deepspeed | test_the_editions_differ_in_the_order_of_exchange_and_in_a_buffer
`TrainSchedule.num_pipe_buffers` | max(2, min(stages - stage + 1, microbatches)) | max(2, min(stages - stage,
    microbatches)) | counted from the plan; DeepSpeed's own number, by edition, is `from fds.plans.deepspeed import
    num_buffers` | plans/test_against_deepspeed | test_every_stage_does_what_deepspeeds_does_in_every_tick
`partition_balanced` | the largest part is as small as can be | the largest and the smallest part differ by as little as
    can be, since December 2023; the largest may be larger for it | the largest part is as small as can be, then the
    parts are as even as can be; the code's boundaries are `fds.plans.partition_balanced(weights, parts)` |
    plans/test_partition | test_the_largest_part_is_the_smallest_of_all_divisions_and_then_the_parts_are_the_most_even
`train_batch_size` with `autotp_size` | rows at once x microbatches x data-parallel ranks | x all ranks, also those that
    share layers and read the same rows; an `mpu` says how many are data ranks | x data-parallel ranks |
    peers/test_shared_ranks | test_deepspeed_counts_ranks_that_share_layers_as_data_ranks_where_it_made_them_itself
`gradient_clipping` | 1.0 | 1.0 in 0.19.6, and 0.0 before June 2026: the same JSON trains otherwise | 1.0 in both
    editions; `explain` shows `fds.clip_by_global_norm(1.0)`; 0 clips nothing |
    config/test_decisions | test_gradients_are_clipped_at_1_unless_the_json_says_0
timeout of `init_distributed` | 30 minutes | 10 minutes, or as many as `DEEPSPEED_TIMEOUT` says | 30 minutes, or
    `fds.init_distributed(timeout=seconds)`; no variable of the environment |
    config/test_decisions | test_ranks_wait_for_each_other_for_half_an_hour
`zero_optimization.grad_hooks` | a key, true by default | no key, and refused | taken as documented; it has no meaning
    here | config/test_decisions | test_grad_hooks_are_taken_and_listed_as_without_meaning
`aio.thread_count` | threads of a request | not read: the key is `intra_op_parallelism` | an old spelling of
    `intra_op_parallelism`, taken with a warning |
    config/test_decisions | test_thread_count_is_an_old_spelling_that_counts
`elasticity.prefer_large_batch` | which batch size is taken of several | not read: the key is `prefer_larger_batch` | an
    old spelling of `prefer_larger_batch`, taken with a warning |
    config/test_elasticity | test_the_documented_name_of_the_preference_is_an_old_spelling
optimizer type `Adam` | Adam, with decay in the gradient | AdamW, unless `adam_w_mode` is false | as the code:
    `fds.adamw`, and `fds.adam` where `adam_w_mode` is false |
    config/test_decisions | test_adam_is_adamw_unless_told_otherwise
first dynamic loss scale | 2 to the power of 32, in the docstring of the fused float16 optimizer | 2 to the power of
    `initial_scale_power`: 65536 | as the code | config/test_decisions | test_the_first_loss_scale_is_65536
"""
_INTENDED = """
float16: on the update where the dynamic scale doubles, gradients are divided by the doubled scale: half an update, and
    clipped by half the norm | gradients are divided by the scale that the loss had |
    transforms/test_loss_scale | test_the_update_on_the_step_where_the_scale_doubles_is_whole
float16 at stage 0, 0.18 to 0.19.8: the loss is not scaled and the gradients are divided by the scale all the same | the
    same update at every stage | config/test_intended_differences | test_float16_updates_alike_at_every_stage
float16 at stage 0: an overflow halves the dynamic scale at once, whatever `hysteresis` says | `hysteresis` and
    `consecutive_hysteresis` are followed at every stage |
    config/test_intended_differences | test_hysteresis_is_followed_at_every_stage
activations are computed again by a reentrant function, which `torch.autograd.grad` refuses |
    `fds.checkpoint_activations` works under it, and changes no bit |
    config/test_intended_differences | test_computing_activations_again_changes_no_bit_under_torch_autograd_grad
`partition: parameters` with `seed_layers` fails on Python 3.11 and later | both are taken, on every Python |
    config/test_intended_differences | test_layers_with_seeds_are_divided_by_their_parameters
the data sampler saves the state of numpy's global generator, not of its own: what is loaded repeats batches | the
    position is `state.calls`, and what is loaded goes on bit for bit |
    data/test_resume | test_the_state_that_was_saved_says_where_to_go_on
warm-ups: the first two updates run at the lowest rate; counters of steps and samples advance where an update is
    skipped, the scheduler does not | the same JSON gives the same rates, by `fds.schedules.delayed`, which `explain`
    shows; a warm-up of your own is not late. `state.step` counts updates and `state.calls` all calls |
    config/test_intended_differences | test_the_json_is_late_by_an_update_and_says_so_and_a_skipped_step_is_no_update
with `comms_logger` every operation waits for the device and for all ranks, whether it is printed or not, and the times
    of all messages of a run are kept | nothing is waited for, the same bits; `every=` and sums keep the table small,
    beside what was predicted | timing/test_messages | test_a_step_that_is_watched_is_bit_for_bit_the_one_that_is_not
a key of the top level that is not known is ignored; so are typing errors in aio, activation_checkpointing, optimizer
    and pipeline | refused in every group, with the path and the nearest key |
    config/test_intended_differences | test_a_typing_error_is_refused_in_every_group
the norm of the gradients is not known at stage 0 in float32, though they are clipped by it | `metrics["grad_norm"]` is
    there wherever gradients are clipped: the norm before that |
    config/test_intended_differences | test_the_norm_by_which_gradients_are_clipped_is_known_at_every_stage
settings of activation checkpointing and of `torch_autocast`, random states, layer numbers and process groups are
    globals: two engines in one process disturb each other | a step is a value: any number of them run in turn, each as
    if it were alone | config/test_intended_differences | test_two_trainings_in_one_process_are_as_each_alone
1-bit optimizers ignore `bias_correction`, and call what torch no longer has | they take none, and call what torch has;
    where an optimizer takes `bias_correction`, it follows it |
    config/test_intended_differences | test_bias_correction_is_followed_where_an_optimizer_takes_it
the first call of a 1-bit optimizer updates nothing, and counts as a step of its warm-up | every call updates;
    `freeze_step` of the JSON is one more than that of `fds.onebit_adam`, `fds.onebit_lamb`; `var_freeze_step` is that
    of `fds.zero_one_adam`, whose intervals are counted from the first update |
    config/test_intended_differences | test_the_warm_up_of_1_bit_optimizers_is_one_call_shorter_and_every_call_updates
after the warm-up of 1-bit optimizers every rank clips its own gradient: in 16 bits by its own norm, in float32 by the
    mean of the norms of all ranks | by its own norm in any dtype |
    optim/test_onebit_clips | test_after_warm_up_each_rank_clips_its_own_gradient
errors of 1-bit messages are dropped when a save is loaded, and only those of rank 0 are saved | they are state: a run
    that goes on is the run, bit for bit; on other ranks their sums are kept |
    config/test_intended_differences | test_a_run_of_1_bit_optimizers_goes_on_bit_for_bit
a load in the warm-up of 1-bit LAMB forgets the mean of the ratios | it is state, `opt.lamb_coeff_freeze` |
    optim/test_onebit_lamb | test_what_is_known_of_a_parameter_is_one_number_each_and_goes_on_where_it_was
1-bit LAMB sends the momenta of all parameters with one scale, brought to one size by ratios measured once | each
    parameter has a scale of its own in every message; with one parameter the bits are those of 0.19.6 |
    peers/test_onebit | test_onebit_lamb_is_deepspeeds_of_one_parameter
after the warm-up of 1-bit optimizers an element that had no gradient in it is updated by a sign over `eps`; of LAMB a
    parameter that stayed 0 is not updated any more | an element without a variance stays, but for its decay; a
    parameter that stayed 0 has the ratio 1 |
    optim/test_onebit_adam | test_elements_without_a_gradient_in_warm_up_stay_where_they_are
the scale of a 1-bit message is a mean over the padding too: up to 5 times too small for a bias of 3 on 8 ranks | it is
    a mean over the numbers that are there |
    optim/test_onebit_adam | test_it_is_the_algorithm_of_the_paper_and_all_ranks_agree
0/1 Adam goes back to what ranks agreed on by subtracting what each added: they drift apart by roundings for good, and
    its sums of updates are dropped when a save is loaded | what was agreed on is the state, alike on all ranks, bit for
    bit; what each has of its own is saved with it |
    laws/test_law_12_local_steps | test_state_is_agreed_on_while_each_rank_sees_what_it_has_moved
on one rank, 0/1 Adam leaves its momentum as it is in updates that do not update the variance | it is updated by the
    gradient, of which one rank loses nothing |
    optim/test_zero_one_adam | test_it_is_the_algorithm_of_the_paper_and_all_ranks_agree
0/1 Adam divides by 0 where the learning rate was 0 in all local steps of an interval | the momentum is 0 after them |
    laws/test_law_12_local_steps | test_where_the_learning_rate_was_0_the_momentum_begins_anew
`zero_quantized_weights` and `zero_quantized_gradients` cast to float16 first, which overflows beyond 65,504, and the
    largest number of a group arrives smaller than it is | float32 is coded, and the largest number arrives |
    config/test_zeropp | test_weights_beyond_float16_arrive_and_the_largest_is_exact
`sparse_gradients`: a row whose numbers add up to 0 is not sent, nor added, and has no gradient | rows are found by
    their bits, and the sum is that of whole gradients |
    config/test_sparse_gradients | test_a_row_that_adds_up_to_0_is_sent
`sparse_gradients` has an effect at stage 0 alone | at stages 0 and 1 |
    config/test_sparse_gradients | test_embeddings_of_the_module_travel_by_rows_as_composed_by_hand
`zero_quantized_nontrainable_weights` works in float16 alone, leaves parameters of at most 500,000 elements, or of 2,048
    on a rank, as they are, and codes each rank's slice by itself: other ranks, other numbers | in any precision,
    matrices whose rows have 16 numbers or more; a row is coded alike on any number of ranks |
    config/test_zeropp | test_frozen_weights_of_a_json_are_the_same_codes_on_any_number_of_ranks
inputs are cast under `fp16.auto_cast` alone, never under bf16 | `fds.precision` casts every float32 leaf of the batch,
    targets too; its `inputs` names those to cast |
    config/test_intended_differences | test_float_inputs_and_targets_are_cast_under_bfloat16
`torch_autocast`: gradients of linear layers and convolutions are sent in its dtype | they are sent in float32 |
    config/test_intended_differences | test_gradients_of_autocast_travel_in_float32
16 bit at stage 0: training begins with an update on gradients of zero, so Adam counts one update more and decays once
    more | the first update is the first batch's |
    peers/test_configuration | test_at_stage_0_in_bfloat16_deepspeed_begins_adam_with_an_empty_update
`grad_accum_dtype` float32 under bfloat16 does nothing at stage 2 | gradients are summed as it says at every stage; the
    numbers are those of DeepSpeed's stage 3 |
    peers/test_configuration | test_sums_in_float32_at_stage_2_are_those_of_stage_3_and_deepspeed_has_none
stage 1 in bfloat16 with `grad_accum_dtype` float32 and `offload_optimizer` to the CPU: gradients are not added among
    the ranks | they are, wherever the optimizer's state lives |
    peers/test_configuration | test_offloaded_sums_in_float32_at_stage_1_are_added_among_ranks_and_deepspeeds_are_not
stages 2 and 3 in bfloat16 with float32 messages: what arrives is rounded before it is added to the sum | it is added as
    it arrived | peers/test_configuration | test_float_messages_are_added_unrounded_to_sums_in_bfloat16
`contiguous_gradients` false at stages 1 and 2 on several ranks without a GPU: gradients are not added among the ranks
    (they are looked for by the type `torch.cpu.FloatTensor`, which no tensor has) | the key changes no number |
    config/test_intended_differences | test_gradients_that_are_not_contiguous_are_the_same_gradients
`round_robin_gradients` on several ranks: `safe_get_full_fp32_param` gives parts of other parameters |
    `step.params(state)` is whole parameters, whatever the JSON says |
    config/test_intended_differences | test_gradients_that_are_not_contiguous_are_the_same_gradients
`bf16.check_grad_overflow` skips no update at stage 3 | it skips at every stage |
    config/test_intended_differences | test_an_update_that_is_not_finite_is_skipped_at_every_stage
bfloat16 with float32 sums at stage 1: a gradient that is not finite ends the training by an assertion | the update is
    skipped | config/test_intended_differences | test_an_update_that_is_not_finite_is_skipped_at_every_stage
`bf16.check_grad_overflow` false: the norm of a gradient that is not finite is reported as 1 or -1, and clipped by | it
    is what it is | config/test_intended_differences | test_an_update_that_is_not_finite_is_skipped_at_every_stage
`torch_autocast` in float16: at stages 1 to 3 the gradient is clipped while it is scaled | the gradient itself is
    clipped, at every stage |
    config/test_intended_differences | test_autocast_in_float16_clips_the_gradient_itself_at_every_stage
`torch_autocast` in float16: an update that is skipped is not counted as one, and the schedule goes on | it is counted
    in `state.calls`, and schedules follow `state.step` |
    config/test_intended_differences | test_autocast_in_float16_clips_the_gradient_itself_at_every_stage
master weights are made of parameters that were rounded to 16 bits | they are the parameters as they were given; the
    Trainer of `fds.hf` rounds them too |
    config/test_intended_differences | test_master_weights_are_the_parameters_unrounded
float16: an overflow at the least scale ends the training | the update is skipped and `metrics["at_minimum_scale"]` says
    so | config/test_intended_differences | test_an_overflow_at_the_least_scale_is_a_skip_that_is_reported
saves that cannot be made or loaded again: with `elastic_checkpoint`, of some groups at stage 3, of parameters of no
    dimension where gradients are clipped, of Adagrad in 16 bit at stage 0 or with float32 sums | every save is loaded,
    and goes on bit for bit | config/test_intended_differences | test_what_deepspeed_cannot_resume_goes_on_bit_for_bit
refused by the engine: `prescale_gradients` and `gradient_predivide_factor` with `reduce_scatter` from stage 2 on,
    `grad_accum_dtype` other than that of the parameters at stage 0, an odd `allgather_bucket_size` | taken at every
    stage; the numbers are those of the stages that have it |
    config/test_intended_differences | test_what_the_engine_refuses_at_some_stages_is_the_same_at_all
`gradient_predivide_factor` at stage 3, where it is the number of ranks: gradients are divided by it twice | it changes
    no number but for rounding |
    config/test_intended_differences | test_what_the_engine_refuses_at_some_stages_is_the_same_at_all
float16 with `reduce_scatter` false at stages 1 and 2: the ranks' gradients are added undivided, and overflow where
    their mean does not | they are divided before they are added, whatever the key says |
    config/test_intended_differences | test_gradients_of_ranks_are_divided_before_they_are_added_in_float16
`curriculum_learning`: the model is told the length, as `curriculum_seqlen`, and one that does not cut its input by it
    trains on whole sequences | the step cuts the batch, before it is split, and the model is told nothing |
    config/test_curriculum | test_the_step_cuts_the_batch_and_the_model_is_told_nothing
`curriculum_learning`: lengths are rounded down below `min_difficulty`, to 0 where that is less than `difficulty_step` |
    as in 0.19.8, they begin at the first multiple that is not below it |
    config/test_curriculum | test_a_line_never_falls_below_the_least
`progressive_layer_drop`: the model is told theta(t), and what is skipped is its own affair; DeepSpeed's example divides
    by the probability of the layer before, and draws from NumPy's global generator | the step skips layers, and divides
    by the layer's own; which ones run follows from the state |
    config/test_routing | test_layers_are_skipped_by_their_own_probability
random_ltd: the numbers of layers are looked for in the names of modules, where 1 is in 10 | a number is the whole of
    the last part of a name | config/test_routing | test_a_number_of_a_layer_is_not_a_part_of_another
random_ltd: the masks of decoders are cut to the kept length, documents and padding among them | they are gathered by
    token | transforms/test_random_ltd | test_modules_are_given_what_belongs_to_their_tokens
random_ltd: kept tokens are rounded down below `min_value`, to 0 where that is less than `seq_per_step` | they begin at
    the first multiple that is not below it | config/test_routing | test_kept_tokens_never_fall_below_the_least
`layer_token_lr_schedule` raises NotImplementedError | the scheduler follows the tokens of layers |
    config/test_routing | test_a_scheduler_may_follow_the_tokens_of_layers
`curriculum_learning` without `curriculum_type`: a KeyError in the first forward | refused before it |
    config/test_curriculum | test_what_does_not_compose_is_refused_with_its_keys
`data_sampling.curriculum_learning`: batches come from rank 0's generator, files of clusters that it wrote, and what was
    drawn before; a resumed run draws others | in the same distribution, from the seed and the number of the batch, on
    any number of ranks | data/test_curriculum_sampler | test_samples_are_drawn_as_often_as_by_deepspeed
`data_sampling.curriculum_learning`: percentiles are multiples of N // `max_difficulty` samples, none of fewer samples
    than that | exact, of any number | data/test_curriculum_sampler |
    test_hundredths_are_exact_and_of_any_number_of_samples
`data_sampling.curriculum_learning`: a schedule that falls and rises again lets samples in twice | once |
    data/test_curriculum_sampler | test_difficulties_are_those_of_the_next_step_and_what_came_in_stays
`dynamic_batching`: the program asks for the loader and the rate; tokens are counted without padding, longer samples and
    the last ones are left out; a load has `train_micro_batch_size_per_gpu` such microbatches | `initialize` makes
    both; padding counts, a longer sample is refused, none is left out; a microbatch is one |
    config/test_sampling | test_batches_of_tokens_have_a_rate_that_follows_their_rows_on_any_number_of_ranks
`compression_training`: a regular expression that names no module is ignored, and groups without `modules` end in an
    error of `re` | the first is refused, with the modules that there are; the others are of all modules |
    config/test_compressed_training | test_groups_that_name_nothing_are_refused_and_all_modules_are_a_group
`weight_quantization` where weights are used: `rounding` is not read | it is |
    config/test_compressed_training | test_weights_are_rounded_where_they_are_used_as_the_key_says
`sparse_pruning` by size: the scheduler raises a KeyError; and weights are rounded, and then masked | it trains; weights
    are masked, and then rounded (not by `"topk"`): the same but where a mask takes what a scale is of |
    config/test_compressed_training | test_masks_by_size_are_deepspeeds_and_weights_train_under_them
`channel_pruning` by size ends in an error of `torch.linalg.norm`; of pruned rows and channels what is related is cut
    off at the end and not before, so that biases, norms and activations of zeros count till then | it trains; what is
    related is masked from the start | config/test_compressed_training |
    test_what_is_related_is_masked_from_the_start_and_channels_go_by_size
`elasticity` 0.2: a `max_gpus` below `num_gpus_per_node` is no bound, and `min_gpus` is rounded down to nodes | the
    first is refused, the second rounded up |
    elastic/test_batches | test_bounds_are_of_whole_nodes_and_never_lifted
`elasticity` 0.2 with `model_parallel_size`: the number of ranks is taken for GPUs and for data ranks | ranks, of which
    a copy of the model has as many | elastic/test_batches | test_ranks_that_share_a_model_are_counted_once
`elasticity` with bounds between which no number of ranks divides a batch: a TypeError, or batches of one number each |
    refused | elastic/test_batches | test_what_has_no_batch_is_refused_by_its_keys
`elasticity` 0.2: a number of ranks that does not share the batch silently gets another | `initialize` warns |
    config/test_elasticity | test_ranks_that_do_not_share_the_batch_have_their_own_with_a_warning
`DEEPSPEED_ELASTICITY_CONFIG` is compared in the largest batch, the microbatches and the version, and missed with a
    warning | compared in all keys on which batches depend; without it nothing is |
    elastic/test_batches | test_a_scheduler_that_was_told_otherwise_is_named_by_its_variable
unknown keys inside `compile`, which earlier releases had, are refused | left out with a warning |
    config/test_reading | test_keys_of_other_releases_inside_compile_pass
a `cycle_max_mom` of 1, betas of 1, a dampening below 0, a first loss scale below the least: taken, and divided by 0 or
    without meaning | refused with the JSON path |
    config/test_intended_differences | test_values_without_meaning_are_refused_with_their_path
the section `sparse_attention` is read, and nothing is done with it unless the model asks; `attention` of `bigbird` and
    `bslongformer` in it is dropped | `fds.initialize` makes a model of transformers sparse by it, and refuses a model
    that has no sparse attention, and keys that a mode drops |
    config/test_sparse_attention | test_a_model_of_its_own_has_the_section_and_one_without_is_refused
modules of sparse attention share what they prepare, by length alone: a second pattern computes the first one's blocks |
    each has its own layouts | nn/test_sparse_self_attention | test_two_layouts_of_one_length_stand_side_by_side
a longer table of positions is too short where the old length does not divide the new one, and has two undefined rows in
    RoBERTa | every position has a row, and the two are kept |
    hf/test_stand_ins | test_a_longer_table_keeps_the_rows_before_the_first_position
"""


def _rows(table: str) -> Iterator[tuple[str, ...]]:
    """Yield the columns of a table in which a line that is indented goes on with the row above."""
    for row in re.split(r"\n(?=\S)", table.strip()):
        *columns, file, test = " ".join(row.split()).split(" | ")
        yield (*columns, f"tests/{file}.py::{test}")


CONTRADICTIONS = tuple(Contradiction(*columns) for columns in _rows(_CONTRADICTIONS))
INTENDED = tuple(ListedDifference(*columns) for columns in _rows(_INTENDED))
