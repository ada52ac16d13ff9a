"""`torch.compile`, and 8-bit floating point."""

from __future__ import annotations

from accelerate.config.options.base import FLAG, THREE_YES_NO, WHOLE, YES_NO_DIGIT, Family, Kind, Option

DYNAMO_BACKENDS = {
    "no": "do not compile",
    "eager": "run uncompiled, to check that graph capture works",
    "aot_eager": "the same, with the backward pass",
    "inductor": "the compiler of PyTorch: the usual choice",
    "aot_ts_nvfuser": "nvFuser through TorchScript",
    "nvprims_nvfuser": "nvFuser through primitives",
    "cudagraphs": "CUDA graphs",
    "ofi": "TorchScript, for inference",
    "fx2trt": "TensorRT, for inference",
    "onnxrt": "ONNX Runtime",
    "tensorrt": "TensorRT through ONNX",
    "aot_torchxla_trace_once": "XLA, for training",
    "torchxla_trace_once": "XLA, for inference",
    "tvm": "Apache TVM, for inference",
    "hpu_backend": "Intel Gaudi",
    "neuron": "AWS Neuron",
    # As one release spelled it (see `MISSPELT`); its files and scripts have it.
    "torhchxla_trace_once": "XLA, for inference",
}

# The list that used to be public, in its order and with its slip of the pen.
LEGACY_DYNAMO_BACKENDS = [
    *(name.upper() for name in list(DYNAMO_BACKENDS)[1:12]),
    "TORHCHXLA_TRACE_ONCE",
    "TVM",
]

DYNAMO_MODES = {
    "default": "a balance of compile time and speed",
    "reduce-overhead": "less overhead per call, for small batches",
    "max-autotune": "the fastest code, the longest compile",
}

DYNAMO = Family(
    "torch.compile",
    "Compiling the model.",
    (
        Option(
            "dynamo_backend",
            "the compiler",
            Kind("a compiler", str, lambda value: str(value).upper()),
            choices=DYNAMO_BACKENDS,
            question="Which compiler?",
        ),
        Option(
            "dynamo_mode",
            "what to optimize for",
            default="default",
            choices=DYNAMO_MODES,
            question="What should it optimize for?",
        ),
        Option(
            "dynamo_use_fullgraph",
            "fail if a model cannot be compiled as one graph",
            FLAG,
            False,
            question="Fail if a model cannot be compiled as one graph?",
        ),
        Option(
            "dynamo_use_dynamic",
            "compile for shapes that change",
            FLAG,
            False,
            question="Compile for shapes that change?",
        ),
        Option(
            "dynamo_use_regional_compilation",
            "compile the repeated blocks of a model once instead of the whole model",
            FLAG,
            False,
            question="Compile repeated blocks once instead of the whole model?",
        ),
    ),
    section="dynamo_config",
    prefix="dynamo_",
    variables="ACCELERATE_",
)

FP8 = Family(
    "fp8",
    "With `--mixed_precision fp8`.",
    (
        Option(
            "fp8_backend",
            "the library",
            choices={"ao": "torchao", "te": "Transformer Engine", "msamp": "MS-AMP"},
            question="Which library computes in fp8?",
        ),
        Option(
            "fp8_use_autocast_during_eval",
            "use fp8 in evaluation too (te)",
            FLAG,
            False,
            question="Use fp8 in evaluation too?",
        ),
        Option(
            "fp8_margin",
            "margin of the scaling factor (te)",
            WHOLE,
            0,
            question="Which margin should the scaling factor have?",
        ),
        Option(
            "fp8_interval",
            "steps between two scaling factors (te)",
            WHOLE,
            1,
            question="How many steps between two scaling factors?",
        ),
        Option(
            "fp8_format",
            "the format (te)",
            default="HYBRID",
            choices={
                "HYBRID": "E4M3 forward, E5M2 backward: the usual choice",
                "E4M3": "more digits, less range",
                "E5M2": "more range, fewer digits; for evaluation",
            },
            question="Which fp8 format?",
        ),
        Option(
            "fp8_amax_history_len",
            "steps whose maxima are remembered (te)",
            WHOLE,
            1024,
            question="For how many steps are the maxima remembered?",
        ),
        Option(
            "fp8_amax_compute_algo",
            "how the scaling factor follows from them (te)",
            default="most_recent",
            choices={"max": "the largest remembered", "most_recent": "the last one"},
            question="How does the scaling factor follow from them?",
        ),
        Option(
            "fp8_override_linear_precision",
            "compute fprop, dgrad, wgrad of linear layers in higher precision, such as `true,false,false` (te)",
            THREE_YES_NO,
            (False, False, False),
            env="",  # one for each of the three: see `launch.variables.fp8`
        ),
        Option(
            "fp8_use_mxfp8_block_scaling",
            "scale blocks of numbers instead of whole tensors (te)",
            FLAG,
            None,
        ),
        Option(
            "fp8_opt_level",
            "how much is kept in 8 bits (msamp)",
            default="O2",
            choices={"O1": "gradients and their exchange", "O2": "and the optimizer's states"},
            question="How much is kept in 8 bits?",
        ),
        Option(
            "fp8_recipe",
            "how numbers are scaled, by default tensorwise (ao)",
            choices={
                "tensorwise": "each matrix by one factor: the fastest",
                "rowwise": "each row by its own: more exact",
                "rowwise_with_gw_hp": "and gradients of weights in bf16: the most exact",
            },
            question="How are numbers scaled?",
        ),
        Option(
            "fp8_enable_fsdp_float8_all_gather",
            "gather sharded weights in fp8 (ao)",
            YES_NO_DIGIT,
            True,
            question="Gather sharded weights in fp8?",
        ),
        Option(
            "fp8_pad_inner_dim",
            "pad matrices whose inner size is not a multiple of 16 (ao)",
            YES_NO_DIGIT,
            True,
            question="Pad matrices whose inner size is not a multiple of 16?",
        ),
    ),
    section="fp8_config",
    prefix="fp8_",
    short_keys=True,
    variables="ACCELERATE_",
)
