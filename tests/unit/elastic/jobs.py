"""A job small enough that every layout of it fits everywhere."""

from pathlib import Path

from tenplex_megatron.config import ElasticPolicy, load_profile
from tenplex_megatron.core.mesh import ParallelLayout
from tenplex_megatron.elastic.membership import Rules
from tenplex_megatron.planner.allowed import Job
from tenplex_megatron.planner.cluster import ClusterProfile
from tenplex_megatron.planner.profile import ModelProfile
from tenplex_megatron.planner.strategy import Strategy

CPU = Path(__file__).parents[3] / "configs/cluster/cpu.yaml"
MODEL = ModelProfile(
    num_layers=8,
    hidden_size=64,
    num_heads=8,
    num_query_groups=8,
    head_size=8,
    ffn_size=256,
    seq_length=32,
    vocab_size=256,
)


def small_job(policy: ElasticPolicy) -> Rules:
    """The rules of a job with 24 samples a batch."""
    base = Strategy(
        layout=ParallelLayout(micro_batch_size=1), global_batch_size=24, precision="fp32"
    )
    job = Job(model=MODEL, base=base, layouts=policy.layouts)
    return Rules(policy, job, load_profile(ClusterProfile, CPU))
