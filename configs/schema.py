"""Every key of a recipe, with its type and default. One recipe drives all three rooms.

A recipe is YAML; `base: other.yaml` (relative to the file) starts from another recipe; commands
take `key=value` overrides with the dotted names below. Each key has a reader in the code.

Folders, all below `work_dir`:
    vocab/          tokenizer.json and its metadata        (python -m data_prep vocab)
    shards/<set>/   part-*.arrow, index.json, held-out/    (python -m data_prep build)
    train/          checkpoints/, log.jsonl, tensorboard/  (python -m pretrain train)
    hf/             the exported Hugging Face folder       (python -m pretrain export)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.model import ModelConfig


@dataclass
class SourceConfig:
    """One corpus. kind: wikipedia (dump) | extracted (WikiExtractor) | books | hub | text | sentences."""

    kind: str = "text"
    path: str = ""  # file, folder or glob; for `hub` a data set name or a local folder in its shape
    name: str = ""  # how reports call it; the path's last part when empty
    weight: float = (
        1.0  # share of its documents that is used; above 1 repeats with fresh pair draws
    )
    split: str = "train"  # hub only
    config: str = ""  # hub only: the data set's configuration, e.g. 20231101.en
    revision: str = ""  # hub only: e.g. refs/convert/parquet
    text_column: str = "text"
    streaming: bool = False
    # What one document is: `file` (or article, or row), `chapter`, `window` of window_sentences, or
    # `rows`: window_sentences rows of a set with one sentence a row (hub, sentences); an
    # empty row ends one.
    document: str = "file"
    window_sentences: int = 512
    language: str = "en"

    @property
    def title(self) -> str:
        """Its name; without one `books` for data/books/*.txt, the path's last part that names something."""
        parts = [part for part in self.path.replace("\\", "/").split("/") if part]
        while len(parts) > 1 and any(mark in parts[-1] for mark in "*?["):
            parts.pop()
        last = parts[-1] if parts else self.kind
        return self.name or last.split(".")[0] or last


@dataclass
class VocabConfig:
    """The tokenizer. kind: wordpiece | unigram | bpe | byte-bpe. `file` loads instead of training."""

    kind: str = "wordpiece"
    file: str = ""  # vocab.txt, tokenizer.json, .model, or a folder with vocab.json + merges.txt
    size: int = 30522
    # Of a vocabulary trained here or of a lone vocab.txt: tokenizer.json and tokenizer_config.json
    # say it themselves. strip_accents None: as lowercase says (BERT's own behaviour).
    lowercase: bool = True
    strip_accents: bool | None = None
    min_frequency: int = 2
    sample_mb: int = 500  # text the vocabulary is trained on, spread over the sources; 0 = all


@dataclass
class ShardsConfig:
    """One set of shards. objective: nsp | sop | full-sentences | doc-sentences | single."""

    max_length: int = 128
    objective: str = "nsp"
    dupe_factor: int = 1  # passes over the corpus with fresh draws
    short_seq_prob: float = 0.1  # per document, as published with BERT
    # Per document, among the pairs of `nsp` and `sop`: rows as doc-sentences, which have no label.
    single_prob: float = 0.0
    # Longest row of two segments where single_prob > 0; 0 = max_length. Shorter pairs are more pairs,
    # and of `nsp` most have a random B (77% of those of 48 tokens): one sentence fills half a row.
    pair_max_length: int = 0
    # Predictions a row at most; 0 = ceil(highest masking rate x max_length): 20 of 128, 77 of 512.
    mask_cap: int = 0
    static_masks: bool = False  # write masks into the shard instead of drawing them in training


@dataclass
class PrepConfig:
    """How shards are built, whatever set they belong to."""

    held_out: float = 0.005  # share of documents kept for evaluation, chosen by hash of their text
    workers: int = 0  # 0 = one for each CPU it may use
    executor: str = "processes"  # processes | mpi
    part_mb: int = 256
    drop_duplicates: bool = True
    abbreviations: str = ""  # file with one abbreviation a line, added to the built-in list


@dataclass
class ParallelConfig:
    """World = tp x dp; dp follows from the number of processes."""

    tp: int = 1
    zero_stage: int = 1
    # auto (lean, and DeepSpeed for zero_stage 2) | deepspeed | lean: both give the same losses
    engine: str = "auto"
    # Whether ranks share out the tokens between products. null: GPUs of one host that reach each
    # other's memory do, but in fp8. true: others as well, by collectives, which is slower but takes
    # less memory.
    sequence_parallel: bool | None = None
    # Token budget of one forward pass on one GPU (packed). 0 = the largest that fits.
    micro_batch_tokens: int = 8192
    activation_checkpointing: bool = False


@dataclass
class OptimizerConfig:
    """LAMB (1904.00962). implementation: lambert | deepspeed | apex | reference."""

    implementation: str = "lambert"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = True
    # NVLAMB: gradients are divided by max(1, global norm / max_grad_norm) before the moments.
    max_grad_norm: float = 1.0  # 0 = off
    trust_ratio_min: float = 0.0
    trust_ratio_max: float = 0.0  # 0 = no ceiling
    # Bias and LayerNorm are never decayed. Off: they take a plain Adam step, without trust ratio, as in
    # the paper's code and in apex without use_nvlamb. On: a bias that starts at 0 hardly leaves it.
    adapt_bias_and_norm: bool = True
    # Above 0: the encoder's matrices take, instead of Adam's update, their momentum made orthogonal
    # (Muon: Jordan et al. 2024, 2502.16982), at this many times lr; trust ratios stay.
    orthogonal_lr: float = 0.0


@dataclass
class ScheduleConfig:
    """Learning rate by update count. kind: poly | linear | cosine | constant."""

    kind: str = "poly"
    lr: float = 6e-3
    power: float = 1.0  # poly: (1 - t)^power; NVIDIA's LAMB recipe uses 0.5
    warmup: float = 0.0  # below 1: share of the phase's steps; otherwise a number of steps
    end_lr: float = 0.0


@dataclass
class PhaseConfig:
    """A stretch of training on one set of shards; the moments go on from one phase to the
    next, and so do the rows of a set that an earlier phase has read from."""

    name: str = "phase1"
    shards: str = "len128"
    global_batch: int = 65536  # rows (sequences) per update, over all processes
    steps: int = 7038
    # Share of train.max_minutes after which the phase ends, if its steps have not ended it before: a
    # switch of rows or rates that falls alike on slow and fast cards. 0 = its steps alone.
    until: float = 0.0
    # Share of the tokens masked in this phase, e.g. 0.3 and later 0.15 (2305.15096); 0 =
    # masking.probability, at which held-out rows are scored in every phase.
    mask_probability: float = 0.0
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass
class MaskingConfig:
    """Dynamic masks (BERT section 3.1). kind: token | whole-word | span."""

    kind: str = "token"
    probability: float = 0.15
    replace_mask: float = 0.8
    replace_random: float = 0.1
    span_max: int = 10  # SpanBERT (1907.10529): geometric(0.2) clipped at 10
    span_p: float = 0.2


@dataclass
class CheckpointConfig:
    every: int = 500  # updates; 0 = only at the end of a phase
    keep: int = 3
    resume: bool = True
    asynchronous: bool = True
    init_from: str = ""  # an imported run folder (python -m pretrain import) to start from


@dataclass
class GuardConfig:
    """When to stop instead of wasting a cluster."""

    max_skipped_updates: int = 50  # fp16: consecutive updates skipped for overflow
    initial_loss_scale: float = 65536.0
    min_loss_scale: float = 1.0
    nan_patience: int = 3  # consecutive updates with a NaN or Inf loss before the run stops
    spike_factor: float = 3.0  # loss over its running median by this factor is reported as a spike
    spike_patience: int = 0  # consecutive spikes before the run stops; 0 = report only
    hang_timeout_s: int = (
        60  # a rank silent for so long ends the job (after the first update); 0 = never
    )
    # saved at the next update, then left with exit code 75; a second Ctrl-C leaves at once
    # (torchrun gives a save 30 s after the first)
    save_signals: list[str] = field(default_factory=lambda: ["SIGTERM", "SIGUSR1", "SIGINT"])


@dataclass
class TrainConfig:
    # fp32 | bf16 | fp16 | fp8. On Hopper fp8's weight gradients come out too small, by up to 1.1% at
    # micro-batches of 16k tokens and 4% at 64k (computed; pretrain/kernels/triton_fp8.py).
    precision: str = "bf16"
    stop_at: int = (
        0  # stop (with a checkpoint) after this many updates of the whole run; 0 = the end
    )
    # Minutes of training, without the first updates (which compile): the schedule of every phase is
    # stretched over all of them, and the last one's `steps` only bound its updates, as do those of
    # a phase with `until`. 0 = no limit.
    max_minutes: float = 0.0
    # Of the NSP (or SOP) loss beside the MLM loss. At 1, as published, a pair counts as much as all
    # masked tokens of a row.
    nsp_weight: float = 1.0
    # Start the MLM bias at the log frequencies of the training rows' tokens (2212.09686): otherwise
    # the first updates teach them to the hidden states, all in one direction.
    unigram_bias: bool = False
    # Start the position embeddings as sinusoids (1706.03762) of BERT's variance: neighbours are found
    # by one rotation for all positions, instead of learned for each. They are trained all the same.
    sinusoidal_positions: bool = False
    eval_every: int = 0  # updates; 0 = only at start and end
    eval_rows: int = 4096  # held-out rows scored; 0 = all
    probe: str = ""  # a BLiMP parquet: scored by pseudo-log-likelihood at each evaluation
    probe_pairs: int = 1000
    log_every: int = 1
    compile: bool = True  # on GPUs, lean engine: record each shape's kernels once and replay them
    kernels: str = "auto"  # auto (fused on GPU) | plain
    shards_dir: str = ""  # read shard sets from here (a node-local copy) instead of work_dir/shards
    threads: int = 0  # torch threads a process; 0 = its share of the CPUs that it may use
    deterministic: bool = False


@dataclass
class Recipe:
    """The whole job, text to Hugging Face model."""

    name: str = "bert"
    seed: int = 42
    work_dir: str = ""  # runs/<name> when empty
    sources: list[SourceConfig] = field(default_factory=list)
    vocab: VocabConfig = field(default_factory=VocabConfig)
    prep: PrepConfig = field(default_factory=PrepConfig)
    shards: dict[str, ShardsConfig] = field(default_factory=dict)  # {len128: defaults} when empty
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    phases: list[PhaseConfig] = field(default_factory=lambda: [PhaseConfig()])
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)


@dataclass
class Profile:
    """A SLURM site: what every job there needs. Keys not set are left out of the scripts."""

    name: str = "site"
    partition: str = ""
    account: str = ""
    qos: str = ""
    nodes: int = 1
    gpus_per_node: int = 0  # 0: a CPU cluster, tasks_per_node processes on each node
    tasks_per_node: int = 0  # 0 = gpus_per_node
    cpus_per_task: int = 0
    time_limit: str = "24:00:00"
    prep_nodes: int = 1
    prep_tasks_per_node: int = 1
    prep_time_limit: str = "12:00:00"
    starter: str = "srun"  # srun (a task per GPU) | torchrun | deepspeed (a launcher per node)
    mpi: str = "pmix"  # srun --mpi=
    signal: str = "USR1"
    signal_lead_s: int = 180  # seconds before the time limit
    modules: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)  # shell lines, e.g. activate an environment
    environment: dict[str, str] = field(default_factory=dict)  # NCCL_SOCKET_IFNAME, ...
    container: str = ""  # put before each command, e.g. `apptainer exec --nv image.sif`
    srun_options: str = (
        ""  # added to each srun, e.g. pyxis' `--container-image=... --no-container-...`
    )
    python: str = "python"
    offline: bool = False  # HF_HUB_OFFLINE=1 and no package index
    wheelhouse: str = ""
    stage_shards_to: str = ""  # node-local folder the shards are copied to first
    preflight: bool = True  # check every node at the start of each training job
    max_restarts: int = 20
    sbatch_options: dict[str, str] = field(default_factory=dict)  # anything else, passed through
