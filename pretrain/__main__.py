import os

from configs.cli import dispatch
from configs.cpus import usable_cpus

# What torch and numpy start threads by; a launcher or the user may have said another number. Ranks of
# a training share them later (train.threads).
os.environ.setdefault("OMP_NUM_THREADS", str(usable_cpus()))

dispatch(
    "pretrain",
    "Trains BERT with LAMB on shards and turns checkpoints into Hugging Face models.",
    {
        "train": ("pretrain.train", "train a recipe (goes on from its last checkpoint)"),
        "report": ("pretrain.report", "HTML page with the curves of one run or several"),
        "export": ("pretrain.convert.export", "write a checkpoint as a Hugging Face folder"),
        "import": (
            "pretrain.convert.importing",
            "make a run out of a Hugging Face, Google or NVIDIA model",
        ),
        "evaluate": ("pretrain.evaluate", "held-out loss, accuracy, NSP and BLiMP of a model"),
        "finetune": ("pretrain.downstream.finetune", "GLUE, SQuAD, NER, SWAG or your own labels"),
    },
)
