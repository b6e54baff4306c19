"""Megatron Bridge's keys of the sections `dataset` and `tokenizer` that are not Onstep's, by what they are."""

from __future__ import annotations

from onstep.config.bridge.rules import Either, neutral, without_effect

DATASET = {
    **neutral(
        "data of its own for each split is not supported",
        "give dataset.paths and divide them by dataset.split",
        {"blend_per_split": None, "multiple_validation_sets": Either.of(None, False)},
    ),
    **neutral(
        "a loader of your own is passed to `train()`",
        "set dataset.kind, and leave it out",
        {"dataloader_type": Either.of(None, "single", "cyclic")},
    ),
    **neutral(
        "generated data is not supported",
        "leave dataset.paths empty, which trains on Python's own source",
        {"mock": False},
    ),
    **neutral(
        "an evaluation reads validation.eval_iters batches",
        "set validation.eval_iters=null, which reads the whole split",
        {"full_validation": Either.of(None, False)},
    ),
    **neutral("the tokenizer has a section of its own", "set tokenizer.tokenizer_type", {"tokenizer": None}),
    **neutral("labels are the tokens after the inputs", "leave it out", {"add_extra_token_to_sequence": True}),
    **neutral("code from the hub is never run", "leave it out", {"trust_remote_code": Either.of(None, False)}),
    **neutral(
        "a checkpoint has the position in the data in any case",
        "leave it out",
        {"dataloader_save": None, "dataloader_load": None},
    ),
    **neutral("an incomplete last batch is left out", "set train.drop_last", {"drop_last": True}),
    **neutral("files are local", "copy them first", {"object_storage_cache_path": None}),
    **without_effect(
        "how files are opened and indexed differs here",
        {
            "num_dataset_builder_threads": 1,
            "mmap_bin_files": True,
            "fast_cache_load": False,
            "defer_npy_index_mmap": False,
            "mid_level_dataset_surplus": 0.005,
            "sequences_per_dataset": None,
            "token_dtype_code": None,
            "split_matrix": None,
            "data_sharding": True,
        },
    ),
    **without_effect(
        "attention is causal, and dataset.reset_attention_mask limits it to documents",
        {"create_attention_mask": True, "skip_getting_attention_mask_from_dataset": True},
    ),
    **without_effect("an incomplete last sequence is not used", {"drop_last_partial_validation_sequence": True}),
    **without_effect("the loss is masked where labels are, not by token ids", {"allow_ambiguous_pad_tokens": False}),
    **without_effect(
        "it acts only with context parallelism",
        {
            "data_parallel_size": 1,
            "sequence_parallel_size": 0,
            "context_parallel_size": None,
            "hybrid_context_parallel": False,
        },
    ),
}

TOKENIZER = {
    **neutral(
        "tokenizers of Megatron's own files are not supported",
        "set tokenizer.tokenizer_type=tokenizers with a tokenizer.json, or huggingface with a directory",
        {
            "vocab_file": None,
            "merge_file": None,
            "metadata_path": None,
            "vocab_extra_ids": 0,
            "special_tokens": Either.of(None, []),
            "tiktoken_pattern": None,
            "tiktoken_special_tokens": Either.of(None, []),
            "tokenizer_prompt_format": None,
            "image_tag_type": None,
            "hf_tokenizer_kwargs": Either.of({}, None),
            "sp_tokenizer_kwargs": Either.of({}, None),
        },
    ),
    **neutral(
        "model.vocab_size is used where it is set",
        "set model.vocab_size=null, which uses the tokenizer's",
        {"use_tokenizer_vocab_size": False},
    ),
    **neutral(
        "the chat template is the tokenizer's",
        "write it to chat_template.jinja in the tokenizer's directory",
        {"chat_template": None},
    ),
    **without_effect(
        "it acts only with Megatron's tokenizers", {"legacy_tokenizer": False, "tiktoken_num_special_tokens": 1000}
    ),
}
