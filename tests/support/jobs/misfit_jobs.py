"""What the ranks of the tests of misfits of divided updates run: `job_*(settings)`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from onstep import Callback, Trainer, TrainingArguments
from onstep.errors import OnstepError
from tests.support.jobs.parallel_jobs import Closing
from tests.support.jobs.sharding_jobs import Returning
from tests.support.small_runs import RaggedRows

DIVIDED = {"ddp.use_distributed_optimizer": True}


class Adapted(Returning):
    """With two matrices between embedding and output, of one row and of three, and what a misfit has besides."""

    def __init__(self, misfit: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.down, self.up = nn.Linear(8, 3, bias=False), nn.Linear(3, 8, bias=False)
        self.gate = nn.Linear(8, 1, bias=False)
        if misfit == "never used":
            self.spare = nn.Linear(2, 2)
        if misfit == "no dimension":
            self.scale = nn.Parameter(torch.ones(()))
        if misfit == "no matrix":
            for module in (self.down, self.up, self.gate):
                module.requires_grad_(False)
        if misfit == "frozen":
            self.down.requires_grad_(False)

    def forward(self, tokens: Tensor, labels: Tensor, reduction: str = "mean") -> Any:
        hidden = self.embed(tokens)
        hidden = hidden + self.up(torch.tanh(self.down(hidden))) * self.gate(hidden)
        logits = self.out(hidden)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)}


class OfMegatron:
    """An optimizer of Megatron's convention."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters()), "lr": 0.1}]

    def zero_grad(self) -> None: ...

    def step(self) -> tuple[bool, float, None]:
        return True, 0.0, None


class Freezing(Callback):
    """Freezes a matrix after the second step."""

    def on_step_end(self, context: Any) -> None:
        if context.step == 2:
            model = getattr(context.model[0], "module", context.model[0])
            model.up.requires_grad_(False)


def _trained(model: nn.Module, keys: dict[str, Any], optimizer: Any = None, callbacks: Any = ()) -> None:
    arguments = TrainingArguments(
        output_dir="run",
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=0.05,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        config_overrides={"run.save_weights": False, **keys},
    )
    Trainer(
        model, arguments, train_dataset=RaggedRows(16), optimizers=(optimizer, None), callbacks=[*callbacks]
    ).train()


def job_refused(settings: dict[str, Any]) -> dict[str, Any]:
    """What a Trainer says to each misfit, and whether a weight has changed by then."""
    sys.modules.pop("accelerate.state", None)
    found: dict[str, Any] = {}
    kinds = {"LBFGS": torch.optim.LBFGS, "closure": Closing}
    for misfit in settings["misfits"]:
        model, keys, optimizer = Adapted(misfit), dict(DIVIDED), None
        if misfit == "gathers alone":
            keys = {"ddp.overlap_param_gather": True}
        if misfit == "no matrix":
            keys["optimizer.optimizer"] = "muon"
        if misfit in kinds:
            optimizer = kinds[misfit](model.parameters(), lr=0.1)
        if misfit == "of Megatron":
            optimizer = OfMegatron(model)
        before = [one.detach().clone() for one in model.parameters()]
        try:
            _trained(model, keys, optimizer)
        except (OnstepError, TypeError) as error:
            is_same = all(map(torch.equal, before, model.parameters()))
            found[misfit] = [f"{type(error).__name__}: {error}", is_same]
    return found


def job_accepted(settings: dict[str, Any]) -> dict[str, list[list[float]]]:
    """The weights after a training of what is no misfit, by name: of replicas, or divided between the ranks."""
    overlaps = {"ddp.overlap_grad_reduce": True, "ddp.overlap_param_gather": True, "ddp.bucket_cap_mb": 1e-4}
    keys = {**DIVIDED, **overlaps} if settings["divides"] else {"ddp.find_unused_parameters": True}
    found = {}
    for name in settings["names"]:
        model = Adapted(name)
        more: dict[str, Any] = {"optimizer.optimizer": "muon"} if name == "few rows" else {}
        if name == "never used":
            more["ddp.find_unused_parameters"] = True
        _trained(model, {**keys, **more}, callbacks=[Freezing()] if name == "frozen later" else [])
        found[name] = [one.detach().flatten().tolist() for one in model.parameters()]
    return found
