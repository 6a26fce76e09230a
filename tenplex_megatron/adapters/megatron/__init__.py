"""Which code knows Megatron-LM."""
