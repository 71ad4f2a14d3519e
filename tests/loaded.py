"""What the fork server of `forked` imports once: all that a training needs."""

import deepspeed  # noqa: F401

import pretrain.trainer  # noqa: F401
import tests.trainer.sabotage  # noqa: F401
