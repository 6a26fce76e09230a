"""What of DeepSpeed beyond its documented interface is relied on, and where was it seen?

`TOUCHED` is the whole list for DeepSpeed 0.19; a test checks that every name is still there.
"""

__all__ = ["SUPPORTED_VERSIONS", "TOUCHED"]

SUPPORTED_VERSIONS = ("0.19",)
"""Release lines of DeepSpeed that the tests train."""

TOUCHED: dict[str, tuple[str, ...]] = {
    # Where masters lie, read and written in place.
    "deepspeed.runtime.zero.stage_1_and_2": (
        "bit16_groups",
        "single_partition_of_fp32_groups",
        "update_lp_params",
        "loss_scaler",
    ),
    "deepspeed.runtime.bf16_optimizer": (
        "using_real_optimizer",
        "bf16_groups",
        "bf16_groups_flat",
        "real_dp_process_group",
        "fp32_groups_flat_partition",
        "update_lp_params",
    ),
    "deepspeed.runtime.zero.stage3": (
        "fp16_groups",
        "fp32_partitioned_groups_flat",
        "sub_group_to_group_id",
        "_reassign_or_swap_out_partitioned_parameters",
        "persistent_parameters",
        "invalidate_secondary_tensor",
        "swap_optimizer",
        "params_in_nvme_and_cpu",
        "loss_scaler",
        "offload_optimizer",
        "partial_offload",
    ),
    "deepspeed.runtime.zero.partition_parameters": (
        "ds_tensor",
        "ds_shape",
        "ds_numel",
        "ds_process_group",
        "partition_numel",
    ),
    "deepspeed.runtime.fp16.unfused_optimizer": ("fp16_groups", "fp32_groups", "loss_scale_config"),
    "deepspeed.runtime.fp16.fused_optimizer": (
        "fp16_groups",
        "fp16_groups_flat",
        "fp32_groups_flat",
        "loss_scale_config",
    ),
    "deepspeed.runtime.utils": ("is_optimized_parameter",),
    "deepspeed.linear.optimized_linear": ("zero_shards",),
    "deepspeed.runtime.fp16.loss_scaler": (
        "cur_scale",
        "cur_iter",
        "last_overflow_iter",
        "cur_hysteresis",
    ),
    # Where a tensor lies in its whole, and this rank in the layout.
    "deepspeed.runtime.engine": (
        "param_names",
        "seq_data_parallel_group",
        "dp_world_size",
        "sequence_parallel_size",
        "autotp_size",
        "micro_steps",
        "managed_gradient_accumulation",
        "_unmanaged_backward_count",
        "_is_gradient_accumulation_boundary",
        "_take_model_step",
        "training_dataloader",
        "_config",
    ),
    "deepspeed.ops": ("__compatible_ops__",),
    "deepspeed.runtime.pipe.engine": ("stage_id", "num_stages", "grid"),
    "deepspeed.runtime.pipe.module": ("tied_comms", "weight_attr", "ds_pipe_replicated"),
    "deepspeed.moe.sharded_moe": ("ep_group", "num_local_experts"),
    "deepspeed.moe.experts": ("deepspeed_experts",),
    "deepspeed.module_inject.layers": (
        "replicated",
        "conversion",
        "affine_map",
        "unsupported_reason",
        "partition_sizes",
        "partition_dim",
        "logical_shape",
        "sub_param_sizes",
    ),
}
