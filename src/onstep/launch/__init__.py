"""Starts the ranks of a run: on this machine by torchelastic's agent, on a cluster by SLURM, Kubernetes or Ray.

`plan` says what is started, `agent` starts and watches ranks, `outputs` shows what they print, `failures` says which
failed first, `slurm` and `kubernetes` write what these run, `ray` runs it by Ray Train.
"""
