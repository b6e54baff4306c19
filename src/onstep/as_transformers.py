"""`import onstep.as_transformers`, at the top of a script, makes Trainer, TrainingArguments, callbacks and what belongs
to them Onstep's for the script and every library that it imports afterwards; `onstep.exchange.names` is the table.
"""

from onstep.exchange.install import install

install()
