"""DataLoaders in torch's form: those that a user's methods create, and those that the Trainer's methods return.

`users_data` reads the former; `torch_loaders` creates the latter, with the samplers of `samplers`.
"""
