"""What does a DeepSpeed training script call?

from tenplex_megatron.deepspeed import ElasticSampler, elastic

sampler = ElasticSampler(dataset, seed=1)
engine = elastic(engine, sampler)
"""

from tenplex_megatron.adapters.deepspeed.hooks import elastic
from tenplex_megatron.adapters.sampler import ElasticSampler

__all__ = ["ElasticSampler", "elastic"]
