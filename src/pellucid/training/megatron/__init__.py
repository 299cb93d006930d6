"""The third training engine: a model spread by megatron-core over tensor, pipeline, context, expert and data ranks."""

import warnings

for _message in (  # of megatron-core, and of torch to megatron-core: nothing that a user can mend
    "(Transformer Engine and )?Apex (is|are) not installed",
    "full scope is deprecated",
    "Please use DTensor instead",
    "`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    "`load_state_dict` is deprecated",
    r"The \.grad attribute of a Tensor that is not a leaf",
):
    warnings.filterwarnings("ignore", message=_message)
