"""Provides the scheduler that writes learning rate and weight decay into an optimizer's groups."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from typing import Any

from torch import Tensor

from onstep.errors import ConfigError
from onstep.optim.protocol import HasParamGroups
from onstep.optim.schedules import LrSchedule, WdSchedule, learning_rate, weight_decay

_NOT_SET = (None, None)
_LR_STATE = ("max_lr", "lr_warmup_steps", "lr_decay_style", "lr_decay_steps", "min_lr", "init_lr")
"""Megatron-Core's keys and one additional, last key; older checkpoints have neither that one nor those of WSD."""
_WSD_STATE = ("wsd_decay_steps", "lr_wsd_decay_style")
_WD_STATE = ("start_wd", "end_wd", "wd_incr_style", "wd_incr_steps")


class OptimizerParamScheduler:
    """Learning rate and weight decay as a function of the samples trained on; the signature is Megatron-Core's.

    Constructing it writes the values at 0 samples. A parameter group may have its own `max_lr`, `min_lr`, `start_wd`
    and `end_wd` (None means the scheduler's), an `lr_mult` that multiplies its learning rate and a `wd_mult` that
    multiplies its weight decay. A group's learning rate that is a tensor (capturable optimizers) is written in place,
    so that captured graphs see it. A learning rate that something else writes into a group, such as a callback, lasts
    until the next `step`, a weight decay until that of the schedule changes; the state has both.

    Args:
        optimizer: the optimizer.
        init_lr: the learning rate at the start of the warm-up.
        max_lr: the peak learning rate.
        min_lr: the learning rate at the end of the decay.
        lr_warmup_steps: samples of the warm-up.
        lr_decay_steps: samples until the end of the decay.
        lr_decay_style: the shape of the decay: `constant`, `linear`, `cosine`, `inverse-square-root` or `WSD`.
        start_wd: the weight decay at the start.
        end_wd: the weight decay at the end.
        wd_incr_steps: samples in which the weight decay goes from one to the other.
        wd_incr_style: the shape of that: `constant`, `linear` or `cosine`.
        use_checkpoint_opt_param_scheduler: whether a loaded schedule replaces this one.
        override_opt_param_scheduler: whether this schedule replaces a loaded one.
        wsd_decay_steps: samples of the last phase of `WSD`, in which the rate decays.
        lr_wsd_decay_style: the shape of the last phase of `WSD`.

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
        """Number of samples trained on."""
        self._last_increment = 0
        self._decays: list[float | None] = []
        """The weight decays that were written last, by group."""
        self._set_elsewhere: list[list[float | None]] = []
        """The rates and weight decays of a loaded state that something else had set, by group, until the next step."""
        self._last_rates: list[Any] = []
        """What the groups had before the last `step`, which a callback may have set."""
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

    def step(self, increment: int | None = None) -> None:
        """Advance by `increment` samples and write the values for the next update.

        Raises:
            ConfigError: without an increment, as code for a torch scheduler calls it.
        """
        if increment is None:
            raise ConfigError(
                "scheduler.step() lacks its increment, a number of samples; the training loop steps the scheduler "
                "itself after each update: remove the call"
            )
        self._last_rates = list(map(itemgetter("lr"), self.optimizer.param_groups))
        self.num_steps += increment
        self._last_increment = increment
        if increment:
            self._set_elsewhere = []
        self._write()

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """The learning rate of `param_group` at the current count, including its `lr_mult` and `lr_factor`."""
        return self._rate(param_group, self.num_steps)

    def get_last_lr(self) -> list[float]:
        """The learning rates that were written last, by group, as of a torch scheduler."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def rates_before_last_step(self) -> list[float]:
        """The learning rates before the last `step`, by group: those of the last update."""
        before = self.num_steps - self._last_increment
        groups = zip(self.optimizer.param_groups, self._last_rates, strict=False)
        # a tensor has been overwritten in place
        return [self._rate(group, before) if isinstance(rate, Tensor) else float(rate) for group, rate in groups]

    def get_wd(self, param_group: dict[str, Any] | None = None) -> float:
        """The weight decay at the current count, with the group's `start_wd` and `end_wd` but before its `wd_mult`.

        Args:
            param_group: the parameter group: `params` and its settings.
        """
        return weight_decay(self.num_steps, self._wd_schedule_of(param_group or {}))

    def state_dict(self) -> dict[str, Any]:
        """The count and the shape of the schedules, as numbers and strings; the keys are Megatron-Core's and `init_lr`,
        and with WSD also `wsd_decay_steps` and `lr_wsd_decay_style`."""
        names = _LR_STATE + (_WSD_STATE if self.lr_schedule.lr_decay_style == "WSD" else ())
        shape = {name: getattr(self.lr_schedule, name) for name in names}
        shape |= {name: getattr(self.wd_schedule, name) for name in _WD_STATE}
        differing = self._differing()
        return {"num_steps": self.num_steps, **shape, **({"set_elsewhere": differing} if differing else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue a saved schedule: its `num_steps` is added to the current count, as in Megatron-Core.

        Values missing from the state, as in an older checkpoint, keep their current setting.

        To go back within a process, set `num_steps` to 0 first.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            ConfigError: if the saved shape differs and neither `override_opt_param_scheduler` (keep the current one)
                nor `use_checkpoint_opt_param_scheduler` (use the saved one) is set; nothing was changed.
        """
        if "num_steps" not in state_dict:
            raise ConfigError(f"a scheduler state must hold num_steps, got {', '.join(state_dict) or 'nothing'}")
        lr_schedule = replace(self.lr_schedule, **self._resolve(self.lr_schedule, _LR_STATE + _WSD_STATE, state_dict))
        wd_schedule = replace(self.wd_schedule, **self._resolve(self.wd_schedule, _WD_STATE, state_dict))
        self.lr_schedule, self.wd_schedule = lr_schedule, wd_schedule
        self._decays = []  # the optimizer may have loaded others
        self.step(state_dict["num_steps"])
        self._set_elsewhere = state_dict.get("set_elsewhere", [])
        self._write()

    def _resolve(self, own: LrSchedule | WdSchedule, names: tuple[str, ...], saved: dict[str, Any]) -> dict[str, Any]:
        """The saved values to apply to `own`."""
        if self.override_opt_param_scheduler:
            return {}
        values = {name: saved[name] for name in names if name in saved}
        if self.use_checkpoint_opt_param_scheduler:
            return values
        for name, value in values.items():
            if value != getattr(own, name):
                raise ConfigError(
                    f"{name} must be {value!r}, as in the checkpoint, got {getattr(own, name)!r}; set "
                    "scheduler.override_opt_param_scheduler=true to keep this, or "
                    "scheduler.use_checkpoint_opt_param_scheduler=true to use the saved"
                )
        return {}

    def _write(self) -> None:
        """Write the values at the current count. In the loop's hot path: the common values are computed once."""
        num_steps, lr_schedule, wd_schedule = self.num_steps, self.lr_schedule, self.wd_schedule
        common_lr, common_wd = learning_rate(num_steps, lr_schedule), weight_decay(num_steps, wd_schedule)
        groups, decays, elsewhere = self.optimizer.param_groups, self._decays, self._set_elsewhere
        decays += [None] * (len(groups) - len(decays))
        for index, group in enumerate(groups):
            set_lr, set_wd = elsewhere[index] if index < len(elsewhere) else _NOT_SET
            own_lr = self._lr_schedule_of(group)
            lr = (common_lr if own_lr is lr_schedule else learning_rate(num_steps, own_lr)) * self._lr_factor
            lr *= float(group.get("lr_mult", 1.0))
            lr = lr if set_lr is None else set_lr
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            if "weight_decay" in group:
                own_wd = self._wd_schedule_of(group)
                wd = common_wd if own_wd is wd_schedule else weight_decay(num_steps, own_wd)
                wd *= group.get("wd_mult", 1.0)
                if wd != decays[index]:  # else it stays as a callback may have set it
                    group["weight_decay"] = decays[index] = wd
                if set_wd is not None:
                    group["weight_decay"] = set_wd

    def _differing(self) -> list[list[float | None]]:
        """The rate and weight decay of each group where they are not those of the schedule; empty if all are."""
        found: list[list[float | None]] = []
        for group, written in zip(self.optimizer.param_groups, self._decays, strict=False):
            lr, decay, rate = group["lr"], group.get("weight_decay"), self.get_lr(group)
            rate = float(lr.new_tensor(rate)) if isinstance(lr, Tensor) else rate
            found.append([float(lr) if float(lr) != rate else None, decay if decay != written else None])
        return found if any(value is not None for values in found for value in values) else []

    def _rate(self, group: dict[str, Any], num_steps: int) -> float:
        rate = learning_rate(num_steps, self._lr_schedule_of(group)) * self._lr_factor
        return rate * float(group.get("lr_mult", 1.0))

    def _lr_schedule_of(self, group: dict[str, Any]) -> LrSchedule:
        schedule, max_lr, min_lr = self.lr_schedule, group.get("max_lr"), group.get("min_lr")
        is_same = max_lr in (None, schedule.max_lr) and min_lr in (None, schedule.min_lr)
        return schedule if is_same else _with_rates(schedule, max_lr, min_lr)

    def _wd_schedule_of(self, group: dict[str, Any]) -> WdSchedule:
        schedule, start, end = self.wd_schedule, group.get("start_wd"), group.get("end_wd")
        is_same = start in (None, schedule.start_wd) and end in (None, schedule.end_wd)
        return schedule if is_same else _with_decays(schedule, start, end)


@lru_cache(maxsize=256)
def _with_rates(schedule: LrSchedule, max_lr: float | None, min_lr: float | None) -> LrSchedule:
    """`schedule` with a group's own rates; cached, since it is called at every step."""
    highest = schedule.max_lr if max_lr is None else max_lr
    return replace(
        schedule,
        init_lr=min(schedule.init_lr, highest),  # a group slower than the common start has no warm-up
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
