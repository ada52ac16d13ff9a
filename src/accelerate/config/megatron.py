"""How Megatron-LM spreads a training: its settings, the variables that stand in for them, and the sizes of models."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from accelerate.config.environment import flag, read_variable

Parser = Callable[..., Any]
MODEL_CONFIGS_TO_MEGATRON_PARSERS: dict[str, Parser] = {}


class _MegatronSetting(NamedTuple):
    """What a field is without being given, how its variable is read, and what Megatron-LM calls it."""

    default: Any
    read: Callable[[str], Any]
    argument: str | None = ""  # as the field; None is for us alone


def _setting(default: Any, read: Callable[[str], Any], argument: str | None = "") -> Any:
    return field(default=None, metadata={"setting": _MegatronSetting(default, read, argument)})


# Fields that Megatron-LM gets as they are: at once, or with its scheduler.
_PASSED_ON = {"passed_on": True}
_OF_SCHEDULE = {"of_schedule": True}
_PREFIX = "MEGATRON_LM_"


@dataclass
class MegatronLMPlugin:
    """Train with Megatron-LM. What is not given is read from the `MEGATRON_LM_*` variables.

    `megatron_lm_default_args` are the arguments that Megatron-LM gets; `other_megatron_args` are added last.
    """

    tp_degree: int | None = _setting(1, int, "tensor_model_parallel_size")
    pp_degree: int | None = _setting(1, int, "pipeline_model_parallel_size")
    use_custom_fsdp: bool | None = _setting(False, flag)
    overlap_cpu_optimizer_d2h_h2d: bool | None = _setting(False, flag)
    no_load_optim: bool | None = _setting(False, flag)
    eod_mask_loss: bool | None = _setting(False, flag)
    no_save_optim: bool | None = _setting(False, flag)
    optimizer_cpu_offload: bool | None = _setting(False, flag)
    use_precision_aware_optimizer: bool | None = _setting(False, flag)
    decoder_last_pipeline_num_layers: int | None = _setting(None, int)
    recompute_granularity: str | None = _setting("full", str)
    recompute_method: str | None = _setting("uniform", str)
    recompute_num_layers: int | None = _setting(1, int)
    attention_backend: bool | None = _setting(True, flag)
    expert_model_parallel_size: int | None = _setting(1, int)
    context_parallel_size: int | None = _setting(1, int)
    attention_dropout: float | None = _setting(0.0, float)
    hidden_dropout: float | None = _setting(0.0, float)
    attention_softmax_in_fp32: bool | None = _setting(True, flag)
    expert_tensor_parallel_size: int | None = _setting(1, int)
    calculate_per_token_loss: bool | None = _setting(True, flag)
    use_rotary_position_embeddings: bool | None = _setting(True, flag)
    num_micro_batches: int | None = _setting(1, int)
    gradient_clipping: float | None = _setting(1.0, float, "clip_grad")
    sequence_parallelism: bool | None = _setting(False, flag, "sequence_parallel")
    # Another name for one value of `recompute_granularity`.
    recompute_activations: bool | None = _setting(False, flag, None)
    use_distributed_optimizer: bool | None = _setting(False, flag)
    pipeline_model_parallel_split_rank: int | None = field(default=None, metadata=_PASSED_ON)
    num_layers_per_virtual_pipeline_stage: int | None = field(default=None, metadata=_PASSED_ON)
    is_train_batch_min: bool = True
    train_iters: int | None = field(default=None, metadata=_OF_SCHEDULE)
    train_samples: int | None = field(default=None, metadata=_OF_SCHEDULE)
    weight_decay_incr_style: str = field(default="constant", metadata=_OF_SCHEDULE)
    start_weight_decay: float | None = field(default=None, metadata=_OF_SCHEDULE)
    end_weight_decay: float | None = field(default=None, metadata=_OF_SCHEDULE)
    lr_decay_style: str = field(default="linear", metadata=_OF_SCHEDULE)
    lr_decay_iters: int | None = field(default=None, metadata=_OF_SCHEDULE)
    lr_decay_samples: int | None = field(default=None, metadata=_OF_SCHEDULE)
    lr_warmup_iters: int | None = field(default=None, metadata=_OF_SCHEDULE)
    lr_warmup_samples: int | None = field(default=None, metadata=_OF_SCHEDULE)
    lr_warmup_fraction: float | None = field(default=None, metadata=_OF_SCHEDULE)
    min_lr: float = field(default=0, metadata=_OF_SCHEDULE)
    consumed_samples: list[int] | None = field(default=None, metadata=_PASSED_ON)
    no_wd_decay_cond: Callable[..., Any] | None = field(default=None, metadata=_PASSED_ON)
    scale_lr_cond: Callable[..., Any] | None = field(default=None, metadata=_PASSED_ON)
    lr_mult: float = field(default=1.0, metadata=_PASSED_ON)
    megatron_dataset_flag: bool = field(default=False, metadata=_PASSED_ON)
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = field(default=100, metadata=_PASSED_ON)
    eval_interval: int = field(default=1000, metadata=_PASSED_ON)
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None
    # The config of the model that was prepared, where it is one of transformers.
    model_config: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        granularity = self.recompute_granularity or os.environ.get(f"{_PREFIX}RECOMPUTE_GRANULARITY")
        for name, setting in _SETTINGS.items():
            if getattr(self, name) is None:
                setattr(self, name, read_variable(_PREFIX + name.upper(), setting.read, setting.default))
        if self.recompute_activations:
            self.recompute_granularity = _selective(granularity)
        if self.consumed_samples is not None:  # of training, validation and test, of which the last may be left out
            self.consumed_samples = [*self.consumed_samples, *[0] * (3 - len(self.consumed_samples))]
        # Megatron-LM reduces gradients itself where they do not all come at the same time, or go to one process.
        self.DDP_impl = "local" if self.pp_degree != 1 or self.use_distributed_optimizer else "torch"
        self.megatron_lm_default_args: dict[str, Any] = {
            argument: getattr(self, name) for name, argument in ARGUMENTS.items()
        }
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
            if self.set_all_logging_options:
                self.set_tensorboard_logging_options()
        self.megatron_lm_default_args.update(self.other_megatron_args or {})

    def set_network_size_args(self, model: Any, batch_data: Any = None) -> None:
        """Read the sizes of the model from its config. batch_data: a batch, for the length of sequences."""
        kind = model.config.model_type.lower()
        for known, parse in MODEL_CONFIGS_TO_MEGATRON_PARSERS.items():
            if known in kind:
                parse(self, model, batch_data)
                return
        raise ValueError(
            f"The sizes of a {kind!r} model are not known here: register a function that reads them with "
            "`add_model_config_to_megatron_parser`."
        )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Compute in fp16 or bf16."""
        if mixed_precision in ("fp16", "bf16"):
            self.megatron_lm_default_args[mixed_precision] = True
        if mixed_precision == "bf16":
            self.DDP_impl = self.megatron_lm_default_args["DDP_impl"] = "local"

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the batch sizes: of a micro-batch, and of a step of all processes."""
        assert self.num_micro_batches is not None
        sizes = {
            "data_parallel_size": dp_degree,
            "micro_batch_size": micro_batch_size,
            "global_batch_size": dp_degree * micro_batch_size * self.num_micro_batches,
        }
        vars(self).update(sizes)
        self.megatron_lm_default_args.update(sizes)

    def set_optimizer_type(self, optimizer: Any) -> None:
        """Have Megatron-LM make an optimizer like this one: Adam or SGD, with the same values for all parameters."""
        name = type(optimizer).__name__.lower()
        if "adam" in name:
            first, second = _same(optimizer, "betas")
            kind = {"optimizer": "adam", "adam_beta1": first, "adam_beta2": second, "adam_eps": _same(optimizer, "eps")}
        elif "sgd" in name:
            kind = {"optimizer": "sgd", "sgd_momentum": _same(optimizer, "momentum")}
        else:
            raise ValueError(f"Megatron-LM has no optimizer like {type(optimizer).__name__}: use Adam, AdamW or SGD.")
        for variant in ("amsgrad", "nesterov", "maximize"):
            if any(group.get(variant) for group in optimizer.param_groups):
                raise ValueError(
                    f"Megatron-LM's optimizers have no `{variant}`, but this {type(optimizer).__name__} sets it: "
                    "leave it out."
                )
        kind |= {"lr": _same(optimizer, "lr"), "weight_decay": _same(optimizer, "weight_decay")}
        self.megatron_lm_default_args.update(kind)

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Take the steps that were not given from a MegatronLMDummyScheduler, which counts those of all processes."""
        for total, samples, steps in (
            ("train_iters", "train_samples", scheduler.total_num_steps),
            ("lr_warmup_iters", "lr_warmup_samples", scheduler.warmup_num_steps),
        ):
            if getattr(self, total) is not None:
                continue
            if getattr(self, samples) is not None:
                warnings.warn(f"`{samples}` is not used: the scheduler counts in steps.", stacklevel=2)
            setattr(self, total, (steps or 0) // self.megatron_lm_default_args["data_parallel_size"])
            setattr(self, samples, 0 if samples == "lr_warmup_samples" else None)
        self.megatron_lm_default_args.update({name: getattr(self, name) for name in SCHEDULE})

    def set_tensorboard_logging_options(self) -> None:
        """Log all that can be logged, beside losses, learning rate and the norm of gradients."""
        for name in ("log_num_zeros_in_grad", "log_loss_scale_to_tensorboard", "log_batch_size_to_tensorboard"):
            self.megatron_lm_default_args[name] = True


_SETTINGS: dict[str, _MegatronSetting] = {
    each.name: each.metadata["setting"] for each in fields(MegatronLMPlugin) if "setting" in each.metadata
}
# By the name of a field, what Megatron-LM calls it.
ARGUMENTS: dict[str, str] = {
    **{name: setting.argument or name for name, setting in _SETTINGS.items() if setting.argument is not None},
    **{each.name: each.name for each in fields(MegatronLMPlugin) if "passed_on" in each.metadata},
    "DDP_impl": "DDP_impl",
}
SCHEDULE = tuple(each.name for each in fields(MegatronLMPlugin) if "of_schedule" in each.metadata)


def _selective(asked: str | None) -> str:
    """What `recompute_activations` stands for, unless something else was asked for."""
    if asked not in (None, "selective"):
        raise ValueError(
            "recompute_activations=True recomputes the activations inside attention, but "
            f"recompute_granularity={asked!r} asks for something else: leave out one of the two."
        )
    return "selective"


def _same(optimizer: Any, name: str) -> Any:
    """The value that all groups of an optimizer have. A weight decay of 0 may be beside it."""
    # A scheduler of the script's own has changed the rate, and left the one it began with beside it.
    values = [group.get(f"initial_{name}", group[name]) for group in optimizer.param_groups]
    if name == "weight_decay":
        values = [value for value in values if value] or [0.0]
    if any(value != values[0] for value in values):
        raise ValueError(
            f"Megatron-LM trains all parameters with one `{name}`, and groups of this {type(optimizer).__name__} have "
            f"other `{name}`s ({', '.join(map(str, values))}): give all of them the same"
            + (", and set `scale_lr_cond` and `lr_mult` of the MegatronLMPlugin." if name == "lr" else ".")
        )
    return values[0]


# --- the sizes of models ----------------------------------------------------------------------------------------


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Register a function that reads the sizes of models of this type: `parse(plugin, model, batch_data)`."""

    def register(parse: Parser) -> Parser:
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type] = parse
        return parse

    return register


def _length(plugin: MegatronLMPlugin, first: str, batch_data: Any, longest: int) -> int:
    """The length of sequences: as asked for, as in the batch, or the longest there can be."""
    asked: int | None = getattr(plugin, first)
    if asked is not None and plugin.seq_length is not None:
        warnings.warn(f"`{first}` and `seq_length` are both set: `{first}` is used.", stacklevel=4)
    if asked is None:
        asked = plugin.seq_length
    if asked is None and batch_data is not None:
        asked = int(batch_data["input_ids"].shape[1])
    return longest if asked is None else asked


def _set(plugin: MegatronLMPlugin, config: Any, **sizes: Any) -> None:
    plugin.megatron_lm_default_args.update(
        sizes, orig_vocab_size=config.vocab_size, model_return_dict=config.return_dict
    )


@add_model_config_to_megatron_parser("megatron-bert")
def parse_bert_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> None:
    """Read the sizes of a BERT."""
    config, kind = model.config, type(model).__name__.lower()
    megatron_lm_plugin.seq_length = _length(
        megatron_lm_plugin, "encoder_seq_length", batch_data, config.max_position_embeddings
    )
    _set(
        megatron_lm_plugin,
        config,
        model_type_name="bert",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        seq_length=megatron_lm_plugin.seq_length,
        num_labels=config.num_labels,
        pretraining_flag="maskedlm" in kind or "pretraining" in kind,
    )
    if "pretraining" in kind:
        megatron_lm_plugin.megatron_lm_default_args["bert_binary_head"] = True


@add_model_config_to_megatron_parser("gpt2")
def parse_gpt2_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> None:
    """Read the sizes of a GPT-2."""
    config = model.config
    megatron_lm_plugin.seq_length = _length(megatron_lm_plugin, "decoder_seq_length", batch_data, config.n_positions)
    _set(
        megatron_lm_plugin,
        config,
        model_type_name="gpt",
        tokenizer_type="GPT2BPETokenizer",
        num_layers=config.n_layer,
        hidden_size=config.n_embd,
        num_attention_heads=config.n_head,
        max_position_embeddings=config.n_positions,
        seq_length=megatron_lm_plugin.seq_length,
        return_logits=megatron_lm_plugin.return_logits,
        pretraining_flag=True,
    )


@add_model_config_to_megatron_parser("t5")
def parse_t5_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> None:
    """Read the sizes of a T5."""
    config = model.config
    longest = getattr(config, "n_positions", 512)  # which transformers 5 does not know any more
    for name, key in (("encoder_seq_length", "input_ids"), ("decoder_seq_length", "labels")):
        if getattr(megatron_lm_plugin, name) is None:
            length = longest if batch_data is None else int(batch_data[key].shape[1])
            setattr(megatron_lm_plugin, name, length)
    _set(
        megatron_lm_plugin,
        config,
        model_type_name="t5",
        num_layers=config.num_layers,
        hidden_size=config.d_model,
        num_attention_heads=config.num_heads,
        max_position_embeddings=longest,
        encoder_seq_length=megatron_lm_plugin.encoder_seq_length,
        decoder_seq_length=megatron_lm_plugin.decoder_seq_length,
        pretraining_flag=True,
    )


def _set_decoder(plugin: MegatronLMPlugin, config: Any, batch_data: Any, **more: Any) -> None:
    """What decoders of the current kind have in common."""
    if plugin.seq_length is None:
        longest = getattr(config, "max_sequence_length", None)
        if longest is None:
            in_batch = None if batch_data is None else int(batch_data["input_ids"].shape[1])
            longest = config.max_position_embeddings if in_batch is None else in_batch
        plugin.seq_length = longest
    _set(
        plugin,
        config,
        model_type_name="gpt",
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        seq_length=plugin.seq_length,
        return_logits=plugin.return_logits,
        **more,
    )


@add_model_config_to_megatron_parser("llama")
def parse_llama_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> None:
    """Read the sizes of a Llama."""
    _set_decoder(megatron_lm_plugin, model.config, batch_data, tokenizer_type="Llama2Tokenizer", pretraining_flag=True)


@add_model_config_to_megatron_parser("glm4_moe")
def parse_glm4_moe_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> None:
    """Read the sizes of a GLM-4 with experts."""
    config = model.config
    dense = config.first_k_dense_replace
    _set_decoder(
        megatron_lm_plugin,
        config,
        batch_data,
        tokenizer_type="HuggingFaceTokenizer",
        pretraining_flag=False,
        original_model_type=config.model_type,
        # attention
        kv_channels=config.head_dim,
        group_query_attention=True,
        num_query_groups=config.num_key_value_heads,
        qk_layernorm=config.use_qk_norm,
        add_qkv_bias=True,
        use_flash_attn=True,
        position_embedding_type="rope",
        rope_type="rope",
        rotary_base=config.rope_theta,
        rotary_percent=config.partial_rotary_factor,
        # layers
        add_bias_linear=False,
        normalization="RMSNorm",
        norm_epsilon=config.rms_norm_eps,
        swiglu=True,
        ffn_hidden_size=config.intermediate_size,
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
        eos_token_id=config.eos_token_id,
        # experts
        num_experts=config.n_routed_experts,
        moe_layer_freq=[int(layer >= dense) for layer in range(config.num_hidden_layers)],
        moe_ffn_hidden_size=config.moe_intermediate_size,
        moe_shared_expert_intermediate_size=config.moe_intermediate_size,
        moe_router_topk=config.num_experts_per_tok,
        moe_router_topk_scaling_factor=config.routed_scaling_factor,
        moe_router_pre_softmax=True,
        moe_router_score_function="sigmoid",
        moe_router_dtype="fp32",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
        moe_permute_fusion=True,
    )
