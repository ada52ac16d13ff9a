"""MLflow."""

from __future__ import annotations

import json
import os
from typing import Any

from accelerate.config.environment import str_to_bool
from accelerate.tracking.base import LibraryTracker, flat, logger, on_main_process, only_numbers


class MLflowTracker(LibraryTracker):
    """Log to a run of MLflow.

    Args:
        experiment_name: the experiment, which is created if needed. `MLFLOW_EXPERIMENT_NAME` takes precedence.
        logging_dir: where a new experiment stores its artifacts.
        run_id: continue this run. `MLFLOW_RUN_ID` takes precedence.
        tags: tags of the run, as a dict or as JSON. `MLFLOW_TAGS` takes precedence.
        nested_run: make this a run inside the active one. `MLFLOW_NESTED_RUN` takes precedence.
        run_name: the name of the run.
        description: a description of the run.
    """

    name = "mlflow"
    requires_logging_directory = False
    package = install = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name: str | None = os.environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id: str | None = os.environ.get("MLFLOW_RUN_ID", run_id)
        given = os.environ.get("MLFLOW_TAGS", tags)
        self.tags: Any = json.loads(given) if isinstance(given, str) else given
        nested = os.environ.get("MLFLOW_NESTED_RUN")
        self.nested_run: bool = bool(nested_run) if nested is None else bool(str_to_bool(nested))
        self.run_name = run_name
        self.description = description

    @on_main_process
    def start(self) -> None:
        mlflow = self.library()
        found = mlflow.search_experiments(filter_string=f"name = '{self.experiment_name}'")
        if found:
            experiment = found[0].experiment_id
        else:
            location = None if self.logging_dir is None else os.fspath(self.logging_dir)
            experiment = mlflow.create_experiment(self.experiment_name, artifact_location=location, tags=self.tags)
        self.active_run: Any = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=experiment,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )
        # By id from here on: on another thread the run is not the active one.
        self._id = self.active_run.info.run_id
        self._active_here = self._active_runs()

    @property
    def tracker(self) -> Any:
        return self.active_run

    @property
    def _client(self) -> Any:
        return self.library().MlflowClient()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings as parameters of the run. Values that are too long for MLflow are left out.

        Args:
            values: the settings.
        """
        if str_to_bool(os.environ.get("MLFLOW_FLATTEN_PARAMS", "false")):
            values = dict(flat(values, "."))
        limit = self.library("mlflow.utils.validation").MAX_PARAM_VAL_LENGTH
        parameters, too_long = [], []
        for key, value in values.items():
            if len(str(value)) > limit:
                too_long.append(key)
            else:
                parameters.append(self.library("mlflow.entities").Param(key, str(value)))
        batch = self.library("mlflow.utils.validation").MAX_PARAMS_TAGS_PER_BATCH
        for first in range(0, len(parameters), batch):
            self._client.log_batch(self._id, params=parameters[first : first + batch])
        if too_long:
            names = ", ".join(too_long)
            logger.warning(
                f"Left out of the run's parameters, because MLflow takes {limit} characters at most: {names}."
            )

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers. Other values are left out.

        Args:
            values: the numbers by name.
            step: the training step.
            **kwargs: arguments for `mlflow.log_metrics`.
        """
        numbers: dict[str, int | float] = {}
        only_numbers(values, numbers.__setitem__)
        self.library().log_metrics(numbers, step=step, run_id=self._id, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a matplotlib or plotly figure with the run.

        Args:
            figure: the figure.
            artifact_file: the name of the file.
            save_kwargs: arguments for `mlflow.log_figure`.
        """
        self._client.log_figure(self._id, figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store the files of a folder with the run.

        Args:
            local_dir: the folder.
            artifact_path: where to store them in the run.
        """
        self._client.log_artifacts(self._id, local_dir, artifact_path)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file with the run.

        Args:
            local_path: the file.
            artifact_path: where to store it in the run.
        """
        self._client.log_artifact(self._id, local_path, artifact_path)

    def _active_runs(self) -> list[Any]:
        """The runs that MLflow considers active on this thread; before version 2.14, on all of them."""
        runs: Any = self.library("mlflow.tracking.fluent")._active_run_stack
        return runs if isinstance(runs, list) else runs.get()

    @on_main_process
    def _release(self) -> None:
        # `mlflow.end_run` on the thread that trains would wait for the server. What it does there is to forget the run.
        self._active_here[:] = [run for run in self._active_here if run.info.run_id != self._id]
        last: Any = self.library("mlflow.tracking.fluent")._last_active_run_id
        if hasattr(last, "set"):
            last.set(self._id)

    @on_main_process
    def finish(self) -> None:
        self._active_runs().append(self.active_run)
        self.library().end_run()
