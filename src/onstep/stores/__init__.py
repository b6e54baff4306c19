"""Object stores (S3, Google Cloud Storage, Azure, or a directory behind the same interface), through `obstore`.

`urls` reads their URLs and keeps credentials out of messages, `credentials` finds some, `bucket` performs the requests,
several at a time by `parallel`, `lease` lets one process at a time write a run.
"""
