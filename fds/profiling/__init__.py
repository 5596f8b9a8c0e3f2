"""What a step takes: floating-point operations, parameters and time by module; memory, predicted and measured."""

from fds.profiling._profile import profile, profile_model
from fds.profiling.counting import Work
from fds.profiling.memory import MemoryProfile, profile_memory
from fds.profiling.predicted import MemoryEstimate, estimate_memory
from fds.profiling.record import ModuleProfile, Profile

__all__ = [
    "MemoryEstimate",
    "MemoryProfile",
    "ModuleProfile",
    "Profile",
    "Work",
    "estimate_memory",
    "profile",
    "profile_memory",
    "profile_model",
]
