"""Reading logs: `training_log.TrainingLog`, `files` finds logs, `reading` reads damaged ones, `record_file` holds
records as columns, `run_status` says whether a run is alive, `decisions_log` and `samples_log` read what else a run
writes, `export_tables` writes CSV and Parquet.
"""
