"""Mutants of students and teachers: layers that are kept, losses and their gradients, a teacher that draws."""

from tests.mutants.mutant import Mutant

LAYERS = "tests/compression/test_reduce_layers.py"
LOSSES = "tests/distill/test_losses.py"
TEACHER = "tests/distill/test_teacher.py"

MUTANTS = (
    Mutant(
        "student-has-the-first-layers",
        "fds/compression/reduce_layers.py",
        "{head}{numbers[int(part[1])]}.",
        "{head}{int(part[1])}.",
        "a student begins with other layers than those that are kept",
        LAYERS,
    ),
    Mutant(
        "student-shares-memory",
        "fds/compression/reduce_layers.py",
        "        smaller[name] = x.detach().clone()",
        "        smaller[name] = x.detach()",
        "to train a student changes its teacher",
        LAYERS,
    ),
    Mutant(
        "lists-in-layers-count",
        "fds/compression/reduce_layers.py",
        "if not any(head != other and head.startswith(other) for other in matching)",
        "if head",
        "experts in layers are taken for lists of layers",
        LAYERS,
    ),
    Mutant(
        "divergence-without-its-factor",
        "fds/distill/_logits.py",
        '    return losses.mul_(temperature**2)\n\n\n@operator("distill_logits_backward", _like)',
        '    return losses\n\n\n@operator("distill_logits_backward", _like)',
        "the loss shrinks with the temperature",
        LOSSES,
    ),
    Mutant(
        "others-have-no-gradient-of-theirs",
        "fds/distill/_logits.py",
        "            q *= (1 - rest[piece] / _others(z, at).exp())[:, None]",
        "            pass",
        "of stored logits the gradient is as if there were no others",
        LOSSES,
    ),
    Mutant(
        "padding-has-a-gradient",
        "fds/distill/_logits.py",
        ".masked_fill_((dloss == 0)[:, None], 0.0)",
        "",
        "a token that a mask leaves out makes gradients NaN",
        LOSSES,
    ),
    Mutant(
        "keys-of-padding-are-compared",
        "fds/distill/_states.py",
        "        counts = counts & (mask != 0)[:, None, None, :]",
        "        pass",
        "scores of padding count in the attention of other tokens",
        LOSSES,
    ),
    Mutant(
        "teacher-in-training-mode",
        "fds/distill/_teacher.py",
        "mode(setting.mode):",
        "torch.enable_grad():",
        "a teacher draws dropout, and what it says depends on the student's mode",
        TEACHER,
    ),
    Mutant(
        "teacher-takes-any-transform",
        "fds/distill/_teacher.py",
        "if getattr(step, name) != plain[name] and getattr(step, name) != {}]:",
        "if name == 'none']:",
        "a transform that does nothing to a teacher is taken without a word",
        TEACHER,
    ),
)
