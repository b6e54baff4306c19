"""`onstep control`: finds running jobs and steers them; `group` has the commands.

`target` resolves JOB and --remote, `outcome` prints the outcome of a command, and the other modules are the commands.
"""
