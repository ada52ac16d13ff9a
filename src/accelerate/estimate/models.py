"""Models by name, of the Hub or of a folder here, built without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Return what the Hub knows about a model.

    Args:
        repo: the name of the model.
        token: an access token.

    Returns:
        The model's info; "gated" if it needs permission, False if there is no such model.
    """
    from huggingface_hub import model_info
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return model_info(repo, token=token)
    except GatedRepoError:
        return "gated"
    except RepositoryNotFoundError:
        return False


def check_has_model(error: Exception) -> str:
    """Return the library whose error means that it has no such model.

    Args:
        error: the error.

    Returns:
        "timm", "transformers", or "unknown" for any other error.
    """
    text = str(error)
    if isinstance(error, RuntimeError) and "Unknown model" in text:
        return "timm"
    if isinstance(error, OSError) and "does not appear to have a file named" in text:
        return "transformers"
    return "unknown"


def add_timm_hub_prefix(model_name: str) -> str:
    """Return the name by which timm finds a model of the Hub; timm's own names stay as they are.

    Args:
        model_name: the name of the model.
    """
    return f"hf-hub:{model_name}" if "/" in model_name and not model_name.startswith("hf-hub:") else model_name


def create_empty_model(
    model_name: str, library_name: str | None, trust_remote_code: bool = False, access_token: str | None = None
) -> Any:
    """Build a model without weights, on the meta device.

    Args:
        model_name: the name of a model on the Hub, or a local folder or config file.
        library_name: "transformers" or "timm". May be None if the Hub or the config says it.
        trust_remote_code: run the model's own code.
        access_token: for models that need one.

    Returns:
        The model.

    Raises:
        ValueError: there is no such model, or its library is unknown or not installed.
    """
    from accelerate.big_modeling import init_empty_weights

    library = library_of(model_name, library_name, access_token)
    with init_empty_weights():
        if library == "timm":
            return timm_model(model_name)
        from transformers import AutoModel

        config = transformers_config(model_name, trust_remote_code, access_token)
        return AutoModel.from_config(config, trust_remote_code=trust_remote_code)


def library_of(model_name: str, library_name: str | None, token: str | None = None) -> str:
    """Return the library that builds a model, which must be installed: `library_name`, or what config or Hub say."""
    if library_name is None:
        local = _local_config(model_name)
        if local is not None:
            library_name = "timm" if "pretrained_cfg" in _json(local) else "transformers"
        else:
            library_name = _library_of_hub(model_name, token)
    if library_name not in ("timm", "transformers"):
        raise ValueError(
            f"{model_name} is a model of {library_name!r}: only those of transformers and timm can be built here."
        )
    from accelerate.available import has_package

    if not has_package(library_name):
        raise ValueError(
            f"{model_name} is a model of {library_name}, which is not installed: `pip install {library_name}`."
        )
    return library_name


def _library_of_hub(model_name: str, token: str | None) -> str:
    try:
        info = verify_on_hub(model_name, token)
    except Exception as error:  # whatever the network layer of the day raises
        raise ValueError(
            f"The Hub could not be asked about {model_name} ({type(error).__name__}: {error}): name a local folder or "
            "config file, or pass --library_name to use what was downloaded before."
        ) from None
    if not info:
        raise ValueError(f"There is no model {model_name} on the Hub, and no such folder or file here: check its name.")
    if info == "gated":
        raise ValueError(f"{model_name} is gated: ask for access on its page, and log in with `hf auth login`.")
    if not getattr(info, "library_name", None):
        raise ValueError(f"The Hub does not say which library {model_name} is for: pass --library_name.")
    return str(info.library_name)


def _local_config(model_name: str) -> Path | None:
    path = Path(model_name).expanduser()
    found = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not found.is_file():
        raise ValueError(f"The folder {path} has no config.json: name the folder of a model, or a config file.")
    if not found.is_file() and (model_name.startswith((".", "/", "~")) or path.suffix == ".json"):
        raise ValueError(f"There is no folder or file {model_name} here: check its name.")
    return found if found.is_file() else None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): name the config file of a model.") from None


def transformers_config(model_name: str, trust_remote_code: bool, token: str | None = None) -> Any:
    """Load the config of a transformers model."""
    from transformers import AutoConfig

    local = _local_config(model_name)
    return AutoConfig.from_pretrained(local or model_name, trust_remote_code=trust_remote_code, token=token)


def timm_model(model_name: str) -> Any:
    """Create a timm model on the default device."""
    import timm

    local = Path(model_name).expanduser().is_dir()
    return timm.create_model(f"local-dir:{model_name}" if local else add_timm_hub_prefix(model_name), pretrained=False)
