"""Every configuration that cannot run is refused with value, rule and remedy before anything is built."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from onstep import finetune, pretrain
from onstep.config import ConfigContainer, TrainingArguments, apply_overrides, from_dict, validate
from onstep.errors import ConfigError

MOE = "model.num_moe_experts=4 & "
BEST = "checkpoint.load_best_model_at_end=true & "
SAMPLES = "train.train_iters=null & train.train_samples="
ROLLBACK = "train.on_nonfinite=rollback & checkpoint.save_interval=5 & "
BIASED = MOE + "model.moe_router_enable_expert_bias=true & model.moe_router_score_function=sigmoid & "
BALANCED = MOE + "model.moe_router_load_balancing_type="
LINEAR = "model.rope_scaling={rope_type: linear, factor: 2.0} & "
LORA = "peft.peft_scheme=lora"
MEGATRON = "dataset.kind=megatron & dataset.paths=[a,b]"
STREAM = "dataset.kind=stream & dataset.paths=[s.jsonl]"
CHAT = "dataset.kind=chat & dataset.paths=[c.jsonl]"
WSD = "scheduler.lr_decay_style=WSD & "
YARN = "model.rope_scaling={rope_type: yarn, factor: 4.0, original_max_position_embeddings: 64"
LLAMA3 = "model.rope_scaling={rope_type: llama3, factor: 8.0, original_max_position_embeddings: 64"

BATCHES_AND_LENGTHS = [
    ("train.data_timeout=1e18", "train.data_timeout=1e+18 … at most 31,536,000, a year"),
    ("train.empty_unused_memory_level=3", "empty_unused_memory_level=3 must be 0 (never), 1 … or 2"),
    ("train.exit_duration_in_mins=1e18", "train.exit_duration_in_mins=1e+18 … at most 525,600, a year"),
    ("train.global_batch_size=32 & train.rampup_batch_size=[8, 5, 100]", "rampup_batch_size=[8, 5, 100] … 28 or 33"),
    ("train.global_batch_size=32 & train.rampup_batch_size=[8, 4]", "[start, increment, samples]"),
    ("train.global_batch_size=32 & train.rampup_batch_size=[0, 4, 100]", "start must be > 0, got 0"),
    ("train.global_batch_size=8 & train.rampup_batch_size=[16, 4, 100]", "global_batch_size=8 … got 16"),
    ("train.global_batch_size=32 & train.rampup_batch_size=[2, 2, 5]", "15 increments within 5 samples"),
    (
        "train.global_batch_size=32 & train.rampup_batch_size=[3, 29, 100]",
        "has steps of 3 samples; 3 must be a multiple of",
    ),
    (
        "train.global_batch_size=8 & train.rampup_batch_size=[4, 4, 9] & train.step_batch_size_schedule='0:4 9:8'",
        "and train.step_batch_size_schedule both ramp … keep one",
    ),
    ("train.global_batch_size=8 & train.rampup_batch_size=[8, 4, 100]", "global_batch_size=8 and ramps nothing up"),
    (
        SAMPLES + "1 & train.global_batch_size=16 & train.rampup_batch_size=[4,4,60]",
        "train_samples=1 is less than the first step of 4 samples",
    ),
    ("train.global_batch_size=1 & train.decrease_batch_size_if_needed=true", "would leave nothing"),
    ("train.global_batch_size=6", "=6 must be a multiple of micro_batch_size * ranks = 4 * 1 = 4; choose 4 or 8"),
    ("train.global_batch_size=2", "choose 4."),
    ("train.iterations_to_skip=[0]", "iterations_to_skip holds 0 … counted from 1 … give 1 or more"),
    ("train.loss_weighting=token", "must be auto | tokens | samples | microbatches. Did you mean 'tokens'"),
    ("train.micro_batch_size=null", "the batch has no size"),
    ("train.micro_batch_size=0", "train.micro_batch_size=0 must be > 0"),
    ("train.num_epochs=1e308 & train.train_iters=null", "num_epochs=1e+308 … at most 1,000,000,000"),
    ("train.num_epochs=1", "train.train_iters=100 and train.num_epochs=1.0 are both lengths … keep one"),
    ("train.rampup_batch_size=[8, 4, 100]", "requires train.global_batch_size"),
    ("train.step_batch_size_schedule='0:4 5:8 5:16'", "increasing thresholds, got 0, 5, 5"),
    ("train.step_batch_size_schedule='0:4 5:8 3:16'", "increasing thresholds"),
    ("train.step_batch_size_schedule='10:4'", "begin with the threshold 0, got 10"),
    ("train.step_batch_size_schedule='0:8 10:4'", "never shrink, got 8, 4"),
    ("train.step_batch_size_schedule='0:2 1.5:8'", "threshold 1.5 … integer number of samples … 1 or 2"),
    ("train.step_batch_size_schedule='0:2 0.0015Ktok:8'", "0.0015Ktok … integer number of tokens"),
    ("train.step_batch_size_schedule='0:8 ten:16'", "'0:8 ten:16' … '0:32 100K:64 1M:128'"),
    ("train.step_batch_size_schedule=''", "thresholds and sizes"),
    ("train.step_batch_size_schedule='0:4 9:8' & train.global_batch_size=16", "ends at 8 … must end at … =16 … same"),
    ("train.step_batch_size_schedule='0:4 9:8' & train.micro_batch_size=null", "requires train.micro_batch_size"),
    ("train.step_batch_size_schedule='0:3 9:8'", "3 must be a multiple"),
    ("train.train_iters=null", "the run has no length"),
    (SAMPLES + "3", "less than one step"),
    ("train.train_iters=0", "train.train_iters=0 … must be > 0"),
    ("train.train_samples=1000", "train.train_iters=100 and train.train_samples=1000 are both lengths … keep one"),
]
"""Words that change a run that works, joined by ` & `, and what the refusal says, parts joined by ` … `."""

RATES = [
    ("mixed_precision=fp16", "Did you mean 'fp16"),
    ("mixed_precision=bf16", "Did you mean 'bf16"),
    ("optimizer.adam_beta2=1.0", "optimizer.adam_beta2=1.0 must be at least 0 and below 1"),
    ("optimizer.clip_grad=-1.0", "optimizer.clip_grad=-1.0 must be >= 0"),
    (
        "optimizer.decoupled_lr=1.0 & optimizer.decoupled_min_lr=0.75 & optimizer.param_groups="
        "[{match: 'layers.*', lr_mult: 2}, {match: 'output.*', min_lr: 2, max_lr: 3}, {match: '*embed*', max_lr: 0.5}]",
        "param_groups[2] (match='*embed*') … [2].max_lr=0.5 and optimizer.decoupled_min_lr=0.75 … set max_lr and",
    ),
    (
        "optimizer.decoupled_min_lr=0.2",
        "at most 0.001 … must not end above that, got 0.2 … ; set optimizer.decoupled_min_lr",
    ),
    ("optimizer.grad_norm_skip_threshold=0.0", "grad_norm_skip_threshold=0.0 must be > 0"),
    ("optimizer.initial_loss_scale=2 & optimizer.min_loss_scale=4", "min_loss_scale=4.0 must be at most … =2.0"),
    ("optimizer.lr=null", "optimizer.lr is not set"),
    ("optimizer.lr=-1e-3", "optimizer.lr=-0.001 must be >= 0"),
    ("optimizer.lr=.nan", "optimizer.lr=nan must be a finite number"),
    ("optimizer.min_lr=1.0", "optimizer.min_lr=1.0 must be at most optimizer.lr=0.001"),
    (
        "optimizer.min_lr=5e-4 & optimizer.param_groups=[{match: '*', max_lr: 1e-4}]",
        "max_lr=0.0001 must be at least min_lr=0.0005",
    ),
    ("optimizer.min_lr=1e-4 & optimizer.decoupled_lr=1e-5", "at most 1e-05 … must not end above that, got 0.0001"),
    ("optimizer.muon_momentum=0.9", "muon_momentum=0.9 … has no effect with optimizer.optimizer=adam … to muon"),
    ("optimizer.muon_num_ns_steps=100", "muon_num_ns_steps=100 must be from 1 to 99 … 5 is usual"),
    ("optimizer.optimizer=muonn", "'muonn' … adam | sgd | muon … Did you mean 'muon'"),
    ("optimizer.param_groups=[{lr_mult: 0.1}]", "param_groups[0].match=None must be a pattern"),
    ("optimizer.param_groups=[{match: '', lr_mult: 0.1}]", "match='' must be a pattern"),
    ("optimizer.param_groups=[{match: '*'}]", "(match='*') sets nothing; give it one of lr_mult"),
    ("optimizer.param_groups=[{match: '*', lr_mul: 0.1}]", "no key 'lr_mul'. Did you mean 'lr_mult'"),
    ("optimizer.param_groups=[{match: '*', lr_mult: -1}]", "param_groups[0].lr_mult=-1 must be a finite number >= 0"),
    ("optimizer.param_groups=[{match: '*', wd_mult: 'no'}]", "wd_mult='no' must be a finite number"),
    ("optimizer.param_groups=[{match: '*', lr_mult: .inf}]", "lr_mult=inf must be a finite number"),
    ("optimizer.param_groups=[{match: '*', wd_mult: true}]", "wd_mult=True must be a finite number"),
    ("optimizer.param_groups=[{match: '*', min_lr: 0.3}]", "max_lr=0.001 must be at least min_lr=0.3"),
    ("optimizer.param_groups=[{match: '*', start_wd: 0.3}]", "must not shrink, got start_wd=0.3 and end_wd=0.01"),
    ("optimizer.param_groups=[{match: '*', end_wd: 0.3}]", "must stay, … =constant, got start_wd=0.01 and end_wd=0.3"),
    ("scheduler.lr_decay_samples=80", "lr_decay_samples=80 … does not fit a run … lr_decay_iters"),
    ("scheduler.lr_decay_style=cosin", "scheduler.lr_decay_style='cosin' … Did you mean 'cosine'"),
    ("scheduler.lr_decay_style=WSD", "set scheduler.lr_wsd_decay_iters"),
    (WSD + "scheduler.lr_wsd_decay_iters=200", "WSD decay … is longer"),
    (
        WSD + "scheduler.lr_wsd_decay_iters=97 & scheduler.lr_warmup_iters=5",
        "scheduler.lr_wsd_decay_iters=97 … (100 iterations) has after the warm-up (5 iterations) … at most 95",
    ),
    ("scheduler.lr_warmup_fraction=0.1 & scheduler.lr_warmup_iters=3", "the warm-up is given twice: keep … not both"),
    ("scheduler.lr_warmup_fraction=1.5", "must be between 0 and 1"),
    ("scheduler.lr_warmup_init=1.0", "scheduler.lr_warmup_init=1.0 … at most optimizer.lr … lower it"),
    ("scheduler.lr_warmup_samples=8", "lr_warmup_samples=8 does not fit a run whose length is train.train_iters"),
    ("scheduler.max_steps=50", "scheduler.max_steps=50 must be at least the run's 100 steps"),
    (
        "scheduler.override_opt_param_scheduler=true & scheduler.use_checkpoint_opt_param_scheduler=true",
        "are both true, but a checkpoint's schedule can only be kept or replaced … set one of them to false",
    ),
    ("scheduler.start_weight_decay=0.1", "constant requires start_weight_decay == end_weight_decay"),
    ("scheduler.weight_decay_incr_style=linear", "requires scheduler.start_weight_decay <= end_weight_decay"),
    (SAMPLES + "800 & scheduler.lr_decay_iters=8", "set scheduler.lr_decay_samples"),
    (
        SAMPLES + "80 & scheduler.lr_warmup_samples=20 & " + WSD + "scheduler.lr_wsd_decay_samples=61",
        "scheduler.lr_wsd_decay_samples=61 … (80 samples) has after the warm-up (20 samples) … at most 60",
    ),
]

MODEL = [
    ("model.activation_func=swiglu", "model.activation_func='swiglu' must be silu | gelu | gelu_tanh | relu"),
    ("model.hidden_size=130", "model.hidden_size=130 must be a multiple of num_attention_heads=4 … kv_channels"),
    ("model.hidden_size=1000000000000", "model.hidden_size=1000000000000 … GiB of memory … Lower"),
    ("model.hidden_size=132", "a head is 33 … even width … hidden_size=132 … change the number of heads"),
    ("model.kv_channels=7", "a head is 7, and rotary embeddings require an even width … even model.kv_channels"),
    ("model.kv_channels=2 & model.rope_scaling={rope_type: dynamic, factor: 2.0}", "width 4 or more, got 2"),
    ("model.mtp_loss_scaling_factor=0.2", "model.mtp_loss_scaling_factor=0.2 weights the loss of"),
    ("model.mtp_num_layers=256", "model.mtp_num_layers=256 must be below model.seq_length=256 … shorter sequence"),
    ("model.normalization=layernorm", "'layernorm' must be RMSNorm | LayerNorm. Did you mean 'LayerNorm'?"),
    ("model.num_layers=0", "model.num_layers=0 … must be > 0"),
    ("model.num_layers=1000000000", "model.num_layers=1000000000 … at most 10,000"),
    ("model.num_query_groups=3", "model.num_attention_heads=4 must be a multiple of num_query_groups=3 … same number"),
    ("model.position_embedding_type=learned", "Did you mean 'learned_absolute'?"),
    (LINEAR + "model.position_embedding_type=none", "type=none has none; set rope_scaling to null"),
    (LINEAR + "model.position_embedding_type=learned_absolute", "learned_absolute has none; set rope_scaling to null"),
    ("model.recompute_granularity=some", "must be full | selective"),
    (
        "model.rope_scaling={rope_type: liner, factor: 2.0}",
        "rope_type 'liner', which must be default | linear … Did you mean 'linear'",
    ),
    ("model.rope_scaling={factor: 2.0}", "rope_type None, which must be"),
    ("model.rope_scaling={rope_type: linear}", "lacks factor; rope_type linear requires factor"),
    ("model.rope_scaling={rope_type: yarn, factor: 2.0}", "lacks original_max_position_embeddings"),
    ("model.rope_scaling={rope_type: linear, factor: 0.5}", "rope_scaling.factor must be a number >= 1"),
    ("model.rope_scaling={rope_type: linear, factor: '2'}", "rope_scaling.factor must be a number >= 1"),
    ("model.rope_scaling={rope_type: linear, factor: .nan}", "rope_scaling.factor must be a number >= 1"),
    (
        "model.rope_scaling={rope_type: linear, faktor: 2.0}",
        "'faktor', but rope_type linear accepts factor. Did you mean",
    ),
    ("model.rope_scaling={rope_type: dynamic, factor: 2.0, rope_theta: 1.0}", "rope_theta=1.0; set model.rotary_base"),
    (LLAMA3 + ", low_freq_factor: 1.0, high_freq_factor: 1.0}", "low_freq_factor=1.0 must be below high_freq_factor=1"),
    (LLAMA3 + ", low_freq_factor: -1.0, high_freq_factor: 4.0}", "low_freq_factor must be a finite number > 0, got -1"),
    (YARN + ", beta_slow: 40}", "beta_slow=40 must be below beta_fast=32.0"),
    (YARN + ", beta_fast: true}", "beta_fast must be a finite number > 0, got True"),
    (
        "model.seq_length=64 & dataset.seq_length=32",
        "dataset.seq_length=32 and model.seq_length=64 must be the same; set both",
    ),
    ("model.seq_length=10000000000 & dataset.seq_length=10000000000", "seq_length=10000 … GiB … makes it fit"),
    ("model.vocab_size=9e18", "model.vocab_size=9000000000000000000 … GiB of memory … Lower"),
]

EXPERTS = [
    (MOE + "model.moe_aux_loss_coeff=-0.1", "model.moe_aux_loss_coeff=-0.1 must be >= 0"),
    ("model.moe_aux_loss_coeff=0.1", "=0.1 is an option of experts, but model.num_moe_experts is null … set it"),
    (MOE + "model.moe_layer_freq=[1, 0]", "=[1, 0] must have a 0 or 1 for each of the 4 layers … be an integer"),
    (MOE + "model.moe_layer_freq=[1, 0, 2, 0]", "a 0 or 1 for each of the 4 layers"),
    (MOE + "model.moe_layer_freq=[0, 0, 0, 0]", "leaves no layer with experts … set a layer to 1"),
    (MOE + "model.moe_layer_freq=0", "model.moe_layer_freq=0 must be >= 1"),
    (MOE + "model.moe_router_bias_update_rate=0.1", "=0.1 does nothing without moe_router_enable_expert_bias=true"),
    (BIASED + "model.moe_router_bias_update_rate=1e308", "bias_update_rate=1e+308 … from 0 to 1"),
    (BALANCED + "seq_aux_los", "aux_loss | seq_aux_loss | global_aux_loss | none. Did you mean 'seq_aux_loss'?"),
    (BALANCED + "[aux_loss, seq_aux_loss] & model.moe_aux_loss_coeff=[0.1]", "=[0.1] has 1 entries and"),
    (BALANCED + "[none, aux_loss]", "'none' alone"),
    (BALANCED + "[aux_loss, aux_loss]", "name each type once"),
    (BALANCED + "none & model.moe_aux_loss_coeff=0.1", "=0.1 does nothing without a moe_router_load_balancing_type;"),
    (
        MOE + "model.moe_router_pre_softmax=true & model.moe_router_score_function=sigmoid",
        "model.moe_router_pre_softmax=True does nothing without moe_router_score_function=softmax",
    ),
    (MOE + "model.moe_router_topk=5", "moe_router_topk=5 must be at most model.num_moe_experts=4 … lower it"),
    (MOE + "model.moe_router_topk=1", "moe_router_topk=1 needs model.moe_router_pre_softmax=true"),
    (
        "model.moe_router_topk=4 & model.moe_z_loss_coeff=0.1",
        "are options of experts, but model.num_moe_experts is null",
    ),
    (MOE + "model.moe_router_topk_scaling_factor=0.0", "moe_router_topk_scaling_factor=0.0 must be > 0"),
    (
        MOE + "model.moe_shared_expert_gate=true",
        "there is none … set model.moe_shared_expert_intermediate_size to its width",
    ),
    (MOE + "model.moe_token_drop_policy=position", "=position does nothing without a moe_expert_capacity_factor"),
    ("model.num_moe_experts=0", "model.num_moe_experts=0 must be > 0"),
    ("model.num_moe_experts=2 & model.moe_expert_capacity_factor=0.0", "moe_expert_capacity_factor=0.0 must be > 0"),
    ("model.num_moe_experts=2 & model.moe_token_drop_policy=prob", "Did you mean 'probs'?"),
]

DATA = [
    ("dataset.hf_subset=en", "hf_subset='en' has no effect … huggingface or chat"),
    (MEGATRON + " & dataset.weights=[1]", "weights=[1.0] must have one number for each of the 2"),
    (MEGATRON + " & dataset.weights=[1,0]", "weights=[1.0, 0.0] must be numbers > 0"),
    (MEGATRON + " & dataset.weights=[1,.nan]", "must be numbers > 0"),
    (MEGATRON + " & dataset.text_key=body", "text_key='body' has no effect with dataset.kind=megatron"),
    (
        STREAM + " & train.train_iters=null & train.num_epochs=2",
        "num_epochs=2.0 cannot be the length of a run on a stream … set train.train_iters … stream_epoch_tokens",
    ),
    (
        STREAM + " & dataset.messages_key=m",
        "messages_key='m' is of streams of chat … drop it, or set dataset.stream_of",
    ),
    (STREAM + " & dataset.stream_of=chat & dataset.text_key=t", "text_key='t' is of streams of text"),
    (STREAM + " & tokenizer.tokenizer_type=bpe", "tokenizer_type=bpe is learned from all of a corpus … set tokenizer"),
    ("dataset.stream_window_bytes=9", "stream_window_bytes=9 has no effect with dataset.kind=text"),
    (CHAT + " & dataset.eod_mask_loss=true", "eod_mask_loss=True has no effect with dataset.kind=chat"),
    (CHAT + " & dataset.reset_attention_mask=true", "reset_attention_mask=True has no effect with dataset.kind=chat"),
    (CHAT + " & dataset.hf_subset=en", "hf_subset='en' is a configuration … are files; drop it"),
    (
        "dataset.kind=huggingface & dataset.paths=[a.parquet] & dataset.hf_subset=en",
        "hf_subset='en' is a configuration",
    ),
    ("dataset.kind=chat", "paths=[] is empty; dataset.kind=chat requires JSONL files"),
    ("dataset.kind=megatron", "requires the prefixes of .bin and .idx files"),
    ("dataset.kind=chats", "Did you mean 'chat'"),
    (MEGATRON + " & tokenizer.tokenizer_type=bpe", "learned from text, and dataset.kind=megatron has token ids"),
    ("dataset.messages_key=turns", "messages_key='turns' has no effect"),
    ("dataset.num_workers=100000", "dataset.num_workers=100000 … at most 1,024"),
    ("dataset.packing=false", "packing=False has no effect with dataset.kind=text; set dataset.kind to chat"),
    ("dataset.paths=[a.txt,b.md] & dataset.text_key=body", "text_key='body' is a key of JSONL … files of plain text"),
    ("dataset.prefetch_factor=1000000000000000000", "dataset.prefetch_factor=1000 … at most 10,000"),
    ("dataset.split=90,5,5,1", "dataset.split='90,5,5,1' must be the shares"),
    ("dataset.split=0,50,50", "leaves nothing to train on"),
    ("dataset.text_key=body", "text_key='body' is a key of JSONL records, and Python's own sources are not"),
    ("dataset.weights=[1.0]", "weights=[1.0] has no effect with dataset.kind=text … set dataset.kind … megatron"),
    ("tokenizer.tokenizer_model=x", "tokenizer_model='x' has no effect with tokenizer_type=bytes"),
    ("tokenizer.tokenizer_type=huggingface", "=huggingface requires tokenizer.tokenizer_model, the path of"),
    ("tokenizer.tokenizer_type=bpe & tokenizer.tokenizer_model=x", "tokenizer_model='x' has no effect … =bpe"),
    ("tokenizer.tokenizer_type=tokenizers", "requires tokenizer.tokenizer_model, the path"),
    ("tokenizer.tokenizer_type=bpe & tokenizer.vocab_size=256", "must be >= 257"),
    ("tokenizer.vocab_size=300", "=300 is what tokenizer_type=bpe learns, and tokenizer_type is bytes … leave it"),
]

CHECKPOINTS = [
    ("anomaly.on_spike=stop & anomaly.spike_metrics=[los]", "spike_metrics has 'los', … Did you mean 'loss'"),
    ("anomaly.on_spike=stop & anomaly.spike_metrics=[]", "spike_metrics= … selects nothing"),
    ("anomaly.on_spike=explode", "must be ignore | raise | stop | skip | rollback"),
    ("anomaly.on_spike=rollback", "anomaly.on_spike=rollback rolls back to a checkpoint, but none is saved"),
    ("anomaly.on_spike=rollback & run.name=null", "on_spike=rollback requires a checkpoint directory"),
    ("anomaly.spike_window=0", "anomaly.spike_window=0 must be > 0"),
    ("checkpoint.certify=true & checkpoint.components=[model]", "certify keeps its chain with the component trainer"),
    ("checkpoint.ckpt_step=5 & run.name=null", "checkpoint.ckpt_step=5 requires a checkpoint directory"),
    ("checkpoint.components=[model,optimiser]", "has 'optimiser', which is not known; … Did you mean 'optimizer'"),
    ("checkpoint.components=[]", "checkpoint.components=[] selects nothing; … null is all"),
    (
        "checkpoint.finetune=true & checkpoint.load=b & checkpoint.pretrained_checkpoint=a",
        "=a and checkpoint.load=b … both name … keep one",
    ),
    ("checkpoint.finetune=true", "checkpoint.finetune=True … requires weights … set checkpoint.pretrained"),
    ("checkpoint.keep_best_n=-1", "checkpoint.keep_best_n=-1 must be >= 0"),
    ("checkpoint.keep_every_n=0", "checkpoint.keep_every_n=0 must be > 0"),
    ("checkpoint.load_best_model_at_end=true", "requires checkpoints of evaluated steps"),
    ("checkpoint.most_recent_k=0", "most_recent_k=0 must be -1 for all, or at least 1: the newest one"),
    ("checkpoint.most_recent_k=-2", "most_recent_k=-2 must be -1 for all"),
    ("checkpoint.on_config_change=ask", "must be error | keep | apply"),
    ("checkpoint.on_save_error=go_on", "must be stop | continue"),
    ("checkpoint.save_interval=0", "checkpoint.save_interval=0 must be > 0"),
    (BEST + "checkpoint.save_interval=10 & validation.eval_interval=20", "make the first a multiple of the second"),
    (BEST + "checkpoint.save_interval=9 & validation.eval_each_epoch=true", "evaluated steps"),
    (
        BEST + "checkpoint.save_interval=10 & validation.eval_interval=5 & checkpoint.components=[optimizer]",
        "requires the weights; add model to checkpoint.components",
    ),
    ("run.name=a/b", "run.name='a/b' must be the name of a directory"),
    (BEST + "run.name=null", "requires a checkpoint directory, but this run has none"),
    ("train.exit_signal=0", "train.exit_signal has '0' … is not known … Known: SIGHUP"),
    ("train.exit_signals=[SIGTREM]", "train.exit_signals has 'SIGTREM', which is not known; … Did you mean 'SIGTERM'"),
    ("train.exit_signals=[SIGKILL]", "train.exit_signals has 'SIGKILL', which no process can handle"),
    ("train.exit_signals=[SIGTERM,SIGCHLD]", "train.exit_signals has 'SIGCHLD', which data workers use"),
    ("train.exit_signals=[]", "train.exit_signals= … selects nothing; … exit_signal_handler=false"),
    ("train.on_nonfinite=ignore", "train.on_nonfinite='ignore' must be raise | stop | skip | rollback"),
    ("train.on_nonfinite=rollback", "on_nonfinite=rollback rolls back to a checkpoint, but none is saved"),
    (ROLLBACK + "checkpoint.save_optim=false", "requires the whole state, got checkpoint.save_optim=False"),
    (
        ROLLBACK + "checkpoint.components=[model,trainer,rng]",
        "add optimizer, scheduler, dataset to checkpoint.components",
    ),
    ("validation.eval_global_batch_size=6", "=6 must be a multiple of eval_micro_batch_size * ranks"),
    ("validation.eval_interval=0", "validation.eval_interval=0 must be > 0"),
    (BEST + "validation.eval_iters=0", "requires evaluations, got validation.eval_iters=0"),
    ("validation.eval_micro_batch_size=3 & train.global_batch_size=8", "eval_micro_batch_size * ranks = 3 * 1"),
    ("validation.eval_on_save=true & validation.eval_iters=0", "requires evaluations, got validation.eval_iters=0"),
    ("validation.skip_train=true & validation.eval_iters=0", "skip_train=True evaluates … ; set either of them"),
]

MACHINE = [
    ("ddp.grad_reduce_in_bf16=true & ddp.grad_reduce_in_fp32=true", "ddp.grad_reduce_in_bf16 … summed in one type"),
    ("ddp.bucket_cap_mb=1e20", "ddp.bucket_cap_mb=1e+20 … at most 1,000,000"),
    ("dist.device=gpu", "dist.device='gpu' must be cpu, cuda"),
    ("dist.device=cpu & dist.distributed_backend=nccl", "nccl … requires GPUs … use gloo"),
    ("dist.device=cuda:99999999999999999999", "cuda:99999999999999999999 … n up to 127"),
    ("dist.distributed_timeout_minutes=1e18", "timeout_minutes=1e+18 … at most 525,600, a year"),
    ("env_vars={'A=B': c}", "env_vars has the name 'A=B' … must not be empty or contain '='"),
    ("env_vars={'': c}", "env_vars has the name '' … must not be empty"),
    ("ft.calc_ft_timeouts=true & run.name=null", "calc_ft_timeouts=True … no checkpoint directory … set run.name"),
    ("ft.simulated_fault_base_delay=1e18", "simulated_fault_base_delay=1e+18 … 31,536,000, a year"),
    ("ft.simulated_fault_rank=7", "simulated_fault_rank=7 … one of the ranks 0 to 0 … leave it null"),
    ("ft.watchdog_seconds=0.5", "ft.watchdog_seconds=0.5 … at least 1 … choose more"),
    ("ft.watchdog_seconds=1e18", "ft.watchdog_seconds=1e+18 … at most 31,536,000, a year … or null"),
    ("logger.log_interval=-1", "logger.log_interval=-1 must be >= 0"),
    ("logger.timing_log_level=3", "logger.timing_log_level=3 must be -1 (nothing), 0 … , 1 … or 2"),
    ("logger.timing_log_level=-2", "timing_log_level=-2 must be -1"),
    (
        "nvrx_straggler.enabled=true & "
        + " & ".join(f"nvrx_straggler.calc_{which}_gpu_perf=false" for which in ("relative", "individual")),
        "nothing to compare; set nvrx_straggler.calc_relative_gpu_perf",
    ),
    ("nvrx_straggler.gpu_relative_perf_threshold=2", "gpu_relative_perf_threshold=2.0 must be above 0 and"),
    ("nvrx_straggler.report_time_interval=1e18", "report_time_interval=1e+18 … 31,536,000, a year"),
    ("peft.dropout=1.0", "peft.dropout=1.0 … below 1"),
    (LORA, "peft.peft_scheme=lora … none are given … peft_scheme=null"),
    (LORA + " & checkpoint.pretrained_checkpoint=a & peft.target_modules=[]", "target_modules=[] … no layer … or null"),
    ("profiling.profile_ranks=[-1]", "profile_ranks=[-1]"),
    ("profiling.record_memory_history=true & profiling.profile_ranks=[1]", "has the rank 1"),
    ("profiling.use_pytorch_profiler=true & profiling.use_nsys_profiler=true", "use_nsys … one profiler … to false"),
    ("profiling.use_pytorch_profiler=true & profiling.profile_step_start=12", "profile_step_end=12 must be after"),
    ("profiling.use_pytorch_profiler=true & profiling.profile_ranks=[0, 4]", "=[0, 4] has the rank 4 … 0 to 0"),
    ("straggler.straggler_ctrlr_port=70000", "straggler_ctrlr_port=70000 must be from 1 to 65535"),
    ("straggler.threshold=1.5", "straggler.threshold=1.5 must be above 0 and below 1 … such as 0.7"),
    ("straggler.threshold=0", "straggler.threshold=0.0 must be above 0"),
]

REFUSED = [*BATCHES_AND_LENGTHS, *RATES, *MODEL, *EXPERTS, *DATA, *CHECKPOINTS, *MACHINE]

ACCEPTED = [
    "checkpoint.most_recent_k=1",
    "checkpoint.save_interval=10 & run.name=null & checkpoint.save=ckpt",
    "checkpoint.load=other & checkpoint.ckpt_step=5 & run.name=null",
    "checkpoint.ckpt_step=5",
    "checkpoint.certify=true",
    "checkpoint.components=[model,trainer] & checkpoint.certify=true",
    BEST + "checkpoint.save_interval=20 & validation.eval_interval=10",
    BEST + "checkpoint.save_each_epoch=true & validation.eval_each_epoch=true",
    BEST + "checkpoint.save_interval=7 & validation.eval_on_save=true",
    BEST + "checkpoint.save_on_best=true & validation.eval_interval=7",
    "train.on_nonfinite=rollback & checkpoint.save_interval=10",
    "anomaly.on_spike=rollback & checkpoint.non_persistent_save_interval=10",
    "train.on_nonfinite=rollback & checkpoint.save_each_epoch=true",
    "train.on_nonfinite=skip & run.name=null",
    "train.exit_signals=[SIGTERM,SIGUSR2]",
    "train.exit_signals=[] & train.exit_signal_handler=false",
    "anomaly.spike_metrics=[]",
    "validation.skip_train=true & checkpoint.save_interval=10 & run.name=null",
    "optimizer.initial_loss_scale=4 & optimizer.min_loss_scale=4",
    "model.rope_scaling=null",
    "model.rope_scaling={rope_type: default}",
    "model.rope_scaling={type: linear, factor: 1}",
    "model.rope_scaling={rope_type: dynamic, factor: 2.0}",
    YARN + "}",
    YARN + ", attention_factor: 1.0, beta_fast: 32, truncate: false}",
    LLAMA3 + ", low_freq_factor: 1.0, high_freq_factor: 4.0}",
    "model.num_moe_experts=4",
    MOE + "model.moe_router_topk=1 & model.moe_router_pre_softmax=true",
    MOE + "model.moe_router_topk=1 & model.moe_router_score_function=sigmoid",
    MOE + "model.moe_layer_freq=[0, 1, 0, 1] & model.moe_router_load_balancing_type=none",
    BALANCED + "[seq_aux_loss, global_aux_loss] & model.moe_aux_loss_coeff=[0.1, 0.2]",
    MOE + "model.moe_shared_expert_intermediate_size=64 & model.moe_shared_expert_gate=true",
    MOE + "model.moe_router_enable_expert_bias=true & model.moe_router_bias_update_rate=0.1",
    BALANCED + "[none] & model.moe_aux_loss_coeff=[0.0]",
    MOE + "model.moe_expert_capacity_factor=1.0 & model.moe_token_drop_policy=position",
    "model.mtp_num_layers=2 & model.mtp_loss_scaling_factor=0.2",
    MEGATRON,
    MEGATRON + " & dataset.weights=[0.3,2] & dataset.eod_mask_loss=true & dataset.reset_attention_mask=true",
    CHAT + " & tokenizer.tokenizer_type=bpe & tokenizer.vocab_size=300 & dataset.packing=false & dataset.hf_split=sft",
    "dataset.kind=huggingface & dataset.paths=[some/name] & dataset.hf_subset=en & dataset.text_key=body",
    "tokenizer.tokenizer_type=bpe & dataset.reset_attention_mask=true",
    "dataset.paths=[a.txt,b.jsonl] & dataset.text_key=body",
    "dataset.paths=[directory,a.txt] & dataset.text_key=body",
    "dataset.kind=chat & dataset.paths=[a.jsonl,some/name] & dataset.hf_subset=en",
    "model.position_embedding_type=none & model.kv_channels=7",
    "model.position_embedding_type=learned_absolute & model.kv_channels=7",
    "optimizer.param_groups=[{match: '*.router.*', lr_mult: 0.1, wd_mult: 0}, {match: '*', max_lr: 1, min_lr: null}]",
    "optimizer.min_lr=1e-4 & optimizer.decoupled_lr=2e-4",
    "optimizer.param_groups=[{match: '*', start_wd: 0.2, end_wd: 0.2}]",
    "logger.timing_log_level=-1",
    "logger.timing_log_level=0",
    "logger.timing_log_level=1",
    "logger.timing_log_level=2",
]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ConfigContainer:
    """A run that works, in a directory of its own that is empty."""
    monkeypatch.chdir(tmp_path)
    made = from_dict({"train.train_iters": 100, "train.micro_batch_size": 4, "optimizer.lr": 1e-3, "run.name": "a-run"})
    made.run.output_dir, made.dataset.cache_dir, made.dist.device = str(tmp_path / "runs"), str(tmp_path / "c"), "cpu"
    return made


@pytest.mark.parametrize("words", ["run.name=a-run", *ACCEPTED])
def test_what_can_work_is_accepted(config: ConfigContainer, words: str) -> None:
    apply_overrides(config, words.split(" & "))
    validate(config)


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=lambda words: words[:70])
def test_it_is_refused_before_anything_is_built(
    config: ConfigContainer, tmp_path: Path, words: str, message: str
) -> None:
    apply_overrides(config, words.split(" & "))
    built: list[str] = []

    def build(chunks: list[object]) -> None:
        built.append("model")

    with pytest.raises(ConfigError) as raised:
        pretrain(config, pre_wrap_hooks=[build])
    rest = str(raised.value)
    for part in message.split(" … "):
        assert part in rest
        rest = rest.partition(part)[2]
    assert built == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "train.global_batch_size=12",
            "=12 must be a multiple of micro_batch_size * ranks = 4 * 2 = 8; choose 8 or 16",
        ),
        ("train.global_batch_size=3 & train.micro_batch_size=null", "multiple of ranks = 2; choose 2 or 4"),
        (
            "validation.eval_micro_batch_size=2 & validation.eval_global_batch_size=6",
            "eval_micro_batch_size * ranks = 2 * 2",
        ),
    ],
)
def test_a_batch_is_judged_by_the_number_of_ranks(config: ConfigContainer, words: str, message: str) -> None:
    apply_overrides(config, words.split(" & "))
    validate(config, world_size=3)
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(config, world_size=2)


@pytest.mark.parametrize("start", [pretrain, finetune])
def test_arguments_of_the_other_door_are_named(start: Callable[..., object]) -> None:
    with pytest.raises(
        ConfigError, match=r"must be a ConfigContainer, got TrainingArguments; .* Trainer\(model, args\)"
    ):
        start(TrainingArguments(report_to=[]))


def test_fine_tuning_of_nothing_is_refused(config: ConfigContainer, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"finetune requires weights to start from; set checkpoint.pretrained_checkpoint"
    ):
        finetune(config)
    assert list(tmp_path.iterdir()) == []
