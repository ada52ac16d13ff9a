"""Let Ray start the processes. The training script stays what it is.

On this machine:  cd examples && python jobs/ray_train.py
On a cluster:     ray job submit --working-dir examples -- python jobs/ray_train.py --workers 8 --gpu

Ray Train starts a worker per process, on whichever machines have room, tells each its rank, and connects them. An
`Accelerator` that is made there finds itself connected, and takes it from there.
"""

import argparse


def train(config):
    """Runs on every worker. What it imports is found in the working directory of the job."""
    from image_classification import main

    main(**config)


if __name__ == "__main__":
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser(description="Image classification on the workers of Ray.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    args = parser.parse_args()

    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": 2},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
    )
    trainer.fit()
