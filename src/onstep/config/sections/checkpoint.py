"""Saving and keeping checkpoints, and continuing from them."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.section import INITIAL_ONLY, PATH, SAFE, TRAJECTORY, Bound, ConfigSection, option
from onstep.config.sections.training import EVALUATIONS, VALIDATION_SHARE

COMPONENTS = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng", "callbacks")
"""What `checkpoint.components` selects from."""

DIRECTORY = "a directory: run.name or checkpoint.save"
_LOADS = "checkpoint.load or checkpoint.ckpt_step; a run that merely continues loads everything"
_TEMPORARY = "checkpoint.non_persistent_save_interval"
_IN_MEMORY = "checkpoint.non_persistent_place=memory"
_KEPT = Bound("-1 for all, or at least 1: the newest one", lambda kept: kept == -1 or kept >= 1)


@dataclass
class CheckpointConfig(ConfigSection):
    """Saving of checkpoints (schedule, content, retention), and how a run continues from them."""

    save: str | None = option(
        None,
        SAFE,
        bound=PATH,
        common=True,
        help=(
            "Directory of the checkpoints; None is `<run>/checkpoints`, or no checkpoints for a run without a "
            "directory."
        ),
    )
    save_interval: int | None = option(
        None,
        SAFE,
        bound="> 0",
        common=True,
        known_as=("save_steps", "save_every"),
        needs=DIRECTORY,
        help="Steps between checkpoints; None saves only at the end, on request and on signals.",
    )
    save_each_epoch: bool = option(False, SAFE, needs=DIRECTORY, help="Save at the end of each epoch.")
    save_on_best: bool = option(
        False,
        SAFE,
        needs=(DIRECTORY, EVALUATIONS, VALIDATION_SHARE),
        help="Save when an evaluation yields the best `validation.metric_for_best_model` so far.",
    )
    save_at_end: bool = option(True, SAFE, help="Save after the last step, so that the run can be extended.")
    non_persistent_save_interval: int | None = option(
        None,
        SAFE,
        bound="> 0",
        needs=DIRECTORY,
        help="Steps between temporary checkpoints, of which only the newest is kept.",
    )
    non_persistent_place: str = option(
        "disk",
        SAFE,
        choices=("disk", "memory"),
        needs=_TEMPORARY,
        help="Where temporary checkpoints are: disk (beside the others) | memory (of the nodes, each part on two of "
        "them: a start after the loss of one reads no checkpoint from the disk).",
    )
    memory_dir: str = option(
        "/dev/shm",
        SAFE,
        bound=PATH,
        needs=_IN_MEMORY,
        help="Directory on a file system in memory (tmpfs), for checkpoints there; each node expands environment "
        "variables in it.",
    )
    memory_partner: bool | None = option(
        None,
        SAFE,
        needs=_IN_MEMORY,
        help="Copy what a node has in memory to a partner, the next node, so that either may be lost; None copies "
        "where there are several nodes, true refuses a single one.",
    )
    async_save: bool = option(
        False,
        SAFE,
        needs=DIRECTORY,
        help="Write checkpoints in a thread: training waits only while the tensors are copied.",
    )
    copy_beside_step: bool = option(
        True,
        SAFE,
        needs="checkpoint.async_save=true",
        help="With `async_save` on a GPU, copy weights and optimizer state beside the next step's forward and backward "
        "pass; false copies them before it, for a model that changes weights in its forward pass.",
    )
    save_optim: bool = option(True, SAFE, needs=DIRECTORY, help="Save the optimizer and the scheduler.")
    save_rng: bool = option(True, SAFE, needs=DIRECTORY, help="Save the random generators.")
    components: list[str] | None = option(
        None,
        SAFE,
        elements=COMPONENTS,
        hf="checkpoint_components",
        needs=DIRECTORY,
        help="Components to save: model, optimizer, scheduler, trainer, dataset, rng, callbacks; None is all.",
    )
    on_save_error: str = option(
        "stop",
        SAFE,
        choices=("stop", "continue"),
        needs=DIRECTORY,
        help="Policy for a save that fails: stop (training ends with the error) | continue (a warning; the "
        "previous checkpoint stays, and a run whose last save failed ends as failed).",
    )
    resume: bool = option(True, SAFE, help="Continue from the run's newest verified checkpoint.")
    load: str | None = option(
        None,
        SAFE,
        bound=PATH,
        common=True,
        known_as=("resume_from_checkpoint",),
        help="A checkpoint, or a directory of checkpoints, to start from; None is the run's own directory.",
    )
    ckpt_step: int | None = option(
        None, SAFE, bound=">= 0", help="Start from the checkpoint of this step instead of the newest."
    )
    pretrained_checkpoint: str | None = option(
        None,
        TRAJECTORY,
        bound=PATH,
        effect=INITIAL_ONLY,
        common=True,
        known_as=("model_name_or_path",),
        help="Weights that `finetune` starts from: a Hugging Face directory, a run, or a checkpoint.",
    )
    finetune: bool = option(
        False,
        TRAJECTORY,
        effect=INITIAL_ONLY,
        help="Load only the weights from `load`: steps, optimizer and random state start from scratch.",
    )
    exit_on_missing_checkpoint: bool = option(
        False,
        SAFE,
        needs="checkpoint.load",
        help="Refuse to start from scratch when `load` is the directory that the run saves to and holds no checkpoint "
        "yet.",
    )
    load_optim: bool = option(
        True,
        TRAJECTORY,
        effect="the optimizer starts without its moments",
        needs=_LOADS,
        help="Load the optimizer and the scheduler.",
    )
    load_rng: bool = option(
        True,
        TRAJECTORY,
        effect="the random generators start from the seed",
        needs=_LOADS,
        help="Load the random generators.",
    )
    on_config_change: str = option(
        "error",
        SAFE,
        choices=("error", "keep", "apply"),
        common=True,
        help="Policy on resume for a changed configuration and for changed files of the data or the tokenizer: error | "
        "keep (the stored values; changed files remain an error) | apply (the current values and files).",
    )
    most_recent_k: int = option(
        -1,
        SAFE,
        bound=_KEPT,
        common=True,
        known_as=("save_total_limit",),
        needs=DIRECTORY,
        help="Checkpoints to keep, counted from the newest; -1 keeps all.",
    )
    keep_every_n: int | None = option(
        None,
        SAFE,
        bound="> 0",
        needs=(DIRECTORY, "checkpoint.most_recent_k > 0; -1 keeps every checkpoint"),
        help="Keep checkpoints of steps that are a multiple of this, beyond `most_recent_k`.",
    )
    keep_best_n: int = option(
        0,
        SAFE,
        bound=">= 0",
        common=True,
        needs=(DIRECTORY, EVALUATIONS, VALIDATION_SHARE, "checkpoint.most_recent_k > 0; -1 keeps every checkpoint"),
        help="Number of best checkpoints by `validation.metric_for_best_model` (default `loss`) to keep beyond "
        "`most_recent_k`.",
    )
    load_best_model_at_end: bool = option(
        False,
        SAFE,
        hf="load_best_model_at_end",
        help="Load the weights of the best checkpoint after training; the progress is not changed.",
    )
    validate_replication: bool = option(
        False, SAFE, needs=DIRECTORY, help="Compare replicated state across ranks at each save."
    )
    certify: bool = option(
        False,
        SAFE,
        help="Extend a hash chain at each step (samples, random state, learning rate, loss, weights), saved in "
        "checkpoints. Sets `train.deterministic`, unless that is false.",
    )
