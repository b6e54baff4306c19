"""Declares the arguments for checkpoints, which are kept, and what a run continues from."""

from __future__ import annotations

from dataclasses import dataclass, field

from onstep.config.hf.argument import Choice, Steps, argument, declares_arguments


@declares_arguments
@dataclass(kw_only=True)
class SavingArguments:
    """Checkpoints, which are kept, and what a run continues from."""

    save_strategy: str = argument("steps", choices=("no", "steps", "epoch", "best"))
    """no | steps | epoch | best: when an evaluation yields the best `metric_for_best_model` so far. `steps` and `epoch`
    also save at the end of the run; all of them, `no` included, save when a signal ends it."""
    save_steps: Steps | None = argument(500, bound=">= 0")
    """Steps; below 1 it is a share of the run."""
    save_total_limit: int | None = None
    """Number of newest checkpoints to keep, beside the best ones; None keeps all."""
    save_only_model: bool = False
    """Save checkpoints without optimizer, scheduler and random generators."""
    save_on_each_node: bool = False
    """Accepted for ranks on one machine, where it makes no difference; several save to storage that all of them see."""
    checkpoint_components: list[str] | None = None
    """Parts to save: model, optimizer, scheduler, trainer, dataset, rng, callbacks; None is all."""
    load_best_model_at_end: bool = False
    """Load the weights of the best checkpoint after training. Saves must be at evaluated steps."""
    preserve_best_model: bool = False
    """Keep the best checkpoints beyond `save_total_limit`. Saves must be at evaluated steps."""
    preserve_n_best: int = argument(1, bound="> 0")
    """How many best checkpoints to keep."""
    resume_from_checkpoint: Choice | None = None
    """A checkpoint, or a directory of checkpoints, to start from. True continues the run in `output_dir` from its
    newest checkpoint, which must exist. None continues it only if it was interrupted and is the same; False never."""
    overwrite_output_dir: bool = False
    """Start from scratch even if the run in `output_dir` was interrupted; its checkpoints move to `checkpoints-<n>`."""
    restore_callback_states_from_checkpoint: bool = False
    """True restores what an `ExportableState` callback of the checkpoint was created with, too; its attributes, and the
    states of all other callbacks, are always restored."""
    enable_jit_checkpoint: bool = False
    """Accepted without effect: SIGTERM always saves a checkpoint and ends the run."""
    push_to_hub: bool = False
    """Upload the model to the Hugging Face Hub, as `hub_strategy` says, in the background while the run trains."""
    hub_model_id: str | None = None
    """The repository, as `owner/model`, or `model` for one of the token's owner; None is the name of `output_dir`."""
    hub_token: str | None = field(default=None, repr=False)
    """A token that may write there. None for `huggingface_hub`'s own ways: HF_TOKEN, or the file of `hf auth login`."""
    hub_private_repo: bool | None = None
    """Whether a repository that is created is private; None is the owner's default."""
    hub_strategy: str = argument("every_save", choices=("end", "every_save", "checkpoint", "all_checkpoints"))
    """What is uploaded beside the final weights: nothing (`end`); the weights of each save (`every_save`); the newest
    whole checkpoint, too, as `last-checkpoint` (`checkpoint`); or every whole checkpoint (`all_checkpoints`)."""
    hub_always_push: bool = False
    """Whether a save is queued for upload while the one before is unfinished. False skips it; its files come with a
    later one."""
    hub_revision: str | None = None
    """The branch of the repository, which is created if it is missing; None is `main`."""
