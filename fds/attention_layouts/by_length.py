"""`LayoutByLength`: the layouts of sequences of any length, from a rule, or cropped from the layout of the longest."""

from __future__ import annotations

import inspect
import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import attrs

from fds.attention_layouts.layout import AttentionLayout, check_block
from fds.errors import AttentionLayoutError, is_a, is_int

Rule = Callable[[int, int], AttentionLayout]  # of heads and blocks
MOST_LAYOUTS = 64  # that are kept; a layout takes little, and making it host time
MOST_BLOCKS = 1024  # of layouts that are made for sequences that are too short for a rule

_KEYS = itertools.count(1)
_LIVING: weakref.WeakValueDictionary[int, LayoutByLength] = weakref.WeakValueDictionary()


def _check_source(instance: Any, attribute: Any, value: Any) -> None:
    if not is_a(value, AttentionLayout) and not _is_rule(value):
        raise AttentionLayoutError(
            "neither a layout nor a rule",
            where="layout",
            got=repr(value)[:80],
            want="an AttentionLayout, or a function of heads and blocks such as fds.attention_layouts.bigbird",
            hint="functools.partial(bigbird, num_random_blocks=2); of an array AttentionLayout.from_dense",
        )


def _is_rule(value: Any) -> bool:
    """Return whether a value is called with heads and blocks."""
    try:
        inspect.signature(value).bind(1, 1)
    except (TypeError, ValueError):  # also of what is not called at all
        return False
    return not isinstance(value, type)


def _check_most(instance: Any, attribute: Any, value: Any) -> None:
    if value is not None and (not is_int(value, 1) or is_a(instance.source, AttentionLayout)):
        raise AttentionLayoutError(
            "max_tokens is how long the sequences are for which a rule makes one layout",
            where="max_tokens",
            got=repr(value)[:80] + ", and a layout" * is_a(instance.source, AttentionLayout),
            want="an int >= 1 beside a rule, or None",
        )


@attrs.frozen(eq=False, slots=False)
class LayoutByLength:
    """The layouts of sequences of any length: what a layer of sparse attention holds.

    A rule is a function of the numbers of heads and of blocks, as the patterns are; it makes a layout for each length,
    once, and for a length that it refuses, since its window is longer, a larger one, which is cropped. A layout is that
    of the longest sequences, and is cropped to others. With `max_tokens` a rule makes such a layout, as DeepSpeed's
    module does, so that a token sees the same keys however long a sequence is.

    Attributes:
        source: an `AttentionLayout`, or a rule. A rule's blocks have the tokens that its argument `block` says by
            default, or its attribute `block`: 16 where it has neither.
        max_tokens: None, or the longest sequences.
        key: a number of this object, which a compiled graph has in its place.

    Raises `AttentionLayoutError` for anything else.

    >>> from fds.attention_layouts import fixed
    >>> LayoutByLength(fixed).at(2, 90).nonzeros, LayoutByLength(fixed, 2048).at(2, 90).nonzeros
    (52, 44)
    """

    source: AttentionLayout | Rule = attrs.field(validator=_check_source)
    max_tokens: int | None = attrs.field(default=None, validator=_check_most)
    key: int = attrs.field(init=False, repr=False, factory=lambda: next(_KEYS))
    _made: dict[tuple[int, ...], AttentionLayout] = attrs.field(factory=dict, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        _LIVING[self.key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return LayoutByLength, (self.source, self.max_tokens)  # another object has a key of its own

    def __deepcopy__(self, memo: dict[int, Any]) -> LayoutByLength:
        """Return the object itself: copies of a layer share layouts."""
        return self

    @property
    def block(self) -> int:
        """Tokens of a block."""
        if isinstance(self.source, AttentionLayout):
            return self.source.block
        block = getattr(self.source, "block", None)
        if block is None:
            argument = inspect.signature(self.source).parameters.get("block")
            block = 16 if argument is None or argument.default is argument.empty else argument.default
        check_block("a rule", block)
        return block

    @property
    def is_cropped(self) -> bool:
        """Whether a token sees the same of the tokens before it, however long the sequence is."""
        return isinstance(self.source, AttentionLayout) or self.max_tokens is not None

    def at(self, heads: int, tokens: int, first: int = 0, count: int | None = None) -> AttentionLayout:
        """Return the layout of so many heads, or of one for all, whose last block ends in the last token, or after it.

        Of `count` heads from the first on, where that is given. torch.compile takes what this returns for a constant.

        Raises `AttentionLayoutError` for more tokens than the longest sequences have, other heads than a layout has,
        and for what a rule returns that is no such layout.
        """
        # `index`, since torch.compile takes it for constant; other numbers of tokens are another graph
        sizes = heads, operator.index(tokens), first, heads if count is None else count
        _fill(self.key, *sizes)
        return self._made[sizes]

    def _fill(self, *sizes: int) -> None:
        if sizes in self._made:
            return
        heads, tokens, first, count = sizes
        layout = self._make(heads, tokens, -(-tokens // self.block))
        if count < heads and layout.num_heads > 1:
            layout = AttentionLayout.of([layout.of_head(h) for h in range(first, first + count)], layout.block)
        if len(self._made) >= MOST_LAYOUTS:
            self._made.pop(next(iter(self._made)))
        self._made[sizes] = layout

    def _make(self, heads: int, tokens: int, blocks: int) -> AttentionLayout:
        most = self.source.tokens if isinstance(self.source, AttentionLayout) else self.max_tokens
        if not blocks or (most is not None and blocks > -(-most // self.block)):
            raise AttentionLayoutError(
                "a sequence is longer than those that the layout is for" if blocks else "a sequence has no tokens",
                where="layout",
                got=f"{tokens} tokens",
                want="1 or more" + f", at most {most}" * (most is not None),
                hint="a layout of more blocks, or a larger max_tokens, max_seq_length of a module" * bool(blocks),
            )
        if isinstance(self.source, AttentionLayout):
            layout = self.source
        elif self.max_tokens is not None and tokens < self.max_tokens:
            layout = self.at(heads, self.max_tokens)  # kept: generation asks for another length with each token
        else:
            layout = self._by_rule(self.source, heads, -(-most // self.block) if most is not None else blocks)
        if layout.num_heads not in (1, heads):
            raise AttentionLayoutError(
                "the layout is of other heads",
                where="layout",
                got=f"{layout.num_heads} heads of the layout",
                want=f"{heads}, as attention has, or 1",
            )
        return layout if layout.blocks == blocks else layout.cropped(blocks)

    def _by_rule(self, rule: Rule, heads: int, blocks: int) -> AttentionLayout:
        """Return what a rule makes for so many blocks, or, where that is too few for it, for more."""
        refused: AttentionLayoutError | None = None
        while refused is None or blocks < MOST_BLOCKS:
            try:
                layout = rule(heads, blocks)
            except AttentionLayoutError as error:  # such as: a row has fewer blocks than the window
                refused, blocks = error, 2 * blocks
            else:
                return self._checked(layout, rule, heads, blocks)
        raise refused

    def _checked(self, layout: Any, rule: Rule, heads: int, blocks: int) -> AttentionLayout:
        if not is_a(layout, AttentionLayout) or (layout.blocks, layout.block) != (blocks, self.block):
            raise AttentionLayoutError(
                "a rule returns no layout of this size",
                where=f"{getattr(rule, '__name__', type(rule).__name__)}({heads}, {blocks})",
                got=repr(layout)[:80],
                want=f"an AttentionLayout of {blocks} blocks of {self.block} tokens",
                hint="def rule(heads, blocks, block=32): of a rule with other blocks the default says their tokens",
            )
        return layout


def _fill(key: int, *sizes: int) -> None:
    _LIVING[key]._fill(*sizes)


# torch.compile calls it while it traces, and not again: a layout is made by NumPy. So `torch.compiler` marks a function
# whose result is constant; it would import torch._dynamo for that, which takes seconds.
_fill._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
