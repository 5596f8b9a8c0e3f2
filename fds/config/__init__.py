"""DeepSpeed's configuration as frozen records, which turn into a composition of transforms."""

from fds.config.keys.optimizer import OptimizerConfig, SchedulerConfig
from fds.config.keys.step import (
    AmpConfig,
    BatchConfig,
    BF16Config,
    ClippingConfig,
    CommunicationConfig,
    DataTypesConfig,
    FP16Config,
    TorchAutocastConfig,
)
from fds.config.keys.zero import ZeroConfig
from fds.config.reading import training_arguments
from fds.config.record import Config
from fds.config.training import TrainingConfig

__all__ = [
    "AmpConfig",
    "BF16Config",
    "BatchConfig",
    "ClippingConfig",
    "CommunicationConfig",
    "Config",
    "DataTypesConfig",
    "FP16Config",
    "OptimizerConfig",
    "SchedulerConfig",
    "TorchAutocastConfig",
    "TrainingConfig",
    "ZeroConfig",
    "training_arguments",
]
