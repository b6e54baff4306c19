"""The `onstep` command line; its commands train through `pretrain` and `finetune`."""
