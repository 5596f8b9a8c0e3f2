"""Schedules, one file one schedule: pure functions of (number of ranks, number of microbatches) to a plan."""
