"""What the server of `forked` imports once: all that trainings need."""

import os
import warnings

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # CUDA asked for its GPUs survives no fork
with warnings.catch_warnings(record=True):  # shows none of what Megatron would like beside it
    import deepspeed  # noqa: F401
    import megatron.core.tensor_parallel.layers  # noqa: F401

    import pretrain.engine_deepspeed  # noqa: F401
    import pretrain.trainer  # noqa: F401
    import tests.trainer.sabotage  # noqa: F401
