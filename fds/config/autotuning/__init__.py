"""DeepSpeed's section `autotuning`: the experiments that it asks for, and the order in which they are searched."""

from fds.config.autotuning._experiments import Autotuning, Experiment
from fds.config.autotuning._search import ModelSize, Trial, best_of, search

__all__ = ["Autotuning", "Experiment", "ModelSize", "Trial", "best_of", "search"]
