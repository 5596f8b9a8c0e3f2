"""What a step takes: floating-point operations, parameters and time by module; memory, predicted and measured."""

from fds.profiling.counting import Work
from fds.profiling.memory import MemoryEstimate, MemoryProfile, estimate_memory, profile_memory
from fds.profiling.record import ModuleProfile, Profile, profile, profile_model

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
