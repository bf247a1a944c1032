"""Folders in Hugging Face's format, whatever the model: config.json, and model.safetensors or its shards with an index.

Only safetensors are read, and an index may only name files beside it: what a file from a stranger says cannot run code
or reach outside its folder. Symbolic links in the folder are followed: Hugging Face's cache is made of them.
"""

import json
import re
from pathlib import Path

from ringtide.models import BadInput, line

_DTYPES = "F64", "F32", "F16", "BF16"


def files_of(folder) -> dict[str, str]:
    """{tensor name: file name}, from the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if not (folder / "model.safetensors").is_file():
            raise BadInput(f"{folder}: neither model.safetensors nor model.safetensors.index.json is there")
        with _open(folder / "model.safetensors", "numpy") as file:
            return dict.fromkeys(file.keys(), "model.safetensors")
    files = json_of(folder, index.name).get("weight_map")
    if not isinstance(files, dict):
        raise BadInput(f"{index}: no weight_map in it")
    for name in files.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name, re.ASCII):
            raise BadInput(
                f"{index}: {name!r} is not the plain name of a .safetensors file in the same folder: refused"
            )
    return files


def read(path, name, framework):
    """A tensor as an array of `framework`, one of safetensors' names for them."""
    with _open(path, framework) as file:
        if name not in file.keys():  # noqa: SIM118  not a dict
            raise BadInput(f"{path}: holds no {name}, though its index says so")
        if (dtype := file.get_slice(name).get_dtype()) not in _DTYPES:
            raise BadInput(
                f"{path}: {name} holds {dtype}, only {', '.join(_DTYPES)} are read: convert the model to one"
            )
        return file.get_tensor(name)


def names(path, framework) -> list[str]:
    """Of the tensors in a file."""
    with _open(path, framework) as file:
        return list(file.keys())


def _open(path, framework):
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path}: not a readable safetensors file ({line(error)})") from None


def json_of(folder, name) -> dict:
    """The object in a JSON file."""
    path = folder / name
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise BadInput(f"{path}: {line(error)}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8; nested too deep
        raise BadInput(f"{path}: not JSON ({line(error)})") from None
    if not isinstance(content, dict):
        raise BadInput(f"{path}: expected a JSON object")
    return content


def write(folder, tensors: dict, config: dict, save_file) -> None:
    """Writes config.json and model.safetensors. save_file: safetensors' own, of the framework of the tensors."""
    from safetensors import SafetensorError

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / ".model.safetensors.part"
    try:
        save_file(tensors, part, metadata={"format": "pt"})
    except SafetensorError as error:  # how the library tells of a full disk
        part.unlink(missing_ok=True)
        raise OSError(f"{folder / 'model.safetensors'}: {error}") from None
    part.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
