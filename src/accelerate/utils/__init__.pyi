from accelerate.commands.config.default import write_basic_config as write_basic_config
from accelerate.parallelism_config import ParallelismConfig as ParallelismConfig
from accelerate.utils.ao import *
from accelerate.utils.bnb import *
from accelerate.utils.constants import *
from accelerate.utils.dataclasses import *
from accelerate.utils.deepspeed import *
from accelerate.utils.environment import *
from accelerate.utils.fsdp_utils import *
from accelerate.utils.imports import *
from accelerate.utils.launch import *
from accelerate.utils.megatron_lm import AbstractTrainStep as AbstractTrainStep
from accelerate.utils.megatron_lm import BertTrainStep as BertTrainStep
from accelerate.utils.megatron_lm import GPTTrainStep as GPTTrainStep
from accelerate.utils.megatron_lm import MegatronEngine as MegatronEngine
from accelerate.utils.megatron_lm import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from accelerate.utils.megatron_lm import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from accelerate.utils.megatron_lm import MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper
from accelerate.utils.megatron_lm import MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper
from accelerate.utils.megatron_lm import T5TrainStep as T5TrainStep
from accelerate.utils.megatron_lm import avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group
from accelerate.utils.megatron_lm import gather_across_data_parallel_groups as gather_across_data_parallel_groups
from accelerate.utils.memory import *
from accelerate.utils.modeling import *
from accelerate.utils.offload import *
from accelerate.utils.operations import *
from accelerate.utils.other import *
from accelerate.utils.random import *
from accelerate.utils.torch_xla import *
from accelerate.utils.tqdm import *
from accelerate.utils.transformer_engine import *
from accelerate.utils.versions import *
