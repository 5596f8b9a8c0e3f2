"""The fault campaign: killed saves, failing requests, files that were tampered with. `make faults` runs it all."""
