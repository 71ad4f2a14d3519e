from configs.cli import dispatch

dispatch(
    "cluster",
    "Plans, submits and watches a recipe on a cluster.",
    {
        "demo": ("cluster.demo", "text to a Hugging Face model on this machine, step by step"),
        "plan": ("cluster.plan", "memory, step time and GPU-hours of a recipe on N cards"),
        "submit": ("cluster.submit", "queue the whole chain of a recipe with SLURM"),
        "status": ("cluster.status", "one screen about a submitted run"),
        "hostfile": ("cluster.hostfile", "a hostfile for the deepspeed launcher"),
        "launch": (
            "cluster.launch",
            "run a command with RANK, WORLD_SIZE, ... mapped from SLURM or MPI",
        ),
        "preflight": ("cluster.preflight", "check this node before a long job"),
    },
)
