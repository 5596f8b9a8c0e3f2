"""Decisions: what fds does where DeepSpeed's documentation and code differ, and where fds differs from both.

Source: DeepSpeed 0.19.6, measured. Defaults that differ in the documentation are with their keys (`Key.documented`).
"""

from __future__ import annotations

import attrs

from fds.config.listed_difference import ListedDifference
from fds.config.one_bit_differences import ONE_BIT


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


_HERE = "tests/config/test_decisions.py::"
_INTENDED = "tests/config/test_intended_differences.py::"
_PEERS = "tests/peers/test_configuration.py::"
_PLANS = "tests/plans/test_against_deepspeed.py::"

CONTRADICTIONS = (
    Contradiction(
        "order of instructions in `TrainSchedule`",
        "forward: receive the activation, then send the gradient; backward: send the activation, then receive the "
        "gradient",
        "the other way round in both, since March 2023",
        "a plan says what is computed, and its messages follow from that; DeepSpeed's own order, by edition, is "
        "`from fds.plans.deepspeed import in_ticks`",
        f"{_PLANS}test_the_editions_differ_in_the_order_of_exchange_and_in_a_buffer",
    ),
    Contradiction(
        "`TrainSchedule.num_pipe_buffers`",
        "max(2, min(stages - stage + 1, microbatches))",
        "max(2, min(stages - stage, microbatches))",
        "counted from the plan; DeepSpeed's own number, by edition, is `from fds.plans.deepspeed import num_buffers`",
        f"{_PLANS}test_every_stage_does_what_deepspeeds_does_in_every_tick",
    ),
    Contradiction(
        "`partition_balanced`",
        "the largest part is as small as can be",
        "the largest and the smallest part differ by as little as can be, since December 2023; the largest may be "
        "larger for it",
        "the largest part is as small as can be, then the parts are as even as can be; the code's boundaries are "
        "`fds.plans.partition_balanced(weights, parts)`",
        "tests/plans/test_partition.py::"
        "test_the_largest_part_is_the_smallest_of_all_divisions_and_then_the_parts_are_the_most_even",
    ),
    Contradiction(
        "`train_batch_size` with `autotp_size`",
        "rows at once x microbatches x data-parallel ranks",
        "x all ranks, also those that share layers and read the same rows; an `mpu` says how many are data ranks",
        "x data-parallel ranks",
        "tests/peers/test_shared_ranks.py::"
        "test_deepspeed_counts_ranks_that_share_layers_as_data_ranks_where_it_made_them_itself",
    ),
    Contradiction(
        "`gradient_clipping`",
        "1.0",
        "1.0 in 0.19.6, and 0.0 before June 2026: the same JSON trains otherwise",
        "1.0 in both editions; `explain` shows `fds.clip_by_global_norm(1.0)`; 0 clips nothing",
        f"{_HERE}test_gradients_are_clipped_at_1_unless_the_json_says_0",
    ),
    Contradiction(
        "timeout of `init_distributed`",
        "30 minutes",
        "10 minutes, or as many as `DEEPSPEED_TIMEOUT` says",
        "30 minutes, or `fds.init_distributed(timeout=seconds)`; no variable of the environment",
        f"{_HERE}test_ranks_wait_for_each_other_for_half_an_hour",
    ),
    Contradiction(
        "`zero_optimization.grad_hooks`",
        "a key, true by default",
        "no key, and refused",
        "taken as documented; it has no meaning here",
        f"{_HERE}test_grad_hooks_are_taken_and_listed_as_without_meaning",
    ),
    Contradiction(
        "`aio.thread_count`",
        "threads of a request",
        "not read: the key is `intra_op_parallelism`",
        "an old spelling of `intra_op_parallelism`, taken with a warning",
        f"{_HERE}test_thread_count_is_an_old_spelling_that_counts",
    ),
    Contradiction(
        "`elasticity.prefer_large_batch`",
        "which batch size is taken of several",
        "not read: the key is `prefer_larger_batch`",
        "an old spelling of `prefer_larger_batch`, taken with a warning",
        "tests/config/test_elasticity.py::test_the_documented_name_of_the_preference_is_an_old_spelling",
    ),
    Contradiction(
        "optimizer type `Adam`",
        "Adam, with decay in the gradient",
        "AdamW, unless `adam_w_mode` is false",
        "as the code: `fds.adamw`, and `fds.adam` where `adam_w_mode` is false",
        f"{_HERE}test_adam_is_adamw_unless_told_otherwise",
    ),
    Contradiction(
        "first dynamic loss scale",
        "2 to the power of 32, in the docstring of the fused float16 optimizer",
        "2 to the power of `initial_scale_power`: 65536",
        "as the code",
        f"{_HERE}test_the_first_loss_scale_is_65536",
    ),
)

INTENDED = (
    ListedDifference(
        "float16: on the update where the dynamic scale doubles, gradients are divided by the doubled scale: half an "
        "update, and clipped by half the norm",
        "gradients are divided by the scale that the loss had",
        "tests/transforms/test_loss_scale.py::test_the_update_on_the_step_where_the_scale_doubles_is_whole",
    ),
    ListedDifference(
        "float16 at stage 0, 0.18 to 0.19.8: the loss is not scaled and the gradients are divided by the scale all the "
        "same",
        "the same update at every stage",
        f"{_INTENDED}test_float16_updates_alike_at_every_stage",
    ),
    ListedDifference(
        "float16 at stage 0: an overflow halves the dynamic scale at once, whatever `hysteresis` says",
        "`hysteresis` and `consecutive_hysteresis` are followed at every stage",
        f"{_INTENDED}test_hysteresis_is_followed_at_every_stage",
    ),
    ListedDifference(
        "activations are computed again by a reentrant function, which `torch.autograd.grad` refuses",
        "`fds.checkpoint_activations` works under it, and changes no bit",
        f"{_INTENDED}test_computing_activations_again_changes_no_bit_under_torch_autograd_grad",
    ),
    ListedDifference(
        "`partition: parameters` with `seed_layers` fails on Python 3.11 and later",
        "both are taken, on every Python",
        f"{_INTENDED}test_layers_with_seeds_are_divided_by_their_parameters",
    ),
    ListedDifference(
        "the data sampler saves the state of numpy's global generator, not of its own: what is loaded repeats batches",
        "the position is `state.calls`, and what is loaded goes on bit for bit",
        "tests/data/test_resume.py::test_the_state_that_was_saved_says_where_to_go_on",
    ),
    ListedDifference(
        "warm-ups: the first two updates run at the lowest rate; counters of steps and samples advance where an update "
        "is skipped, the scheduler does not",
        "the same JSON gives the same rates, by `fds.schedules.delayed`, which `explain` shows; a warm-up of your own "
        "is not late. `state.step` counts updates and `state.calls` all calls",
        f"{_INTENDED}test_the_json_is_late_by_an_update_and_says_so_and_a_skipped_step_is_no_update",
    ),
    ListedDifference(
        "with `comms_logger` every operation waits for the device and for all ranks, whether it is printed or not, and "
        "the times of all messages of a run are kept",
        "nothing is waited for, the same bits; `every=` and sums keep the table small, beside what was predicted",
        "tests/timing/test_messages.py::test_a_step_that_is_watched_is_bit_for_bit_the_one_that_is_not",
    ),
    ListedDifference(
        "a key of the top level that is not known is ignored; so are typing errors in aio, activation_checkpointing, "
        "optimizer and pipeline",
        "refused in every group, with the path and the nearest key",
        f"{_INTENDED}test_a_typing_error_is_refused_in_every_group",
    ),
    ListedDifference(
        "the norm of the gradients is not known at stage 0 in float32, though they are clipped by it",
        '`metrics["grad_norm"]` is there wherever gradients are clipped: the norm before that',
        f"{_INTENDED}test_the_norm_by_which_gradients_are_clipped_is_known_at_every_stage",
    ),
    ListedDifference(
        "settings of activation checkpointing and of `torch_autocast`, random states, layer numbers and process groups "
        "are globals: two engines in one process disturb each other",
        "a step is a value: any number of them run in turn, each as if it were alone",
        f"{_INTENDED}test_two_trainings_in_one_process_are_as_each_alone",
    ),
    *ONE_BIT,
    ListedDifference(
        "`zero_quantized_weights` and `zero_quantized_gradients` cast to float16 first, which overflows beyond 65,504, "
        "and the largest number of a group arrives smaller than it is",
        "float32 is coded, and the largest number arrives",
        "tests/config/test_zeropp.py::test_weights_beyond_float16_arrive_and_the_largest_is_exact",
    ),
    ListedDifference(
        "`sparse_gradients`: a row whose numbers add up to 0 is not sent, nor added, and has no gradient",
        "rows are found by their bits, and the sum is that of whole gradients",
        "tests/config/test_sparse_gradients.py::test_a_row_that_adds_up_to_0_is_sent",
    ),
    ListedDifference(
        "`sparse_gradients` has an effect at stage 0 alone",
        "at stages 0 and 1",
        "tests/config/test_sparse_gradients.py::test_embeddings_of_the_module_travel_by_rows_as_composed_by_hand",
    ),
    ListedDifference(
        "`zero_quantized_nontrainable_weights` works in float16 alone, leaves parameters of at most 500,000 elements, "
        "or of 2,048 on a rank, as they are, and codes each rank's slice by itself: other ranks, other numbers",
        "in any precision, matrices whose rows have 16 numbers or more; a row is coded alike on any number of ranks",
        "tests/config/test_zeropp.py::test_frozen_weights_of_a_json_are_the_same_codes_on_any_number_of_ranks",
    ),
    ListedDifference(
        "inputs are cast under `fp16.auto_cast` alone, never under bf16",
        "`fds.precision` casts every float32 leaf of the batch, targets too; its `inputs` names those to cast",
        f"{_INTENDED}test_float_inputs_and_targets_are_cast_under_bfloat16",
    ),
    ListedDifference(
        "`torch_autocast`: gradients of linear layers and convolutions are sent in its dtype",
        "they are sent in float32",
        f"{_INTENDED}test_gradients_of_autocast_travel_in_float32",
    ),
    ListedDifference(
        "16 bit at stage 0: training begins with an update on gradients of zero, so Adam counts one update more and "
        "decays once more",
        "the first update is the first batch's",
        f"{_PEERS}test_at_stage_0_in_bfloat16_deepspeed_begins_adam_with_an_empty_update",
    ),
    ListedDifference(
        "`grad_accum_dtype` float32 under bfloat16 does nothing at stage 2",
        "gradients are summed as it says at every stage; the numbers are those of DeepSpeed's stage 3",
        f"{_PEERS}test_sums_in_float32_at_stage_2_are_those_of_stage_3_and_deepspeed_has_none",
    ),
    ListedDifference(
        "stage 1 in bfloat16 with `grad_accum_dtype` float32 and `offload_optimizer` to the CPU: gradients are not "
        "added among the ranks",
        "they are, wherever the optimizer's state lives",
        f"{_PEERS}test_offloaded_sums_in_float32_at_stage_1_are_added_among_ranks_and_deepspeeds_are_not",
    ),
    ListedDifference(
        "stages 2 and 3 in bfloat16 with float32 messages: what arrives is rounded before it is added to the sum",
        "it is added as it arrived",
        f"{_PEERS}test_float_messages_are_added_unrounded_to_sums_in_bfloat16",
    ),
    ListedDifference(
        "`contiguous_gradients` false at stages 1 and 2 on several ranks without a GPU: gradients are not added among "
        "the ranks (they are looked for by the type `torch.cpu.FloatTensor`, which no tensor has)",
        "the key changes no number",
        f"{_INTENDED}test_gradients_that_are_not_contiguous_are_the_same_gradients",
    ),
    ListedDifference(
        "`round_robin_gradients` on several ranks: `safe_get_full_fp32_param` gives parts of other parameters",
        "`step.params(state)` is whole parameters, whatever the JSON says",
        f"{_INTENDED}test_gradients_that_are_not_contiguous_are_the_same_gradients",
    ),
    ListedDifference(
        "`bf16.check_grad_overflow` skips no update at stage 3",
        "it skips at every stage",
        f"{_INTENDED}test_an_update_that_is_not_finite_is_skipped_at_every_stage",
    ),
    ListedDifference(
        "bfloat16 with float32 sums at stage 1: a gradient that is not finite ends the training by an assertion",
        "the update is skipped",
        f"{_INTENDED}test_an_update_that_is_not_finite_is_skipped_at_every_stage",
    ),
    ListedDifference(
        "`bf16.check_grad_overflow` false: the norm of a gradient that is not finite is reported as 1 or -1, and "
        "clipped by",
        "it is what it is",
        f"{_INTENDED}test_an_update_that_is_not_finite_is_skipped_at_every_stage",
    ),
    ListedDifference(
        "`torch_autocast` in float16: at stages 1 to 3 the gradient is clipped while it is scaled",
        "the gradient itself is clipped, at every stage",
        f"{_INTENDED}test_autocast_in_float16_clips_the_gradient_itself_at_every_stage",
    ),
    ListedDifference(
        "`torch_autocast` in float16: an update that is skipped is not counted as one, and the schedule goes on",
        "it is counted in `state.calls`, and schedules follow `state.step`",
        f"{_INTENDED}test_autocast_in_float16_clips_the_gradient_itself_at_every_stage",
    ),
    ListedDifference(
        "master weights are made of parameters that were rounded to 16 bits",
        "they are the parameters as they were given",
        f"{_INTENDED}test_master_weights_are_the_parameters_unrounded",
    ),
    ListedDifference(
        "float16: an overflow at the least scale ends the training",
        'the update is skipped and `metrics["at_minimum_scale"]` says so',
        f"{_INTENDED}test_an_overflow_at_the_least_scale_is_a_skip_that_is_reported",
    ),
    ListedDifference(
        "saves that cannot be made or loaded again: with `elastic_checkpoint`, of some groups at stage 3, of "
        "parameters of no dimension where gradients are clipped, of Adagrad in 16 bit at stage 0 or with float32 sums",
        "every save is loaded, and goes on bit for bit",
        f"{_INTENDED}test_what_deepspeed_cannot_resume_goes_on_bit_for_bit",
    ),
    ListedDifference(
        "refused by the engine: `prescale_gradients` and `gradient_predivide_factor` with `reduce_scatter` from stage "
        "2 on, `grad_accum_dtype` other than that of the parameters at stage 0, an odd `allgather_bucket_size`",
        "taken at every stage; the numbers are those of the stages that have it",
        f"{_INTENDED}test_what_the_engine_refuses_at_some_stages_is_the_same_at_all",
    ),
    ListedDifference(
        "`gradient_predivide_factor` at stage 3, where it is the number of ranks: gradients are divided by it twice",
        "it changes no number but for rounding",
        f"{_INTENDED}test_what_the_engine_refuses_at_some_stages_is_the_same_at_all",
    ),
    ListedDifference(
        "float16 with `reduce_scatter` false at stages 1 and 2: the ranks' gradients are added undivided, and overflow "
        "where their mean does not",
        "they are divided before they are added, whatever the key says",
        f"{_INTENDED}test_gradients_of_ranks_are_divided_before_they_are_added_in_float16",
    ),
    ListedDifference(
        "unknown keys inside `compile`, which earlier releases had, are refused",
        "left out with a warning",
        "tests/config/test_reading.py::test_keys_of_other_releases_inside_compile_pass",
    ),
    ListedDifference(
        "a `cycle_max_mom` of 1, betas of 1, a dampening below 0, a first loss scale below the least: taken, and "
        "divided by 0 or without meaning",
        "refused with the JSON path",
        f"{_INTENDED}test_values_without_meaning_are_refused_with_their_path",
    ),
)
