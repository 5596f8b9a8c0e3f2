"""The keys of DeepSpeed's JSON: a record per group."""
