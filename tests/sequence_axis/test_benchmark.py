"""What `make bench-context` claims of 8,192 tokens holds of 1,024: bytes sent, and activations at their peak."""

from benchmarks import context
from tests import ranks

FLOAT_BYTES = 4
HEADS = {"ulysses": 4, "ring, zigzag": 8}  # half of q, k, v, out, twice; k, v twice, and their gradients


def found(case):
    """Return activations of one rank, and of each method activations and what is sent, for attention and in all."""
    methods = {name: (context.weigh(case, name), *context.send(case, name)) for name in HEADS}
    return context.weigh(case, context.ONE), methods


def test_two_ranks_have_half_of_the_activations_and_send_what_the_formula_says():
    case = context.Case(width=128, layers=1, tokens=1024)
    head = FLOAT_BYTES * (case.tokens // 2) * context.HEAD_SIZE * 2  # two heads of a rank's tokens
    gradients = FLOAT_BYTES * context.num_parameters(case)  # an all_reduce of two ranks
    for one, methods in ranks.run(found, case):
        assert one > 4 * gradients
        for name, (activations, of_attention, in_all) in methods.items():
            assert of_attention == context.formula(case, name) == HEADS[name] * head
            assert 0 <= in_all - of_attention - gradients < 100  # numbers of the loss
            assert activations <= context.MEMORY_AT_MOST * one, name
