"""Rules for optimizer, training, data, checkpoints and logging."""

from __future__ import annotations

from collections.abc import Sequence
from signal import valid_signals

from megatron.training.cli.config import Config, DataConfig, Rule
from megatron.training.cli.sizes import batch_sizes
from megatron.training.data.sources import check_data_flags, tokenizer_files
from megatron.training.data.tokenizers import MODEL_TYPES, ByteTokenizer, check_tokenizer_flags
from moe_overlap.describe.errors import at_least, fraction, one_of, require


def learning_rates_fit(config: Config) -> None:
    """Check the values; `start.py` checks that there is a learning rate, which a dry run does not need."""
    optimizer = config.optimizer
    if config.training.skip_train or optimizer.lr is None:
        return
    require(optimizer.lr > 0, "--lr", optimizer.lr, "must be positive", "use for example 3e-4")
    at_least(0, (("--min-lr", optimizer.min_lr), ("--lr-warmup-init", optimizer.lr_warmup_init)))
    lowest, peak = optimizer.min_lr, optimizer.lr
    require(lowest <= peak, "--min-lr", lowest, f"is above --lr {peak}", f"use {peak} or less")
    decoupled, lowest_decoupled = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    at_least(0, (("--decoupled-lr", decoupled), ("--decoupled-min-lr", lowest_decoupled)))
    fits = lowest_decoupled is None or lowest_decoupled <= (decoupled or 0)
    rule = f"is above --decoupled-lr {decoupled}"
    require(decoupled is None or fits, "--decoupled-min-lr", lowest_decoupled, rule, f"use {decoupled} or less")
    first = optimizer.lr_warmup_init
    require(first <= peak, "--lr-warmup-init", first, f"is above --lr {peak}", f"use {peak} or less")


def schedule_counts_one_unit(config: Config) -> None:
    """A run counts in steps or in samples, throughout."""
    training, optimizer = config.training, config.optimizer
    steps, samples = training.train_iters, training.train_samples
    rule = "a run counts steps or samples"
    require(steps is None or samples is None, "--train-samples", samples, rule, "give --train-iters or --train-samples")
    at_least(1, (("--train-iters", steps), ("--train-samples", samples)))
    by_steps = (
        ("--lr-decay-iters", optimizer.lr_decay_iters),
        ("--lr-warmup-iters", optimizer.lr_warmup_iters),
        ("--lr-wsd-decay-iters", optimizer.lr_wsd_decay_iters),
    )
    by_samples = (
        ("--lr-decay-samples", optimizer.lr_decay_samples),
        ("--lr-warmup-samples", optimizer.lr_warmup_samples),
        ("--lr-wsd-decay-samples", optimizer.lr_wsd_decay_samples),
    )
    at_least(0, (*by_steps, *by_samples))
    others, unit = (by_steps, "samples") if samples is not None else (by_samples, "steps")
    for flag, value in others:
        fix = f"use {flag.replace('iters', 'samples') if unit == 'samples' else flag.replace('samples', 'iters')}"
        require(not value, flag, value, f"the run counts {unit}", fix)


def warm_up_fits(config: Config) -> None:
    optimizer, training = config.optimizer, config.training
    part = optimizer.lr_warmup_fraction
    fraction((("--lr-warmup-fraction", part),), includes_one=True)
    warmup = optimizer.lr_warmup_iters or optimizer.lr_warmup_samples
    flag = "--lr-warmup-iters" if optimizer.lr_warmup_iters else "--lr-warmup-samples"
    require(part is None or not warmup, flag, warmup, "--lr-warmup-fraction says the same", "give one of the two")
    decay = optimizer.lr_decay_iters or optimizer.lr_decay_samples or training.train_iters or training.train_samples
    rule = f"the whole schedule has {decay}"
    require(decay is None or warmup == 0 or warmup < decay, flag, warmup, rule, f"use less than {decay}")
    wsd = optimizer.lr_wsd_decay_iters if training.train_samples is None else optimizer.lr_wsd_decay_samples
    last = "--lr-wsd-decay-iters" if training.train_samples is None else "--lr-wsd-decay-samples"
    if optimizer.lr_decay_style == "WSD":
        require(wsd is not None, "--lr-decay-style", "WSD", "needs the length of the last part", f"add {last}")
        require(decay is None or (wsd or 0) <= decay, last, wsd, rule, f"use {decay} or less")


def optimizer_values_are_in_range(config: Config) -> None:
    optimizer = config.optimizer
    betas = (("--adam-beta1", optimizer.adam_beta1), ("--adam-beta2", optimizer.adam_beta2))
    fraction((*betas, ("--sgd-momentum", optimizer.sgd_momentum)), includes_one=False)
    require(optimizer.adam_eps > 0, "--adam-eps", optimizer.adam_eps, "must be positive", "use for example 1e-8")
    at_least(0, (("--clip-grad", optimizer.clip_grad), ("--weight-decay", optimizer.weight_decay)))
    start, end, style = optimizer.start_weight_decay, optimizer.end_weight_decay, optimizer.weight_decay_incr_style
    for flag, value in (("--start-weight-decay", start), ("--end-weight-decay", end)):
        rule = "weight decay is constant"
        require(
            style != "constant" or value is None, flag, value, rule, "add --weight-decay-incr-style linear or cosine"
        )
        require(
            style == "constant" or value is not None, "--weight-decay-incr-style", style, f"needs {flag}", f"add {flag}"
        )
    at_least(0, (("--start-weight-decay", start),))
    rule = f"is below --start-weight-decay {start}"
    require(start is None or end is None or end >= start, "--end-weight-decay", end, rule, f"use {start} or more")
    both = optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler
    rule = "--use-checkpoint-opt-param-scheduler says the opposite"
    require(not both, "--override-opt-param-scheduler", "", rule, "give one of the two")


def training_counts_are_positive(config: Config) -> None:
    training = config.training
    rule, fix = "training needs it", "add --micro-batch-size N"
    require(training.micro_batch_size is not None, "--micro-batch-size", "", rule, fix)
    at_least(
        1,
        (
            ("--micro-batch-size", training.micro_batch_size),
            ("--global-batch-size", training.global_batch_size),
            ("--eval-global-batch-size", training.eval_global_batch_size),
            ("--eval-interval", training.eval_interval),
            ("--exit-interval", training.exit_interval),
            ("--exit-duration-in-mins", training.exit_duration_in_mins),
        ),
    )
    at_least(0, (("--eval-iters", training.eval_iters), ("--seed", training.seed)))
    number = training.exit_signal
    require(number in set(valid_signals()), "--exit-signal", number, "is no signal's number", "use for example 15")


def batch_grows_by_samples(config: Config) -> None:
    training = config.training
    rise, steps, last = training.rampup_batch_size, training.step_batch_size_schedule, training.global_batch_size
    for flag, values in (("--rampup-batch-size", rise), ("--step-batch-size-schedule", steps)):
        rule, fix = "a batch that changes counts samples", "give --train-samples instead of --train-iters"
        require(values is None or training.train_iters is None, flag, _shown(values), rule, fix)
    if steps is not None:
        rule = "--step-batch-size-schedule says the same"
        require(rise is None, "--rampup-batch-size", _shown(rise), rule, "give one of the two")
        largest = max(batch_sizes(config, 1).sizes)
        require(last in (None, largest), "--global-batch-size", last, rule, f"drop it or use its largest, {largest}")
    if rise is None:
        return
    fix = "write START INCREMENT SAMPLES"
    fits = len(rise) == 3 and rise[0] > 0 and rise[1] > 0 and rise[2] >= 0
    require(fits, "--rampup-batch-size", _shown(rise), "must be three numbers: start, increment and samples", fix)
    require(last is not None, "--rampup-batch-size", _shown(rise), "needs the last batch", "add --global-batch-size")
    assert last is not None
    rule = f"does not lead from {rise[0]} to --global-batch-size {last} in steps of {rise[1]}"
    fits = last >= rise[0] and (last - rise[0]) % rise[1] == 0
    require(fits, "--rampup-batch-size", _shown(rise), rule, "change the start or the increment")


def _shown(values: Sequence[object] | None) -> str:
    return " ".join(map(str, values or ()))


def data_are_named(config: Config) -> None:
    data = config.data
    check_data_flags(data)
    if data.split is not None:
        parts = data.split.split(",")
        digits = [part.strip().replace(".", "", 1) for part in parts]
        fits = len(parts) <= 3 and all(part.isascii() and part.isdigit() and len(part) < 20 for part in digits)
        rule = "must be up to three parts for training, validation and test"
        require(
            fits and any(float(part) > 0 for part in parts), "--split", data.split, rule, "use for example 969,30,1"
        )
    at_least(2, (("--vocab-size", data.vocab_size),))
    is_bytes = data.tokenizer_type == "ByteTokenizer" or (data.tokenizer_type is None and data.vocab_file is None)
    least = ByteTokenizer.vocab_size if is_bytes else 2
    rule, fix = f"the tokenizer has {least} ids", f"use at least {least} or drop the flag"
    require(data.vocab_size is None or data.vocab_size >= least, "--vocab-size", data.vocab_size, rule, fix)
    at_least(0, (("--num-workers", data.num_workers),))
    check_tokenizer_flags(data.tokenizer_type, tokenizer_files(data), data.vocab_size)
    tokenizer_files_have_a_type(data)
    at_least(7, (("--tiktoken-num-special-tokens", data.tiktoken_num_special_tokens),))


def tokenizer_files_have_a_type(data: DataConfig) -> None:
    """Refuse a tokenizer's files without a type, where text is read as bytes.

    A type that replaces that of an argument list leaves the list's files unread, which is no mistake.
    """
    if data.tokenizer_type is not None:
        return
    rule = "is read with --tokenizer-type only, and there is none"
    model, merge = data.tokenizer_model, data.merge_file
    require(model is None, "--tokenizer-model", model, rule, f"add --tokenizer-type {one_of(MODEL_TYPES)}")
    # Argument lists of real jobs name both of GPT-2's files for tokenized data: --vocab-file gives the number of ids.
    lacks_vocabulary = merge is not None and data.vocab_file is None
    require(
        not lacks_vocabulary, "--merge-file", merge, rule, "add --tokenizer-type GPT2BPETokenizer and --vocab-file FILE"
    )


def checkpoint_intervals_fit(config: Config) -> None:
    checkpoint = config.checkpoint
    saving = (
        ("--save-interval", checkpoint.save_interval),
        ("--save-retain-interval", checkpoint.save_retain_interval),
        ("--keep-last-checkpoints", checkpoint.keep_last_checkpoints),
        ("--non-persistent-save-interval", checkpoint.non_persistent_save_interval),
    )
    at_least(1, saving)
    often, rule, fix = checkpoint.non_persistent_save_interval, "needs a type", "add --non-persistent-ckpt-type global"
    require(often is None or checkpoint.non_persistent_ckpt_type, "--non-persistent-save-interval", often, rule, fix)
    retain, interval = checkpoint.save_retain_interval, checkpoint.save_interval
    if retain is not None:
        rule, fix = "checkpoints are not saved at intervals", "add --save-interval N"
        require(interval is not None, "--save-retain-interval", retain, rule, fix)
        rule = f"is not a multiple of --save-interval {interval}"
        require(
            interval and retain % interval == 0, "--save-retain-interval", retain, rule, "no kept step would be saved"
        )
    at_least(0, (("--ckpt-step", checkpoint.ckpt_step),))


def reports_are_due_at_some_step(config: Config) -> None:
    logging = config.logging
    intervals = (
        ("--log-interval", logging.log_interval),
        ("--tensorboard-log-interval", logging.tensorboard_log_interval),
        ("--tensorboard-queue-size", logging.tensorboard_queue_size),
        ("--log-memory-interval", logging.log_memory_interval),
    )
    at_least(1, intervals)
    path, rule, fix = logging.log_expert_load, "a dense model has no experts", "add --num-experts or drop the flag"
    require(path is None or config.moe.num_experts is not None, "--log-expert-load", path, rule, fix)


def profile_can_be_written(config: Config) -> None:
    logging = config.logging
    if not (logging.profile and logging.use_pytorch_profiler):
        return
    require(
        logging.tensorboard_dir is not None,
        "--profile",
        "",
        "needs a folder for the trace",
        "add --tensorboard-dir FOLDER",
    )
    first, end = logging.profile_step_start, logging.profile_step_end
    at_least(0, (("--profile-step-start", first),))
    rule = f"must come after --profile-step-start {first}"
    require(end > first, "--profile-step-end", end, rule, f"use {first + 1} or more")


RUN_RULES: tuple[Rule, ...] = (
    learning_rates_fit,
    schedule_counts_one_unit,
    warm_up_fits,
    optimizer_values_are_in_range,
    training_counts_are_positive,
    batch_grows_by_samples,
    data_are_named,
    checkpoint_intervals_fit,
    reports_are_due_at_some_step,
    profile_can_be_written,
)
