"""What of Transformers and accelerate beyond their documented interfaces is relied on?

`TOUCHED` is the whole list for the versions below; a test checks that every name is still there.
"""

__all__ = ["SUPPORTED_VERSIONS", "TOUCHED"]

SUPPORTED_VERSIONS = {"transformers": "5.24", "accelerate": "1.15"}
"""Release lines that the tests train."""

TOUCHED: dict[str, tuple[str, ...]] = {
    # Replaced at one Trainer, and looked up there at every use.
    "transformers.trainer": (
        "_get_train_sampler",
        "_prepare_for_training",
        # Read or set.
        "_train_batch_size",
        "_initial_global_step",
        "_initial_num_input_tokens_seen",
        "_globalstep_last_logged",
        "_maybe_log_save_evaluate",
        "model_wrapped",
        "deepspeed",
    ),
    "transformers.trainer_callback": ("callbacks", "ExportableState", "should_training_stop"),
    "transformers.integrations.deepspeed": ("mismatches", "trainer_config_process"),
    "accelerate.utils.deepspeed": ("set_stage_and_offload",),
    "accelerate.utils.dataclasses": ("zero_stage", "deepspeed_config"),
    # Made to deal to one process: the sampler has dealt already.
    "accelerate.data_loader": ("num_processes", "process_index", "batch_sampler"),
}
