"""The `onstep` command line; its commands train through `pretrain` and `finetune`.

`main.main` imports the module of the command on first use and turns errors into exit codes; `checkpoint/` and `logs/`
are groups of commands, `generation/` and `demo/` the rooms of commands with several parts.
"""
