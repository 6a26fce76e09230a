"""What importing a module that initialises CUDA looks like to every process forked after it."""

import torch

torch.cuda._is_in_bad_fork = lambda: True
torch.cuda.device_count = lambda: 1
