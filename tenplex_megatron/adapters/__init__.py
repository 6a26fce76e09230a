"""Which code knows a training framework."""
