"""Reads data that is larger than the disk: in windows of records, which are tokenized and packed while a run trains.

A window is a part of a file that can be read without the others: it is found by its number (`line_file`,
`parquet_file`), its records become samples that are packed among themselves (`records`), in worker processes
(`record_stream`), and the samples of all windows in turn become the steps of a run (`stream_loader`).
"""
