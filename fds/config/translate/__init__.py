"""From keys to what they mean here: calls of fds, and what is refused or held."""
