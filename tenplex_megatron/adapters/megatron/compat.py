"""What of Megatron-LM beyond its public interface is relied on, and in which versions was it seen?

`TOUCHED` is the whole list; a test compares its versions with the README and checks that every name
exists in the installed version.
"""

from pathlib import Path
from types import ModuleType

from megatron.core.datasets import utils as dataset_utils

__all__ = ["SUPPORTED_VERSIONS", "TOUCHED", "use_built_helpers"]

SUPPORTED_VERSIONS = ("0.19",)
"""Release lines of megatron-core that the tests train."""

TOUCHED: dict[str, tuple[str, ...]] = {
    # Wrapped as module globals; the names hold from core_v0.12 to core_v0.19.
    "megatron.training.arguments": ("add_megatron_arguments",),
    "megatron.training.training": (
        "setup_model_and_optimizer",
        "build_train_valid_test_datasets",
        "train_step",
        "train",
        "checkpoint_and_decide_exit",
    ),
    "megatron.training.datasets.data_samplers": ("MegatronPretrainingSampler",),
    "megatron.training.initialize": ("_set_random_seed",),
    "megatron.training.argument_utils.ArgumentGroupFactory": ("_get_field_docstrings",),
    # Read and written in place; the structure holds from core_v0.12 to core_v0.19.
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": (
        "_get_main_param_and_optimizer_states",
        "_copy_main_params_to_model_params",
    ),
    "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params": (
        "_copy_main_params_to_model_params",
    ),
    "megatron.core.optimizer.optimizer": ("param_group_identifier_keys",),
}


def use_built_helpers(utils: ModuleType = dataset_utils) -> None:
    """Keep Megatron from building its dataset helpers where the wheel ships them built.

    Its `compile_helpers` runs make in a folder that has a Makefile only in a source checkout, and
    ends the process when that fails.
    """
    folder = Path(str(utils.__file__)).parent
    if not (folder / "Makefile").exists() and list(folder.glob("helpers_cpp.*.so")):
        vars(utils)["compile_helpers"] = lambda: None
