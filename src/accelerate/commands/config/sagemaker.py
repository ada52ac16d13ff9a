"""The questions about a job on Amazon SageMaker."""

from __future__ import annotations

from accelerate.commands.config import questions
from accelerate.config.enums import ComputeEnvironment, SageMakerDistributedType
from accelerate.config.file import SageMakerConfig
from accelerate.config.options import option

SPREAD = {
    "NO": "one GPU",
    "DATA_PARALLEL": "a copy of the model on each of several GPUs",
    "MODEL_PARALLEL": "the model spread over several GPUs",
}


def get_sagemaker_input() -> SageMakerConfig:
    """Ask for all settings of a job."""
    profile = questions.text("Which profile of your AWS configuration?", "default", str)
    region = questions.text("Which region?", "us-east-1", str)
    role = questions.text("Which IAM role may run the job?", "accelerate_sagemaker_execution_role", str)
    image = questions.text("Which docker image? (empty: the one of SageMaker)", None, str)
    spread = questions.choose("How is the work spread?", SPREAD, "NO")
    instance = questions.text("On which type of instance?", "ml.p3.2xlarge", str)
    machines = 1
    if spread != "NO":
        machines = questions.ask(option("num_machines"), 1) or 1
    return SageMakerConfig(
        compute_environment=ComputeEnvironment.AMAZON_SAGEMAKER,
        distributed_type=SageMakerDistributedType(spread),
        mixed_precision=questions.ask(option("mixed_precision"), "no"),
        use_cpu=False,
        debug=False,
        ec2_instance_type=instance or "ml.p3.2xlarge",
        iam_role_name=role or "",
        image_uri=image,
        profile=profile,
        region=region or "us-east-1",
        num_machines=machines,
        base_job_name=f"accelerate-sagemaker-{machines}",
    )
