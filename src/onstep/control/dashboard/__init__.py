"""Many runs on one page: `dashboard` finds them, and serves them as a job serves itself.

`run_files` reads the directory of a run, `file_job` shows it, `remote_job` shows a job that answers commands and
forwards them, `found_runs` tells which directories are runs, `server` serves all of them.
"""
