"""Hugging Face's `set_*` methods of `TrainingArguments`, which set the arguments of one theme and can be chained."""

from __future__ import annotations

from typing import Any, Self


class SettingMethods:
    """Each sets several arguments, those that are not passed to the defaults of the method, and checks all."""

    def _set(self, **values: Any) -> Self:
        for name, value in values.items():
            setattr(self, name, value)
        self._settle()  # type: ignore[attr-defined]
        self.check()  # type: ignore[attr-defined]
        return self

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        activation_checkpointing: bool = False,
        gradient_checkpointing: bool | None = None,
    ) -> Self:
        """Set the basics of a training, and `do_train`.

        Args:
            learning_rate: the peak learning rate.
            batch_size: samples of one forward pass on one rank.
            weight_decay: the decoupled weight decay.
            num_epochs: epochs of the training; 2.5 ends in the middle of the third.
            max_steps: steps of the training, which replace the epochs; -1 for none.
            gradient_accumulation_steps: micro-batches of a step on each rank.
            seed: seed of weights and data.
            activation_checkpointing: another name of `gradient_checkpointing`, which is preferred if both are given.
            gradient_checkpointing: whether activations are computed again in the backward pass; None is
                `activation_checkpointing`.
        """
        is_given = gradient_checkpointing is not None
        saves_memory = gradient_checkpointing if is_given else activation_checkpointing
        return self._set(
            do_train=True,
            learning_rate=learning_rate,
            per_device_train_batch_size=batch_size,
            weight_decay=weight_decay,
            num_train_epochs=num_epochs,
            max_steps=max_steps,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            activation_checkpointing=saves_memory,
            gradient_checkpointing=saves_memory,
        )

    def set_evaluate(
        self,
        strategy: str = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
    ) -> Self:
        """Set when and how to evaluate; any `strategy` but 'no' sets `do_eval`.

        Args:
            steps: steps between two of them.
            batch_size: samples of one forward pass of an evaluation on one rank.
            accumulation_steps: batches after which predictions are moved to the CPU; None at the end.
            delay: steps or epochs before the first evaluation.
            loss_only: whether only the loss is computed.
        """
        return self._set(
            eval_strategy=strategy,
            do_eval=getattr(strategy, "value", strategy) != "no",
            eval_steps=steps,
            per_device_eval_batch_size=batch_size,
            eval_accumulation_steps=accumulation_steps,
            eval_delay=delay or 0,
            prediction_loss_only=loss_only,
        )

    def set_testing(self, batch_size: int = 8, loss_only: bool = False) -> Self:
        """Set how to predict, and `do_predict`.

        Args:
            batch_size: samples of one forward pass of a prediction on one rank.
            loss_only: whether only the loss is computed.
        """
        return self._set(do_predict=True, per_device_eval_batch_size=batch_size, prediction_loss_only=loss_only)

    def set_save(
        self, strategy: str = "steps", steps: int = 500, total_limit: int | None = None, on_each_node: bool = False
    ) -> Self:
        """Set when to save, and how many checkpoints to keep.

        Args:
            strategy: when: `no`, `steps` or `epoch`.
            steps: steps between two of them.
            total_limit: the number of checkpoints to keep; None for all.
            on_each_node: whether each machine does so, not only the first.
        """
        return self._set(
            save_strategy=strategy, save_steps=steps, save_total_limit=total_limit, save_on_each_node=on_each_node
        )

    def set_logging(
        self,
        strategy: str = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Self:
        """Set when to log, and to which trackers.

        Args:
            strategy: when: `no`, `steps` or `epoch`.
            steps: steps between two of them.
            report_to: the trackers.
            level: the level of messages on the first process of a machine.
            first_step: whether the first step is logged too.
            nan_inf_filter: whether losses that are NaN or infinite are left out of means.
            on_each_node: whether each machine does so, not only the first.
            replica_level: the level of messages on the other processes.
        """
        return self._set(
            logging_strategy=strategy,
            logging_steps=steps,
            report_to=report_to,
            log_level=level,
            logging_first_step=first_step,
            logging_nan_inf_filter=nan_inf_filter,
            log_on_each_node=on_each_node,
            log_level_replica=replica_level,
        )

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Set `push_to_hub` and what belongs to it.

        Args:
            model_id: the name of the repository.
            strategy: what is uploaded: `end`, `every_save`, `checkpoint` or `all_checkpoints`.
            token: a token that may write there; None for `huggingface_hub`'s own ways.
            private_repo: whether a new repository is private.
            always_push: whether a save is queued for upload while the one before is unfinished.
            revision: the branch.
        """
        return self._set(
            push_to_hub=True,
            hub_model_id=model_id,
            hub_strategy=strategy,
            hub_token=token,
            hub_private_repo=private_repo,
            hub_always_push=always_push,
            hub_revision=revision,
        )

    def set_optimizer(
        self,
        name: str = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:
        """Set the optimizer and its options.

        Args:
            name: the optimizer, as `optim` has it.
            learning_rate: the peak learning rate.
            weight_decay: the decoupled weight decay.
            beta1: the decay of Adam's first moment.
            beta2: the decay of Adam's second moment.
            epsilon: Adam's term against division by zero.
            args: further arguments of the optimizer, as text.
        """
        return self._set(
            optim=name,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            adam_beta1=beta1,
            adam_beta2=beta2,
            adam_epsilon=epsilon,
            optim_args=args,
        )

    def set_lr_scheduler(
        self, name: str = "linear", num_epochs: float = 3.0, max_steps: int = -1, warmup_steps: float = 0
    ) -> Self:
        """Set the learning-rate schedule and the length of the training.

        Args:
            name: the shape, as in `lr_scheduler_type`: `linear`, `cosine`, `constant`, ...
            num_epochs: epochs of the training; 2.5 ends in the middle of the third.
            max_steps: steps of the training, which replace the epochs; -1 for none.
            warmup_steps: steps of the warm-up, or its share of all steps if below 1.
        """
        return self._set(
            lr_scheduler_type=name, num_train_epochs=num_epochs, max_steps=max_steps, warmup_steps=warmup_steps
        )

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        auto_find_batch_size: bool = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Self:
        """Set how data is loaded.

        Args:
            train_batch_size: samples of one forward pass of the training on one rank.
            eval_batch_size: samples of one forward pass of an evaluation on one rank.
            drop_last: whether an incomplete last batch is dropped.
            num_workers: worker processes of a loader; 0 reads in this one.
            pin_memory: whether batches are copied to page-locked memory.
            persistent_workers: whether worker processes outlive an epoch.
            prefetch_factor: batches that each worker reads ahead.
            auto_find_batch_size: whether the batch is halved when it does not fit the memory.
            ignore_data_skip: whether a resumed run reads its data from the beginning.
            sampler_seed: seed of the order of the samples; None for `seed`.
            multiprocessing_context: how worker processes start: `fork`, `spawn` or `forkserver`.
            in_order: whether batches keep their order; must be True.
        """
        return self._set(
            per_device_train_batch_size=train_batch_size,
            per_device_eval_batch_size=eval_batch_size,
            dataloader_drop_last=drop_last,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=pin_memory,
            dataloader_persistent_workers=persistent_workers,
            dataloader_prefetch_factor=prefetch_factor,
            dataloader_multiprocessing_context=multiprocessing_context,
            dataloader_in_order=in_order,
            auto_find_batch_size=auto_find_batch_size,
            ignore_data_skip=ignore_data_skip,
            data_seed=sampler_seed,
        )
