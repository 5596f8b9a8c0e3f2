"""The subsets of tokens that `fds.random_ltd` draws, noted for forwards that are written by hand."""

from torch import Tensor

from fds.nn.kept_tokens import Tokens


def noted(monkeypatch) -> list[Tensor]:
    """Return a list to which every subset is added when it is drawn, (B, k) int64."""
    indices, draw = list[Tensor](), Tokens.drawn

    def noting(*args, **kwargs):
        tokens = draw(*args, **kwargs)
        indices.append(tokens.index)
        return tokens

    monkeypatch.setattr(Tokens, "drawn", noting)
    return indices
