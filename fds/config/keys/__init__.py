"""The keys of DeepSpeed's JSON: one record per group of keys."""
