"""DeepSpeed's configuration as frozen records, which turn into a composition of transforms."""

from fds.config.auto import training_arguments
from fds.config.batch import BatchConfig
from fds.config.communication import ClippingConfig, CommunicationConfig
from fds.config.optimizer import OptimizerConfig
from fds.config.precision import AmpConfig, BF16Config, DataTypesConfig, FP16Config, TorchAutocastConfig
from fds.config.record import Config
from fds.config.scheduler import SchedulerConfig
from fds.config.training import TrainingConfig
from fds.config.zero import ZeroConfig

__all__ = [
    "AmpConfig", "BF16Config", "BatchConfig", "ClippingConfig", "CommunicationConfig", "Config", "DataTypesConfig",
    "FP16Config", "OptimizerConfig", "SchedulerConfig", "TorchAutocastConfig", "TrainingConfig", "ZeroConfig",
    "training_arguments",
]
