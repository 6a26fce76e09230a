"""TensorOpt's own setting: operators that split, replicate or sum, and what lies between them."""
