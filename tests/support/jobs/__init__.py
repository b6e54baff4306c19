"""What the processes of tests run: modules with functions `job_*(settings)`, started by `forked_processes`."""
