from configs.cli import dispatch

dispatch(
    "data_prep",
    "Turns raw text into a vocabulary and indexed Arrow shards of training rows.",
    {
        "sample": ("data_prep.sample", "get real sample text without a data hub"),
        "vocab": ("data_prep.vocab", "train a tokenizer on a recipe's sources, or load one"),
        "build": ("data_prep.build", "build a recipe's shards (goes on where it was stopped)"),
        "verify": ("data_prep.verify", "check every byte of a shard folder"),
        "inspect": ("data_prep.inspect", "print rows as a person wants to see them"),
        "audit": ("data_prep.audit", "write an HTML report with pictures about a shard folder"),
    },
)
