"""The scheduler of a run: writes learning rate and weight decay into an optimizer's parameter groups."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from onstep.errors import ConfigError
from onstep.optim.param_schedules import LrSchedule, WdSchedule, learning_rate, weight_decay
from onstep.optim.protocol import HasParamGroups

_LR_STATE = ("max_lr", "lr_warmup_steps", "lr_decay_style", "lr_decay_steps", "min_lr")
_MORE_LR_STATE = ("init_lr",)
"""Keys beyond Megatron-Core's; older checkpoints have none of these."""
_WSD_STATE = ("wsd_decay_steps", "lr_wsd_decay_style")
"""The same, where the style is WSD."""
_ALL_LR_STATE = _LR_STATE + _MORE_LR_STATE + _WSD_STATE
_WD_STATE = ("start_wd", "end_wd", "wd_incr_style", "wd_incr_steps")


class OptimizerParamScheduler:
    """Learning rate and weight decay as a function of the samples trained on; the signature is Megatron-Core's.

    Constructing it writes the values at 0 samples. A parameter group may carry its own `max_lr`, `min_lr`, `start_wd`,
    `end_wd` (None is the scheduler's), an `lr_mult` that multiplies its learning rate and a `wd_mult` that multiplies
    its weight decay. A group's learning rate that is a tensor (capturable optimizers) is written in place, so that
    captured graphs see it.

    Raises:
        ConfigError: see `LrSchedule` and `WdSchedule`.
    """

    def __init__(
        self,
        optimizer: HasParamGroups,
        *,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: float,
        lr_decay_steps: float,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: float,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: float | None = None,
        lr_wsd_decay_style: str | None = None,
    ) -> None:
        if override_opt_param_scheduler and use_checkpoint_opt_param_scheduler:
            raise ConfigError(
                "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler are both True, but a checkpoint's "
                "schedule can only be kept or replaced; set one of them to False"
            )
        self.optimizer = optimizer
        self.lr_schedule = LrSchedule(
            init_lr=init_lr,
            max_lr=max_lr,
            min_lr=min_lr,
            lr_warmup_steps=lr_warmup_steps,
            lr_decay_steps=lr_decay_steps,
            lr_decay_style=lr_decay_style,
            wsd_decay_steps=wsd_decay_steps,
            lr_wsd_decay_style=lr_wsd_decay_style,
        )
        self.wd_schedule = WdSchedule(start_wd, end_wd, wd_incr_steps, wd_incr_style)
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self.num_steps = 0
        """Samples trained on."""
        self._lr_factor = 1.0
        self._write()

    @property
    def lr_factor(self) -> float:
        """Multiplies every learning rate; setting it writes the new rates at once. It is not part of the state."""
        return self._lr_factor

    @lr_factor.setter
    def lr_factor(self, factor: float) -> None:
        self._lr_factor = factor
        self._write()

    def step(self, increment: int) -> None:
        """Move on by `increment` samples and write the values that the next update uses."""
        self.num_steps += increment
        self._write()

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """The learning rate of `param_group` at the present count, with its `lr_mult` and with `lr_factor`."""
        rate = learning_rate(self.num_steps, self._lr_schedule_of(param_group)) * self._lr_factor
        return rate * float(param_group.get("lr_mult", 1.0))

    def get_wd(self, param_group: dict[str, Any] | None = None) -> float:
        """The weight decay at the present count, with the group's `start_wd` and `end_wd` but before its `wd_mult`."""
        return weight_decay(self.num_steps, self._wd_schedule_of(param_group or {}))

    def state_dict(self) -> dict[str, Any]:
        """The count and the shape of the schedules, as plain numbers and strings; the keys are Megatron-Core's, and
        `init_lr`, with WSD also `wsd_decay_steps` and `lr_wsd_decay_style`."""
        names = _LR_STATE + _MORE_LR_STATE + (_WSD_STATE if self.lr_schedule.lr_decay_style == "WSD" else ())
        shape = {name: getattr(self.lr_schedule, name) for name in names}
        shape |= {name: getattr(self.wd_schedule, name) for name in _WD_STATE}
        return {"num_steps": self.num_steps, **shape}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue a saved schedule: its `num_steps` is added to the present count, as in Megatron-Core.

        A value that the state does not have, as of an older checkpoint, is ours.

        To go back within a process, set `num_steps` to 0 first.

        Raises:
            ConfigError: the saved shape differs and neither `override_opt_param_scheduler` (keep our own) nor
                `use_checkpoint_opt_param_scheduler` (take the saved one) says which to use; nothing was changed.
        """
        if "num_steps" not in state_dict:
            raise ConfigError(f"a scheduler state must hold num_steps, got {', '.join(state_dict) or 'nothing'}")
        lr_schedule = replace(self.lr_schedule, **self._resolve(self.lr_schedule, _ALL_LR_STATE, state_dict))
        wd_schedule = replace(self.wd_schedule, **self._resolve(self.wd_schedule, _WD_STATE, state_dict))
        self.lr_schedule, self.wd_schedule = lr_schedule, wd_schedule
        self.step(state_dict["num_steps"])

    def _resolve(self, own: LrSchedule | WdSchedule, names: tuple[str, ...], saved: dict[str, Any]) -> dict[str, Any]:
        """The saved values to take over into `own`."""
        if self.override_opt_param_scheduler:
            return {}
        values = {name: saved[name] for name in names if name in saved}
        if self.use_checkpoint_opt_param_scheduler:
            return values
        for name, value in values.items():
            if value != getattr(own, name):
                raise ConfigError(
                    f"{name} must be what the checkpoint has, {value!r}, got {getattr(own, name)!r}; set "
                    "override_opt_param_scheduler to keep ours or use_checkpoint_opt_param_scheduler to take the saved"
                )
        return {}

    def _write(self) -> None:
        """Write the values at the present count. In the loop's hot path: the common values are computed once."""
        num_steps, lr_schedule, wd_schedule = self.num_steps, self.lr_schedule, self.wd_schedule
        common_lr, common_wd = learning_rate(num_steps, lr_schedule), weight_decay(num_steps, wd_schedule)
        for group in self.optimizer.param_groups:
            own_lr = self._lr_schedule_of(group)
            lr = (common_lr if own_lr is lr_schedule else learning_rate(num_steps, own_lr)) * self._lr_factor
            lr *= float(group.get("lr_mult", 1.0))
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            if "weight_decay" in group:
                own_wd = self._wd_schedule_of(group)
                wd = common_wd if own_wd is wd_schedule else weight_decay(num_steps, own_wd)
                group["weight_decay"] = wd * group.get("wd_mult", 1.0)

    def _lr_schedule_of(self, group: dict[str, Any]) -> LrSchedule:
        schedule, max_lr, min_lr = self.lr_schedule, group.get("max_lr"), group.get("min_lr")
        if max_lr is None and min_lr is None:
            return schedule
        is_same = max_lr in (None, schedule.max_lr) and min_lr in (None, schedule.min_lr)
        return schedule if is_same and schedule.init_lr <= schedule.max_lr else _with_rates(schedule, max_lr, min_lr)

    def _wd_schedule_of(self, group: dict[str, Any]) -> WdSchedule:
        schedule, start, end = self.wd_schedule, group.get("start_wd"), group.get("end_wd")
        is_same = start in (None, schedule.start_wd) and end in (None, schedule.end_wd)
        return schedule if is_same else _with_decays(schedule, start, end)


@lru_cache(maxsize=256)
def _with_rates(schedule: LrSchedule, max_lr: float | None, min_lr: float | None) -> LrSchedule:
    """`schedule` with a group's own rates; cached, since it is asked for at every step."""
    highest = schedule.max_lr if max_lr is None else max_lr
    return replace(
        schedule,
        init_lr=min(schedule.init_lr, highest),  # a group slower than the common start has nothing to warm up from
        max_lr=highest,
        min_lr=schedule.min_lr if min_lr is None else min_lr,
    )


@lru_cache(maxsize=256)
def _with_decays(schedule: WdSchedule, start_wd: float | None, end_wd: float | None) -> WdSchedule:
    """`schedule` with a group's own weight decays."""
    return replace(
        schedule,
        start_wd=schedule.start_wd if start_wd is None else start_wd,
        end_wd=schedule.end_wd if end_wd is None else end_wd,
    )
