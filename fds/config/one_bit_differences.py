"""Where 1-bit optimizers differ from those of DeepSpeed 0.19.6."""

from __future__ import annotations

from fds.config.listed_difference import ListedDifference

_INTENDED = "tests/config/test_intended_differences.py::"
_OPTIM = "tests/optim/"

ONE_BIT = (
    ListedDifference(
        "1-bit optimizers ignore `bias_correction`, and call what torch no longer has",
        "they take none, and call what torch has; where an optimizer takes `bias_correction`, it follows it",
        f"{_INTENDED}test_bias_correction_is_followed_where_an_optimizer_takes_it",
    ),
    ListedDifference(
        "the first call of a 1-bit optimizer updates nothing, and counts as a step of its warm-up",
        "every call updates; `freeze_step` of the JSON is one more than that of `fds.onebit_adam`, `fds.onebit_lamb`; "
        "`var_freeze_step` is that of `fds.zero_one_adam`, whose intervals are counted from the first update",
        f"{_INTENDED}test_the_warm_up_of_1_bit_optimizers_is_one_call_shorter_and_every_call_updates",
    ),
    ListedDifference(
        "after the warm-up of 1-bit optimizers every rank clips its own gradient: in 16 bits by its own norm, in "
        "float32 by the mean of the norms of all ranks",
        "by its own norm in any dtype",
        f"{_OPTIM}test_onebit_clips.py::test_after_warm_up_each_rank_clips_its_own_gradient",
    ),
    ListedDifference(
        "errors of 1-bit messages are dropped when a save is loaded, and only those of rank 0 are saved",
        "they are state: a run that goes on is the run, bit for bit; on other ranks their sums are kept",
        f"{_INTENDED}test_a_run_of_1_bit_optimizers_goes_on_bit_for_bit",
    ),
    ListedDifference(
        "a load in the warm-up of 1-bit LAMB forgets the mean of the ratios",
        "it is state, `opt.lamb_coeff_freeze`",
        f"{_OPTIM}test_onebit_lamb.py::test_what_is_known_of_a_parameter_is_one_number_each_and_goes_on_where_it_was",
    ),
    ListedDifference(
        "1-bit LAMB sends the momenta of all parameters with one scale, brought to one size by ratios measured once",
        "each parameter has a scale of its own in every message; with one parameter the bits are those of 0.19.6",
        "tests/peers/test_onebit.py::test_onebit_lamb_is_deepspeeds_of_one_parameter",
    ),
    ListedDifference(
        "after the warm-up of 1-bit optimizers an element that had no gradient in it is updated by a sign over `eps`; "
        "of LAMB a parameter that stayed 0 is not updated any more",
        "an element without a variance stays, but for its decay; a parameter that stayed 0 has the ratio 1",
        f"{_OPTIM}test_onebit_adam.py::test_elements_without_a_gradient_in_warm_up_stay_where_they_are",
    ),
    ListedDifference(
        "the scale of a 1-bit message is a mean over the padding too: up to 5 times too small for a bias of 3 on 8 "
        "ranks",
        "it is a mean over the numbers that are there",
        f"{_OPTIM}test_onebit_adam.py::test_it_is_the_algorithm_of_the_paper_and_all_ranks_agree",
    ),
    ListedDifference(
        "0/1 Adam goes back to what ranks agreed on by subtracting what each added: they drift apart by roundings for "
        "good, and its sums of updates are dropped when a save is loaded",
        "what was agreed on is the state, alike on all ranks, bit for bit; what each has of its own is saved with it",
        "tests/laws/test_law_12_local_steps.py::test_state_is_agreed_on_while_each_rank_sees_what_it_has_moved",
    ),
    ListedDifference(
        "on one rank, 0/1 Adam leaves its momentum as it is in updates that do not update the variance",
        "it is updated by the gradient, of which one rank loses nothing",
        f"{_OPTIM}test_zero_one_adam.py::test_it_is_the_algorithm_of_the_paper_and_all_ranks_agree",
    ),
    ListedDifference(
        "0/1 Adam divides by 0 where the learning rate was 0 in all local steps of an interval",
        "the momentum is 0 after them",
        "tests/laws/test_law_12_local_steps.py::test_where_the_learning_rate_was_0_the_momentum_begins_anew",
    ),
)
