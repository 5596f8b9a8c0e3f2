"""Transforms, `Step -> Step`: a file holds one, or near relatives, under their cards. Import them from `fds`."""
