"""From a configuration to calls of fds, with the checks and the memory estimate that follow from them."""
