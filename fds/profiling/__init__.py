"""What a step takes: floating-point operations, parameters, bytes and time, module by module."""

from fds.profiling._profile import profile, profile_model
from fds.profiling.counting import Work
from fds.profiling.record import ModuleProfile, Profile

__all__ = ["ModuleProfile", "Profile", "Work", "profile", "profile_model"]
