"""From text to tokens on disk.

`text_files` and `documents` find the text, `hf_datasets` reads the `datasets` library, `tokenizers`,
`tokenizer_library`, `tokenizer_files` and `bpe` encode, `token_file` and `indexed_file` hold tokens, `build_cache`
builds each file once for all processes, `reading_bar` shows how much is read, `input_files` and `file_digests` find out
whether the files of a run have changed.
"""
