"""The commands of `onstep diloco`: `server` starts one, `worker` a training job that joins it, `status` and `control`
ask and change a running one, `simulate` predicts a run from a scenario; `group` joins them.
"""
