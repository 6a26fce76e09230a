"""Which code knows DeepSpeed."""
