"""Names of `transformers.trainer` with the classes of default callbacks; a script may set them."""

ADDED, PROGRESS, PRINTER = "DEFAULT_CALLBACKS", "DEFAULT_PROGRESS_CALLBACK", "PrinterCallback"
SETTABLE = (ADDED, PROGRESS, PRINTER)
