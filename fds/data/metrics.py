"""Metrics of samples for `analyse`: length, rarity of the vocabulary, counts of tokens, and any function."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Protocol

import attrs
import numpy as np
import torch
from torch import Tensor

from fds.data.tokens import TokenDocuments, TokenFile, TokenWindows, as_tokens
from fds.errors import DataError, FdsError, is_int

MOST_TOKENS = 1 << 20  # that are looked at at once, beside those of one sample: it bounds the memory of a metric
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OfSample = Callable[[Any], Any]


def named(function: object) -> str:
    """Return the name of a function or class."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None) or type(function).__module__}.{name}"


def identity(function: object) -> str:
    """Return the name of a function, the same in every process, with a digest of its code where it is Python's."""
    code = getattr(function, "__code__", None)
    digest = "" if code is None else " " + hashlib.blake2b(_content(code).encode(), digest_size=4).hexdigest()
    return named(function) + digest


def _content(constant: Any) -> str:
    if isinstance(constant, CodeType):
        return f"{constant.co_code!r} {constant.co_names} {[*map(_content, constant.co_consts)]}"
    return str(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)


def of_sample(**options: Any) -> Any:
    """Return the field of a function of a sample; with `default=None`, which is the sample itself, of that too."""
    return attrs.field(repr=lambda it: "None" if it is None else identity(it), validator=_check_function, **options)


def _check_function(metric: Any, attribute: Any, value: Any) -> None:
    if not callable(value) and value is not attribute.default:
        where, want = f"{type(metric).__name__}, {attribute.name}", "a function of a sample"
        raise DataError("not a function", where=where, got=repr(value)[:80], want=want)


def _check_size(metric: Any, attribute: Any, value: Any) -> None:
    if not is_int(value, 1):
        where = f"{type(metric).__name__}, {attribute.name}"
        raise DataError("not a size", where=where, got=repr(value)[:80], want="an int, 1 or more")


@attrs.frozen(eq=False)
class Samples:
    """Some consecutive samples, which are read once for all metrics."""

    dataset: Any
    begin: int
    end: int
    read: dict[int, list[Any]] = attrs.field(factory=dict)  # by the id of a function, which the metrics hold
    concatenated: dict[int, tuple[np.ndarray, np.ndarray]] = attrs.field(factory=dict)  # likewise

    def where(self, i: int) -> str:
        """Return the name of one of them, for errors."""
        return f"sample {self.begin + i}"

    def each(self, function: OfSample | None) -> list[Any]:
        """Return what a function makes of each sample; of None, the samples. Raises `DataError` where it raises."""
        if id(function) not in self.read:
            rows = range(self.begin, self.end) if function is None else self.each(None)
            apply, what = (self.dataset.__getitem__, "reading") if function is None else (function, named(function))
            values = []
            for i, row in enumerate(rows):
                try:
                    values.append(apply(row))
                except FdsError as error:
                    where = f"{self.where(i)}; {error.where}" if error.where else self.where(i)
                    raise DataError(error.what, where=where, got=error.got, want=error.want, hint=error.hint) from error
                except Exception as error:
                    got = f"{type(error).__name__}: {error}"[:200]
                    raise DataError(f"{what} raised an error", where=self.where(i), got=got) from error
            self.read[id(function)] = values
        return self.read[id(function)]

    def tokens(self, function: OfSample | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of all samples, concatenated, and the first place of each and the end.

        Raises `DataError` for a sample that is no sequence of integers.
        """
        if id(function) not in self.concatenated:
            of_file = function is None and isinstance(self.dataset, TokenFile | TokenWindows | TokenDocuments)
            rows = self.dataset.rows if of_file else lambda *_: self._concatenated(function)
            self.concatenated[id(function)] = rows(self.begin, self.end)
        return self.concatenated[id(function)]

    def _concatenated(self, function: OfSample | None) -> tuple[np.ndarray, np.ndarray]:
        samples = self.each(function)
        places = lambda rows: np.cumsum([0, *map(len, rows)])
        kind = samples[0].dtype if isinstance(samples[0], Tensor) else None
        if kind in INTEGERS and all(
            type(x) is Tensor and x.ndim == 1 and x.dtype == kind and x.is_cpu for x in samples
        ):
            return torch.cat(samples).numpy(), places(samples)  # 1 us a sample, where NumPy takes 10
        rows = []
        for i, sample in enumerate(samples):
            try:
                rows.append(as_tokens(sample, self.where(i)))
            except DataError as error:
                hint = "tokens=lambda sample: sample[...] says which they are" if function is None else ""
                raise DataError(error.what, where=error.where, got=error.got, want=error.want, hint=hint) from None
        tokens = np.concatenate(rows)
        if tokens.dtype.kind == "f":  # of int64 and uint64
            tokens = np.concatenate([row.astype(np.int64) for row in rows])
        return tokens, places(rows)

    def groups(self, function: OfSample | None) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        """Yield the samples in groups of some `MOST_TOKENS` tokens: the first, the end, their tokens, their places."""
        tokens, places = self.tokens(function)
        begin = 0
        while begin < self.end - self.begin:
            end = max(begin + 1, int(np.searchsorted(places, places[begin] + MOST_TOKENS, "right")) - 1)
            first = places[begin]
            yield begin, end, tokens[first : places[end]], places[begin : end + 1] - first
            begin = end

    def words(self, function: OfSample | None, size: int) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        """Yield the groups, whose tokens are words of a vocabulary. Raises `DataError` for the first that is not."""
        for begin, end, tokens, places in self.groups(function):
            if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
                at = int(np.flatnonzero((tokens < 0) | (tokens >= size))[0])
                sample = begin + int(np.searchsorted(places, at, "right")) - 1
                got, want = f"token {int(tokens[at])}", f"0 to {size - 1}, as vocabulary_size={size} says"
                raise DataError("a token is not in the vocabulary", where=self.where(sample), got=got, want=want)
            yield begin, end, tokens.astype(np.intp) if tokens.dtype == np.uint64 else tokens, places


class Metric(Protocol):
    """What is measured of samples."""

    @property
    def accumulates(self) -> bool:
        """Whether it is one array for all samples, their sum, rather than a number for each."""
        ...

    @property
    def needs(self) -> Metric | None:
        """The metric over all samples that must be there before this one is measured."""
        ...

    def measure(self, samples: Samples, total: np.ndarray | None) -> np.ndarray:
        """Return the numbers of these samples, `(n,)`, or their sum; `total` is what it needs. Raises `DataError`."""
        ...


@attrs.frozen
class PerSample:
    """A number for each sample: `function(sample)`, an int, a float or a tensor of one; a plain function stands for it.

    Integers stay integers; floats are float64.
    """

    function: OfSample = of_sample()
    accumulates, needs = False, None

    def measure(self, samples: Samples, total: np.ndarray | None) -> np.ndarray:
        """Return the number of each sample. Raises `DataError` for anything but finite numbers."""
        values = [_number(value, samples, i) for i, value in enumerate(samples.each(self.function))]
        if all(map(is_int, values)):
            return np.array(values, np.int64)
        for i, value in enumerate(values):
            if float(value) != value:
                got, want = f"{value} beside floats", "ints up to 2**53 beside floats"
                raise DataError("a number that float64 does not have", where=samples.where(i), got=got, want=want)
        return np.array(values, np.float64)


@attrs.frozen
class Accumulated:
    """The sum over all samples of `function(sample)`, an array of one shape for all: a histogram, say.

    Integers are summed as int64, floats as float64 in an order that no number of workers or ranks changes.
    """

    function: OfSample = of_sample()
    accumulates, needs = True, None

    def measure(self, samples: Samples, total: np.ndarray | None) -> np.ndarray:
        """Return the sum. Raises `DataError` for arrays that differ in shape or are not finite."""
        terms = [_array(value, samples.where(i)) for i, value in enumerate(samples.each(self.function))]
        return functools.reduce(lambda a, i: add(a, terms[i], samples.where(i)), range(1, len(terms)), terms[0])


@attrs.frozen
class SequenceLength:
    """The number of tokens of each sample.

    Args:
        tokens: a function of a sample that returns its tokens; None where the sample is a sequence of tokens.
    """

    tokens: OfSample | None = of_sample(default=None)
    accumulates, needs = False, None

    def measure(self, samples: Samples, total: np.ndarray | None) -> np.ndarray:
        """Return the lengths. Raises `DataError` for a sample that is no sequence of integers."""
        return np.diff(samples.tokens(self.tokens)[1])


@attrs.frozen
class TokenCounts:
    """How often each token of the vocabulary occurs in all samples, `(vocabulary_size,) int64`.

    Args:
        vocabulary_size: tokens are from 0 to this, exclusive.
        tokens: as of `SequenceLength`.
    """

    vocabulary_size: int = attrs.field(validator=_check_size)
    tokens: OfSample | None = of_sample(default=None)
    accumulates, needs = True, None

    def measure(self, samples: Samples, total: np.ndarray | None) -> np.ndarray:
        """Return the counts. Raises `DataError` for a token that is not in the vocabulary."""
        counts = np.zeros(self.vocabulary_size, np.int64)
        for *_, tokens, _ in samples.words(self.tokens, self.vocabulary_size):
            counts += np.bincount(tokens, minlength=self.vocabulary_size)
        return counts


@attrs.frozen
class VocabularyRarity:
    """The rarity of each sample's tokens: -sum log p(token), float64, where p is their share in all samples.

    A first pass over the samples counts the tokens, as `TokenCounts` does.

    Args:
        vocabulary_size: tokens are from 0 to this, exclusive.
        tokens: as of `SequenceLength`.

    Source: Platanios et al. 2019, arXiv:1903.09848, section 3.2.
    """

    vocabulary_size: int = attrs.field(validator=_check_size)
    tokens: OfSample | None = of_sample(default=None)
    accumulates = False

    @property
    def needs(self) -> TokenCounts:
        """The counts of all tokens."""
        return TokenCounts(self.vocabulary_size, self.tokens)

    def measure(self, samples: Samples, total: np.ndarray | None) -> np.ndarray:
        """Return the rarities. Raises `DataError` for a token that is not in the vocabulary."""
        assert total is not None
        with np.errstate(divide="ignore", invalid="ignore"):  # of tokens that do not occur, or where none does
            surprise = np.log(total.sum()) - np.log(total)
        rarity = np.zeros(samples.end - samples.begin)
        for begin, _, tokens, places in samples.words(self.tokens, self.vocabulary_size):
            filled = np.flatnonzero(np.diff(places))
            if len(filled):
                rarity[begin + filled] = np.add.reduceat(surprise[tokens], places[filled])
        return rarity


def add(a: np.ndarray, b: np.ndarray, where: str) -> np.ndarray:
    """Return a + b, of one shape. Raises `DataError` for other shapes, and where int64 or float64 overflows."""
    if a.shape != b.shape:
        got, want = f"shape {b.shape}", f"{a.shape}, as of the samples before"
        raise DataError("a metric has arrays of several shapes", where=where, got=got, want=want)
    total = a + b
    overflows = ((a ^ total) & (b ^ total) < 0) if total.dtype == np.int64 else ~np.isfinite(total)
    if overflows.any():
        raise DataError("the sum of a metric overflows", where=where, got=str(total.dtype), want="smaller numbers")
    return total


def _number(value: Any, samples: Samples, i: int) -> int | float:
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, int | float):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        got = f"{type(value).__name__}{shape}"
        raise DataError("a metric gave no number", where=samples.where(i), got=got, want="one int or float")
    if not math.isfinite(value) or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        want = "a finite number, an int of 64 bits"
        raise DataError("a number that cannot be sorted", where=samples.where(i), got=str(value)[:80], want=want)
    return int(value) if isinstance(value, bool) else value


def _array(value: Any, where: str) -> np.ndarray:
    try:
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        array = np.array(None)
    if (
        array.dtype.kind not in "biuf"
        or not np.isfinite(array).all()
        or (array.dtype == np.uint64 and (array >> 63).any())
    ):
        got, want = f"{type(value).__name__} of {array.dtype}", "an array of finite numbers, ints of 64 bits"
        raise DataError("a metric gave nothing to sum", where=where, got=got, want=want)
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
